"""The loss in chunks, and its gradient, against the plain formula."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_gpt2 import (
    GPT2,
    GPT2Config,
    abstract_train_state,
    mean_loss,
    merge,
    split_params,
    token_losses,
)


def windows(config, batch_size=3, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch_size, 17)).astype(np.uint16)


@nnx.jit
def plain_losses(model, windows):
    """Compute the losses from full logits."""
    tokens = jnp.asarray(windows, jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])


@pytest.fixture
def model(tiny):
    return GPT2(tiny, rngs=nnx.Rngs(0))


# One chunk; full chunks; a padded last chunk; chunks of one position.
@pytest.mark.parametrize("chunk", [4096, 24, 20, 1])
def test_loss_and_gradient_are_those_of_the_full_logits(model, tiny, chunk):
    config = dataclasses.replace(tiny, loss_chunk_tokens=chunk)
    params, batch = split_params(model), jnp.asarray(windows(tiny))
    losses = jax.jit(lambda params: token_losses(merge(config, params), batch))(params)
    np.testing.assert_allclose(losses, plain_losses(model, batch), atol=2e-6)
    loss, grads = jax.jit(jax.value_and_grad(lambda params: mean_loss(merge(config, params), batch)))(params)
    plain = jax.jit(jax.value_and_grad(lambda params: plain_losses(merge(tiny, params), batch).mean()))
    expected, expected_grads = plain(params)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, expected_grads)


# Positions of a chunk, for 8 windows: 1 at least; 1, because 2 are 16 tokens; 2; 2, because 3 are 24; 4 of at most 5.
@pytest.mark.parametrize(("chunk", "num_rows"), [(3, 8), (15, 8), (16, 16), (20, 16), (40, 32)])
def test_no_more_logits_exist_at_once_than_the_config_allows(tiny, chunk, num_rows):
    config = dataclasses.replace(tiny, vocab_size=2000, num_layers=1, loss_chunk_tokens=chunk)
    params = abstract_train_state(config, optax.sgd(1.0)).params
    windows = jax.ShapeDtypeStruct((8, 17), jnp.uint16)
    program = jax.make_jaxpr(jax.grad(lambda params, windows: mean_loss(merge(config, params), windows)))
    sizes = {int(size) for size in re.findall(r"f32\[(\d+),2048\]", str(program(params, windows)))}
    assert sizes == {num_rows}


def test_only_the_logits_of_one_chunk_exist(tiny):
    """The compiled step has no array of all tokens by the vocabulary."""
    config = dataclasses.replace(tiny, vocab_size=2000, loss_chunk_tokens=16)
    model = GPT2(config, rngs=nnx.Rngs(0))
    params, batch = split_params(model), jnp.asarray(windows(config, batch_size=8))
    step = jax.jit(jax.grad(lambda params: mean_loss(merge(config, params), batch)))
    text = str(step.lower(params).compile().as_text())
    assert "f32[16,2048]" in text
    assert "f32[128,2048]" not in text
    assert "f32[8,16,2048]" not in text


def test_padding_rows_get_no_gradient(model, tiny):
    grads = nnx.jit(nnx.grad(lambda model: mean_loss(model, jnp.asarray(windows(tiny)))))(model)
    embedding = grads["wte"]["embedding"][...]
    assert not embedding[tiny.vocab_size :].any()
    assert embedding[: tiny.vocab_size].any()


def test_initial_loss_is_that_of_a_uniform_guess(model, tiny):
    assert float(mean_loss(model, jnp.asarray(windows(tiny)))) == pytest.approx(np.log(65), abs=0.02)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"scan_layers": True, "remat": "full", "loss_chunk_tokens": 5}],
)
def test_gradients_are_finite_differences_in_float64(options):
    with jax.enable_x64(True):
        config = GPT2Config(
            vocab_size=11, seq_len=6, num_layers=2, num_heads=2, embed_dim=8,
            dtype="float64", param_dtype="float64", **options,
        )  # fmt: skip
        params = jax.tree.map(
            # Larger than GPT-2's initial values, to make each part of the network matter.
            lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype),
            split_params(GPT2(config, rngs=nnx.Rngs(0))),
        )
        batch = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 7)))
        # The factor tests that the gradient includes operations after the loss.
        loss = jax.jit(lambda params: 3 * mean_loss(merge(config, params), batch))
        grads = jax.jit(jax.grad(lambda params: 3 * mean_loss(merge(config, params), batch)))(params)
        leaves, treedef = jax.tree.flatten(params)
        for number, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
            assert grad.dtype == jnp.float64
            direction = np.random.default_rng(number).normal(size=leaf.shape)

            def at(distance, number=number, leaf=leaf, direction=direction):
                moved = [*leaves[:number], leaf + distance * direction, *leaves[number + 1 :]]
                return float(loss(jax.tree.unflatten(treedef, moved)))

            numeric = (at(1e-5) - at(-1e-5)) / 2e-5
            assert numeric == pytest.approx(float((grad * direction).sum()), rel=1e-5, abs=1e-8)
