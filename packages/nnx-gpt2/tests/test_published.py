"""The model against GPT-2 as transformers computes it, on a small model of random weights."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from nnx_gpt2 import GPT2Config, generate, merge, window_losses

FOLDER = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"


@pytest.fixture(scope="module")
def model():
    published = json.loads((FOLDER / "config.json").read_text())
    config = GPT2Config(
        vocab_size=published["vocab_size"],
        seq_len=published["n_positions"],
        num_layers=published["n_layer"],
        num_heads=published["n_head"],
        embed_dim=published["n_embd"],
    )
    tensors = load_file(FOLDER / "model.safetensors")

    def layer(name: str, weight: str) -> dict[str, jnp.ndarray]:
        return {
            weight: jnp.asarray(tensors[f"transformer.{name}.weight"]),
            "bias": jnp.asarray(tensors[f"transformer.{name}.bias"]),
        }

    padding = ((0, config.padded_vocab_size - config.vocab_size), (0, 0))
    params = {
        "wte": {"embedding": jnp.pad(tensors["transformer.wte.weight"], padding)},
        "wpe": {"embedding": jnp.asarray(tensors["transformer.wpe.weight"])},
        "ln_f": layer("ln_f", "scale"),
        "h": {
            i: {
                "ln_1": layer(f"h.{i}.ln_1", "scale"),
                "attn": {name: layer(f"h.{i}.attn.{name}", "kernel") for name in ("c_attn", "c_proj")},
                "ln_2": layer(f"h.{i}.ln_2", "scale"),
                "mlp": {name: layer(f"h.{i}.mlp.{name}", "kernel") for name in ("c_fc", "c_proj")},
            }
            for i in range(config.num_layers)
        },
    }
    return merge(config, params)


@pytest.fixture(scope="module")
def expected():
    return np.load(FOLDER / "expected.npz")


def test_logits(model, expected):
    np.testing.assert_allclose(model(jnp.asarray(expected["input_ids"])), expected["logits"], atol=1e-4)


def test_loss(model, expected):
    losses = window_losses(model, jnp.asarray(expected["input_ids"]))
    assert float(losses.mean()) == pytest.approx(float(expected["loss"]), abs=1e-5)


def test_greedy_tokens(model, expected):
    tokens = generate(model, jnp.asarray(expected["prompt"]), 24, temperature=0.0)
    np.testing.assert_array_equal(tokens, expected["greedy"])
