"""Devices of every generation, of which a test machine has none: the tests use their names and numbers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import GPT2, GPT2Config, _attention, causal_attention, generate, has_bfloat16
from nnx_gpt2._target import Target

OLD = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
NEW = SimpleNamespace(platform="gpu", device_kind="A100-SXM4-40GB", compute_capability="8.0")
NEWER = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (OLD, False),
        (NEW, True),
        (NEWER, True),
        (SimpleNamespace(device_kind="AMD Instinct MI250", compute_capability="gfx90a"), True),
        (SimpleNamespace(device_kind="TPU v4"), True),
    ],
)
def test_nvidias_gpus_before_ampere_have_no_bfloat16(device, expected):
    assert has_bfloat16(device) == expected


def test_the_devices_of_this_machine_have_bfloat16():
    assert has_bfloat16(jax.devices()[0])


def test_auto_takes_the_plain_formula_on_an_old_gpu(monkeypatch):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 2, 16), jnp.bfloat16)
    expected = causal_attention(q, k, v, backend="xla")
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(OLD, 1))
    np.testing.assert_array_equal(causal_attention(q, k, v), expected)
    with pytest.raises(ValueError, match="attention backend cudnn must have bfloat16 on an NVIDIA GPU of compute cap"):
        causal_attention(q, k, v, backend="cudnn")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="test_attention runs cuDNN here")
@pytest.mark.parametrize("device", [NEW, NEWER])
def test_auto_takes_cudnn_on_a_new_gpu(device, monkeypatch):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 2, 16), jnp.bfloat16)
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(device, 1))
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):  # jax itself looks for the library
        causal_attention(q, k, v)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN would not raise")
def test_a_prompt_is_read_by_the_plain_formula_if_the_config_says_so(monkeypatch):
    plain, auto = (
        GPT2(
            GPT2Config(
                vocab_size=65, seq_len=16, num_layers=1, num_heads=2, embed_dim=32, dtype="bfloat16", attention=backend
            ),
            rngs=nnx.Rngs(0),
        )
        for backend in ("xla", "auto")
    )
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(NEW, 1))
    assert len(generate(plain, [[1, 2, 3]], 2, temperature=0.0)[0]) == 5
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        generate(auto, [[1, 2, 3]], 2, temperature=0.0)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN would not raise")
@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize(
    ("num_positions", "head_dim", "is_supported"),
    [
        (64, 8, True),
        (2, 128, True),
        (63, 64, False),
        (1, 64, False),
        (64, 25, False),
        (64, 100, False),
        (64, 160, False),
    ],
)
def test_auto_takes_the_plain_formula_for_shapes_that_cudnn_rejects(
    num_positions, head_dim, is_supported, has_segments, monkeypatch
):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, num_positions, 2, head_dim), jnp.bfloat16)
    ids = jnp.zeros((2, num_positions), jnp.int32) if has_segments else None
    expected = causal_attention(q, k, v, segment_ids_BT=ids, backend="xla")
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(NEW, 1))
    if is_supported:
        with pytest.raises(RuntimeError, match="cuDNN is not detected"):
            causal_attention(q, k, v, segment_ids_BT=ids)
        return
    np.testing.assert_array_equal(causal_attention(q, k, v, segment_ids_BT=ids), expected)
    with pytest.raises(ValueError, match="an even number of positions, heads of a width that is a multiple of 8 up to"):
        causal_attention(q, k, v, segment_ids_BT=ids, backend="cudnn")
