"""Each dropout mask is independent, and only training has dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_gpt2 import (
    GPT2Config,
    abstract_train_state,
    causal_attention,
    create_train_state,
    evaluate_tokens,
    generate,
    make_train_step,
    mean_loss,
    merge,
)
from nnx_gpt2._dropout import dropout
from nnx_gpt2._model import Attention

SGD = optax.sgd(1.0)


def windows(config, batch_size):
    return np.random.default_rng(0).integers(0, config.vocab_size, (batch_size, 17)).astype(np.int32)


@pytest.fixture
def dropping(tiny) -> GPT2Config:
    return dataclasses.replace(tiny, dropout_rate=0.5)


@pytest.fixture
def sharp(tiny):
    """Parameters so large that dropout changes the likeliest token."""
    params = create_train_state(tiny, SGD, jax.random.key(0)).params
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_embeddings_and_both_branches_of_each_layer_have_independent_masks(scan_layers):
    """The stream is a sum of five constants, 1 to 16, with independent masks: all 32 sums are equally likely."""
    config = GPT2Config(
        vocab_size=4, seq_len=64, num_layers=2, num_heads=2, embed_dim=512, dropout_rate=0.5, scan_layers=scan_layers
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract_train_state(config, SGD).params)
    params["wte"]["embedding"][:] = 1
    params["ln_f"]["scale"][:] = 1
    for layer, (attn, mlp) in enumerate(((2, 4), (8, 16))):
        block, at = (params["h"], layer) if scan_layers else (params["h"][layer], ...)
        block["attn"]["c_proj"]["bias"][at] = attn
        block["mlp"]["c_proj"]["bias"][at] = mlp
    tokens = jnp.zeros((1, 64), jnp.int32)
    activations = jax.jit(lambda params, key: merge(config, params).final_activations(tokens, dropout_key=key))
    x_MC = np.asarray(activations(params, jax.random.key(0)))
    # The final norm shifts and scales each row. The smallest sum of a row is 0 and the largest is 31.
    low, high = x_MC.min(axis=1, keepdims=True), x_MC.max(axis=1, keepdims=True)
    sums = 31 * (x_MC - low) / (high - low)
    np.testing.assert_allclose(sums, sums.round(), atol=1e-3)
    shares = np.bincount(sums.round().astype(int).ravel(), minlength=32) / sums.size
    np.testing.assert_allclose(shares, 1 / 32, atol=0.006)  # six standard deviations


def test_attention_weights_and_outputs_have_independent_masks():
    """Each head has the value 1, and of its single weight and its output each is dropped half of the time."""
    config = GPT2Config(vocab_size=4, seq_len=1, num_layers=1, num_heads=64, embed_dim=64, dropout_rate=0.5)
    attention = Attention(config, rngs=nnx.Rngs(0))
    attention.c_attn.bias[...] = jnp.ones((3, 64))
    attention.c_proj.kernel[...] = jnp.eye(64)
    x_MC = np.asarray(attention(jnp.zeros((200, 64)), 1, None, jax.random.key(0)))
    assert set(x_MC.ravel()) == {0, 4}
    assert (x_MC == 4).mean() == pytest.approx(1 / 4, abs=0.02)  # five standard deviations


def slope(dropped, whole):
    """Return the factor between the elements that were kept and the elements before, by least squares."""
    dropped, whole = np.asarray(dropped, np.float64), np.asarray(whole, np.float64)
    return (dropped * whole).sum() / np.square(whole[dropped != 0]).sum()


def test_kept_elements_in_bfloat16_are_scaled_without_rounding_the_scale():
    """1 - 0.1 is 0.8984 in bfloat16, and its inverse 1.1131."""
    x = jax.random.normal(jax.random.key(0), (300, 300)).astype(jnp.bfloat16)
    dropped = dropout(x, 0.1, jax.random.key(1))
    assert dropped.dtype == jnp.bfloat16
    assert slope(dropped, x) == pytest.approx(1 / 0.9, rel=2e-4)
    assert float((dropped != 0).mean()) == pytest.approx(0.9, abs=0.006)  # six standard deviations


def test_kept_attention_weights_in_bfloat16_are_scaled_without_rounding_the_scale():
    """The values are the identity: the output is the weights."""
    q, k = jax.random.normal(jax.random.key(0), (2, 8, 64, 4, 64)).astype(jnp.bfloat16)
    v = jnp.broadcast_to(jnp.eye(64, dtype=jnp.bfloat16)[None, :, None], q.shape)
    dropped = causal_attention(q, k, v, dropout_rate=0.1, dropout_key=jax.random.key(1))
    weights = causal_attention(q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32))
    assert slope(dropped, weights) == pytest.approx(1 / 0.9, rel=2e-4)
    assert float((dropped != 0).sum() / (weights != 0).sum()) == pytest.approx(0.9, abs=0.006)


def test_each_step_has_its_own_key(dropping):
    """The same batch, key and parameters at steps 0, 1 and 2."""
    dropping, optimizer = dataclasses.replace(dropping, num_layers=1), optax.sgd(0.0)
    state, step = create_train_state(dropping, optimizer, jax.random.key(0)), make_train_step(dropping, optimizer)
    params, batch, key = jax.tree.map(jnp.array, state.params), windows(dropping, 2), jax.random.key(7)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3
    loss_of = jax.jit(lambda key: mean_loss(merge(dropping, params), jnp.asarray(batch), dropout_key=key))
    np.testing.assert_allclose(losses, [loss_of(jax.random.fold_in(key, i)) for i in range(3)], atol=1e-5)


def test_each_microbatch_has_its_own_key(dropping):
    """An element of a position embedding gets no gradient if all four microbatches drop it."""
    dropping = dataclasses.replace(dropping, num_layers=1)
    state = create_train_state(dropping, SGD, jax.random.key(0))
    before = np.asarray(state.params["wpe"]["embedding"])
    state, _ = make_train_step(dropping, SGD, grad_accum_steps=4)(state, windows(dropping, 4), jax.random.key(7))
    is_unmoved = np.asarray(state.params["wpe"]["embedding"]) == before
    assert is_unmoved.mean() == pytest.approx(1 / 16, abs=0.05)  # one half if all four have the same mask


def test_evaluation_drops_nothing(tiny, dropping, sharp):
    tokens = windows(tiny, 8).ravel()
    assert evaluate_tokens(merge(dropping, sharp), tokens).loss == evaluate_tokens(merge(tiny, sharp), tokens).loss


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_drops_nothing(tiny, dropping, sharp, use_cache):
    dropped, kept = (
        generate(merge(config, sharp), [[1, 2, 3], [4]], 12, temperature=0.0, use_cache=use_cache)
        for config in (dropping, tiny)
    )
    assert dropped == kept
