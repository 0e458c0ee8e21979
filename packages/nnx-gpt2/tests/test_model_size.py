import dataclasses

import jax
import pytest
from flax import nnx

from nnx_gpt2 import (
    GPT2,
    flops_per_token,
    gpt2,
    gpt2_large,
    gpt2_medium,
    gpt2_xl,
    num_params,
    peak_flops_per_s,
    split_params,
)


@pytest.mark.parametrize(
    ("config", "published"),
    [(gpt2(), 124_439_808), (gpt2_medium(), 354_823_168), (gpt2_large(), 774_030_080), (gpt2_xl(), 1_557_611_200)],
)
def test_parameter_counts_are_the_published_ones(config, published):
    assert num_params(config) == published


# GPT-2's paper has layers and widths, and its published checkpoints the heads. Each is 64 wide.
@pytest.mark.parametrize(
    ("config", "layers_heads_and_width"),
    [
        (gpt2(), (12, 12, 768)),
        (gpt2_medium(), (24, 16, 1024)),
        (gpt2_large(), (36, 20, 1280)),
        (gpt2_xl(), (48, 25, 1600)),
    ],
)
def test_presets_have_the_published_shape(config, layers_heads_and_width):
    assert (config.num_layers, config.num_heads, config.embed_dim) == layers_heads_and_width
    assert (config.vocab_size, config.seq_len, config.norm_epsilon) == (50257, 1024, 1e-5)


def test_a_feed_forward_layer_of_another_width_is_counted(tiny):
    config = dataclasses.replace(tiny, mlp_dim=40)
    params = jax.tree.leaves(split_params(GPT2(config, rngs=nnx.Rngs(0))))
    padding = (config.padded_vocab_size - config.vocab_size) * config.embed_dim
    assert num_params(config) == sum(leaf.size for leaf in params) - padding


def test_flops_per_token():
    # 6 * (124 439 808 - 1024 * 768), and 12 * 12 * 768 * 1024 for attention
    assert flops_per_token(gpt2(), attention=False) == 741_920_256
    assert flops_per_token(gpt2()) == 855_166_464


# TFLOP/s in dense bfloat16: NVIDIA's datasheets of A100, H100 and H200 (SXM), Google's of TPUs.
@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("Tesla T4", 65),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("TPU v2", 22.5),  # half a chip
        ("TPU v3", 61.5),  # half a chip
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU7x", 1153.5),  # half a chip
    ],
)
def test_peaks_are_those_of_the_datasheets(device_kind, peak):
    assert peak_flops_per_s(device_kind) == peak * 1e12


def test_an_unknown_device_has_no_peak():
    assert peak_flops_per_s(jax.devices("cpu")[0].device_kind) is None
