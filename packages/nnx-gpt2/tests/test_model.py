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
    merge,
    num_params,
    split_params,
    stack_layers,
    unstack_layers,
)


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


def test_more_tokens_than_the_context_are_rejected(model):
    with pytest.raises(ValueError, match=r"sequences must have at most 16 tokens \(seq_len\), got 17"):
        model(jnp.zeros((1, 17), jnp.int32))


def test_initial_values_are_those_of_gpt2():
    config = GPT2Config(vocab_size=512, seq_len=64, num_layers=8, num_heads=4, embed_dim=256)
    model = GPT2(config, rngs=nnx.Rngs(0))
    for kernel, std in (
        (model.wpe.embedding, 0.02),
        (model.h[3].attn.c_attn.kernel, 0.02),
        (model.h[3].mlp.c_fc.kernel, 0.02),
        (model.h[3].attn.c_proj.kernel, 0.005),
        (model.h[3].mlp.c_proj.kernel, 0.005),
    ):
        assert float(jnp.std(value(kernel))) == pytest.approx(std, rel=0.02)
    is_token = slice(config.vocab_size)
    assert float(jnp.std(value(model.wte.embedding)[is_token])) == pytest.approx(0.02, rel=0.02)
    assert not jnp.isclose(value(model.h[0].mlp.c_fc.kernel), value(model.h[1].mlp.c_fc.kernel)).mean() > 0.01
    assert not value(model.h[0].attn.c_attn.bias).any()
    assert (value(model.ln_f.scale) == 1).all()


def test_num_params_counts_all_parameters_except_the_padding(tiny, model):
    held = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert held - (tiny.padded_vocab_size - tiny.vocab_size) * tiny.embed_dim == num_params(tiny)


def test_dropout_needs_a_key_and_follows_it(tokens):
    config = GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32, dropout_rate=0.5)
    model = GPT2(config, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(model(tokens), model(tokens))
    one = model(tokens, dropout_key=jax.random.key(3))
    np.testing.assert_array_equal(one, model(tokens, dropout_key=jax.random.key(3)))
    assert not np.allclose(one, model(tokens, dropout_key=jax.random.key(4)))
    assert not np.allclose(one, model(tokens))


def test_bfloat16_computes_in_bfloat16_and_stays_close(tiny, tokens):
    full = GPT2(tiny, rngs=nnx.Rngs(0))
    half = GPT2(dataclasses.replace(tiny, dtype="bfloat16"), rngs=nnx.Rngs(0))
    assert half.wte.embedding.dtype == jnp.float32
    activations = half.final_activations(tokens)
    assert activations.dtype == jnp.bfloat16
    np.testing.assert_allclose(half(tokens), full(tokens), atol=0.02)


def test_logits_in_bfloat16_are_sums_in_float32(tiny, tokens):
    """Neighbouring bfloat16 numbers near 100 differ by a half."""
    model = GPT2(dataclasses.replace(tiny, dtype="bfloat16"), rngs=nnx.Rngs(0))
    model.wte.embedding[...] = 10 * jax.random.normal(jax.random.key(0), model.wte.embedding.shape)
    logits = model(tokens)
    assert logits.dtype == jnp.float32
    x_MC = np.asarray(model.final_activations(tokens), np.float64)
    head_VC = np.asarray(value(model.wte.embedding)[:65].astype(jnp.bfloat16), np.float64)
    assert np.abs(logits).max() > 100
    np.testing.assert_allclose(logits.reshape(-1, 65), x_MC @ head_VC.T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", [{"remat": "dots"}, {"remat": "full"}, {"scan_layers": True}])
def test_remat_and_scan_compute_the_same(tiny, tokens, options):
    """The initial parameters and the dropout are the same, too."""
    plain = GPT2(dataclasses.replace(tiny, dropout_rate=0.1), rngs=nnx.Rngs(0))
    other = GPT2(dataclasses.replace(tiny, dropout_rate=0.1, **options), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(other(tokens), plain(tokens), atol=1e-6)
    key = jax.random.key(3)

    def gradient(model):
        loss = lambda params: jnp.square(merge(model.config, params)(tokens, dropout_key=key)).mean()  # noqa: E731
        grads = jax.jit(jax.grad(loss))(split_params(model))
        return unstack_layers(grads) if model.config.scan_layers else grads

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient(other), gradient(plain))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_keeps_less_for_the_backward_pass(tiny, tokens, scan_layers):
    def kept_bytes(remat):
        config = dataclasses.replace(tiny, remat=remat, scan_layers=scan_layers)
        params = abstract_train_state(config, optax.sgd(1.0)).params
        pullback = jax.eval_shape(lambda params: jax.vjp(lambda p: merge(config, p)(tokens), params)[1], params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    assert 1.2 * kept_bytes("full") < kept_bytes("dots")
    assert 1.2 * kept_bytes("dots") < kept_bytes("none")


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(("remat", "keeps_scores"), [("none", True), ("dots", False), ("full", False)])
def test_remat_keeps_no_scores_of_attention(tiny, remat, keeps_scores, scan_layers):
    """Their memory grows with the square of the length, here 47."""
    config = dataclasses.replace(tiny, seq_len=47, remat=remat, scan_layers=scan_layers)
    params, tokens = abstract_train_state(config, optax.sgd(1.0)).params, jnp.zeros((3, 47), jnp.int32)
    pullback = jax.eval_shape(lambda params: jax.vjp(lambda p: merge(config, p)(tokens), params)[1], params)
    assert any(leaf.shape.count(47) > 1 for leaf in jax.tree.leaves(pullback)) == keeps_scores


@pytest.fixture
def stacked(tiny):
    return split_params(GPT2(dataclasses.replace(tiny, scan_layers=True), rngs=nnx.Rngs(0)))


def test_layers_are_stacked_and_unstacked(model, stacked):
    params = split_params(model)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), stacked)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)
    in_another_order = {**params, "h": {1: params["h"][1], 0: params["h"][0]}}
    jax.tree.map(np.testing.assert_array_equal, stack_layers(in_another_order), stacked)


def test_stacked_layers_keep_their_type(model):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), split_params(model))
    for changed in (stack_layers(params), unstack_layers(stack_layers(params))):
        assert {leaf.dtype for leaf in jax.tree.leaves(changed)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("use", [lambda params, _: stack_layers(params), lambda params, config: merge(config, params)])
def test_stacked_layers_are_rejected_where_separate_layers_are_needed(tiny, stacked, use):
    with pytest.raises(ValueError, match=r"layers must be separate, got stacked layers\. Call unstack_layers\."):
        use(stacked, tiny)


def test_separate_layers_cannot_be_unstacked(model):
    with pytest.raises(ValueError, match=r"layers must be stacked, got separate layers\. Call stack_layers\."):
        unstack_layers(split_params(model))


def test_another_number_of_layers_cannot_be_merged(tiny, model):
    with pytest.raises(ValueError, match=r"params must have 3 layers, as the config, got 2\."):
        merge(dataclasses.replace(tiny, num_layers=3), split_params(model))


def test_a_position_sees_only_its_own_segment(model, tokens):
    segments = jnp.tile(jnp.repeat(jnp.array([0, 1]), jnp.array([6, 10]))[None], (3, 1))
    changed = tokens.at[:, :6].set(0)
    one, other = model(tokens, segment_ids=segments), model(changed, segment_ids=segments)
    np.testing.assert_array_equal(one[:, 6:], other[:, 6:])
    assert not np.allclose(one[:, :6], other[:, :6])


@pytest.mark.parametrize(("ids", "found"), [([[0, 65]], "0 to 65"), ([[-1, 3]], "-1 to 3")])
def test_ids_outside_the_vocabulary_are_rejected(model, ids, found):
    with pytest.raises(ValueError, match=re.escape(f"token ids must lie in [0, 65), got {found}.")):
        model(jnp.array(ids))


def test_the_feed_forward_width_and_the_epsilon_are_the_configs(tiny):
    model = GPT2(dataclasses.replace(tiny, mlp_dim=40, norm_epsilon=1e-3), rngs=nnx.Rngs(0))
    assert value(model.h[0].mlp.c_fc.kernel).shape == (32, 40)
    assert model.ln_f.epsilon == 1e-3


def test_the_attention_kernel_is_the_configs(tiny, tokens):
    model = GPT2(dataclasses.replace(tiny, attention="splash"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"attention backend splash must have a multiple of 128 positions"):
        model(tokens)


def test_padding_rows_are_zero(tiny, model):
    assert not value(model.wte.embedding)[tiny.vocab_size :].any()
