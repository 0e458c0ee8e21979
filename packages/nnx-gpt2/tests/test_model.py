import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import GPT2, GPT2Config, causal_attention, num_params, window_losses


def value(param: nnx.Param[jax.Array] | None) -> jax.Array:
    assert param is not None
    return param[...]


@pytest.fixture
def model(tiny):
    return GPT2(tiny, rngs=nnx.Rngs(0))


@pytest.fixture
def tokens(tiny):
    return jax.random.randint(jax.random.key(1), (3, 16), 0, tiny.vocab_size)


def test_logits_cover_the_true_vocabulary(model, tokens):
    logits = model(tokens)
    assert logits.shape == (3, 16, 65)
    assert logits.dtype == jnp.float32


def test_a_position_does_not_see_what_comes_after_it(model, tokens):
    changed = tokens.at[:, 10:].set(0)
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert not np.allclose(before[:, 10:], after[:, 10:])


def test_more_tokens_than_the_context_are_refused(model):
    with pytest.raises(ValueError, match="expected at most 16 tokens per sequence"):
        model(jnp.zeros((1, 17), jnp.int32))


def test_initial_values_are_those_of_gpt2():
    config = GPT2Config(vocab_size=512, seq_len=64, num_layers=8, num_heads=4, embed_dim=256)
    model = GPT2(config, rngs=nnx.Rngs(0))
    for kernel, std in (
        (model.wte.embedding, 0.02),
        (model.h[3].attn.c_attn.kernel, 0.02),
        (model.h[3].mlp.c_fc.kernel, 0.02),
        (model.h[3].attn.c_proj.kernel, 0.005),
        (model.h[3].mlp.c_proj.kernel, 0.005),
    ):
        assert float(jnp.std(value(kernel))) == pytest.approx(std, rel=0.02)
    assert not value(model.h[0].attn.c_attn.bias).any()
    assert (value(model.ln_f.scale) == 1).all()


def test_parameters_are_those_that_are_counted_beside_the_padding(tiny, model):
    held = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert held - (tiny.padded_vocab_size - tiny.vocab_size) * tiny.embed_dim == num_params(tiny)


def test_initial_loss_is_that_of_a_uniform_guess(model, tiny):
    windows = jax.random.randint(jax.random.key(2), (8, 17), 0, tiny.vocab_size)
    assert float(window_losses(model, windows).mean()) == pytest.approx(np.log(65), abs=0.02)


def test_loss_is_the_negative_log_probability_of_the_targets(model, tiny):
    windows = np.asarray(jax.random.randint(jax.random.key(2), (4, 17), 0, tiny.vocab_size), np.uint16)
    logits = np.asarray(model(jnp.asarray(windows[:, :-1], jnp.int32)), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probs, windows[:, 1:, None].astype(np.int64), -1)[..., 0].mean(1)
    np.testing.assert_allclose(window_losses(model, jnp.asarray(windows)), expected, rtol=1e-6)


def test_padding_rows_get_no_gradient(model, tiny):
    windows = jax.random.randint(jax.random.key(2), (4, 17), 0, tiny.vocab_size)
    grads = nnx.grad(lambda model: window_losses(model, windows).mean())(model)
    embedding = grads["wte"]["embedding"][...]
    assert not embedding[tiny.vocab_size :].any()
    assert embedding[: tiny.vocab_size].any()


def test_dropout_needs_a_key_and_follows_it(tokens):
    config = GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32, dropout_rate=0.5)
    model = GPT2(config, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(model(tokens), model(tokens))
    one = model(tokens, dropout_key=jax.random.key(3))
    np.testing.assert_array_equal(one, model(tokens, dropout_key=jax.random.key(3)))
    assert not np.allclose(one, model(tokens, dropout_key=jax.random.key(4)))
    assert not np.allclose(one, model(tokens))


def test_dropped_attention_weights_keep_their_expectation():
    q, k, v = (jax.random.normal(key, (1, 4, 1, 8)) for key in jax.random.split(jax.random.key(0), 3))
    plain = causal_attention(q, k, v)
    keys = jax.random.split(jax.random.key(1), 4000)
    dropped = jax.vmap(lambda key: causal_attention(q, k, v, dropout_rate=0.5, dropout_key=key))(keys)
    np.testing.assert_allclose(dropped.mean(0), plain, atol=0.15)
    # The first position has one weight: half of the time all of it is gone.
    assert float((dropped[:, 0, 0] == 0).all(-1).mean()) == pytest.approx(0.5, abs=0.04)


def test_attention_equals_jax_own():
    q, k, v = (jax.random.normal(key, (2, 8, 3, 16)) for key in jax.random.split(jax.random.key(0), 3))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(causal_attention(q, k, v), expected, atol=2e-6)


def test_bfloat16_computes_in_bfloat16_and_stays_close(tiny, tokens):
    full = GPT2(tiny, rngs=nnx.Rngs(0))
    half = GPT2(dataclasses.replace(tiny, dtype="bfloat16"), rngs=nnx.Rngs(0))
    assert half.wte.embedding.dtype == jnp.float32
    logits = half(tokens)
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(logits.astype(jnp.float32), full(tokens), atol=0.02)
