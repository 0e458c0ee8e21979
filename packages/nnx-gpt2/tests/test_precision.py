"""Sums in float32 inside a bfloat16 model. bfloat16 has eight significant bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import GPT2, GPT2Config, causal_attention, make_mesh, replicated
from nnx_gpt2._embedding import add_positions, lookup
from nnx_gpt2._generate import _decode, _prefill
from nnx_gpt2._linear import Linear
from nnx_gpt2._loss import _losses_by_chunk, _mean_head_loss
from nnx_gpt2._model import _Norm
from nnx_gpt2._target import compiled_for

CONFIG = GPT2Config(
    vocab_size=128, seq_len=512, num_layers=1, num_heads=1, embed_dim=16, dtype="bfloat16", loss_chunk_tokens=1
)


def gradient(of, table, mesh):
    """Return the gradient of the sum of a function of a table, on one device or over a mesh."""

    def total(table):
        with compiled_for(mesh):
            return jnp.sum(of(table), dtype=jnp.float32)

    return jax.jit(jax.grad(total), out_shardings=None if mesh is None else replicated(mesh))(table)


MESHES = pytest.mark.parametrize("mesh", [None, make_mesh(fsdp=2, tensor=2)], ids=["one", "mesh"])


@MESHES
def test_the_gradient_of_an_embedding_counts_beyond_256_tokens(mesh):
    """In bfloat16, 256 + 1 is 256, and the 515 tokens of a device are 516."""
    grad = gradient(lambda table: lookup(table, jnp.full((4, 515), 3), "bfloat16")[0], jnp.zeros((128, 4)), mesh)
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, np.where(np.arange(128)[:, None] == 3, 2060.0, 0.0) * np.ones(4))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "expected"),
    [("bfloat16", "float32", 515), ("bfloat16", "bfloat16", 516), ("float32", "bfloat16", 515)],
)
@pytest.mark.parametrize("out_dims", [5, (3, 5)])
def test_the_gradient_of_a_kernel_is_not_rounded_unless_asked(out_dims, dtype, grad_dtype, expected):
    """In bfloat16, 515 is 516. The gradient of a bias, and one of a float32 model, is never rounded."""
    types = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.float32, "grad_dtype": grad_dtype}
    layer = Linear(4, out_dims, rngs=nnx.Rngs(0), **types)
    grads = nnx.grad(lambda layer: layer(jnp.ones((515, 4))).astype(jnp.float32).sum())(layer)
    assert grads["kernel"].dtype == grads["bias"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["kernel"][...], expected)
    np.testing.assert_array_equal(grads["bias"][...], 515)


@MESHES
def test_the_gradient_of_a_position_is_not_rounded(mesh):
    x = jnp.zeros((2060, 2, 4), jnp.bfloat16)
    grad = gradient(lambda table: add_positions(x, table), jnp.zeros((3, 4)), mesh)
    np.testing.assert_array_equal(grad, np.array([2060.0, 2060.0, 0.0])[:, None] * np.ones(4))


def test_a_norm_of_a_bfloat16_model_rounds_its_result_alone():
    """In bfloat16, 1.003 is 1, and 515 is 516."""
    norm = _Norm(CONFIG, nnx.Rngs(0))
    assert norm.scale is not None
    norm.scale[...] = jnp.full(16, 1.003)
    x = (4 + jax.random.normal(jax.random.key(0), (515, 16))).astype(jnp.bfloat16)
    centered = np.asarray(x, np.float64) - np.asarray(x, np.float64).mean(1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5) * 1.003
    found = norm(x)
    assert found.dtype == jnp.bfloat16
    assert (found == expected.astype(jnp.bfloat16)).mean() > 0.99
    grads = nnx.grad(lambda norm: norm(x).astype(jnp.float32).sum())(norm)
    np.testing.assert_array_equal(grads["bias"][...], 515)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_float32_residual_stream_adds_what_bfloat16_loses(scan_layers):
    config = GPT2Config(vocab_size=65, seq_len=16, num_layers=8, num_heads=2, embed_dim=32, scan_layers=scan_layers)
    tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, 65)

    def logits(**types):
        return GPT2(dataclasses.replace(config, **types), rngs=nnx.Rngs(0))(tokens)

    exact = logits()
    errors = [
        float(jnp.abs(logits(dtype="bfloat16", residual_dtype=stream) - exact).mean())
        for stream in (None, "bfloat16", "float32")
    ]
    assert errors[0] == errors[1] > 1.3 * errors[2] > 0


@pytest.mark.parametrize("stream", ["bfloat16", "float32"])
def test_generation_begins_with_embeddings_of_the_type_of_the_residual_stream(stream):
    config = GPT2Config(vocab_size=65, seq_len=16, num_layers=1, num_heads=2, embed_dim=32, dtype="bfloat16")
    model = GPT2(dataclasses.replace(config, residual_dtype=stream), rngs=nnx.Rngs(0))
    found = model.embed(jnp.arange(3), jnp.arange(3))
    assert found.dtype == stream
    table, positions = model.wte.embedding[:3].astype("bfloat16"), model.wpe.embedding[:3]
    np.testing.assert_array_equal(found, table.astype(stream) + positions.astype(stream))
    # Without its blocks, the model has the same stream.
    for layer in (model.h[0].attn.c_proj, model.h[0].mlp.c_proj):
        layer.kernel[...] = jnp.zeros_like(layer.kernel[...])
    np.testing.assert_array_equal(model.final_activations(jnp.arange(3)[None]), model.ln_f(found))


def test_generation_has_the_residual_stream_of_the_model():
    """The prompt in the cache, and a token after it."""
    config = GPT2Config(vocab_size=65, seq_len=16, num_layers=4, num_heads=2, embed_dim=32, dtype="bfloat16")
    config = dataclasses.replace(config, residual_dtype="float32")
    model = GPT2(config, rngs=nnx.Rngs(0))
    narrow = GPT2(dataclasses.replace(config, residual_dtype=None), rngs=nnx.Rngs(0))
    tokens, lengths = jax.random.randint(jax.random.key(1), (4, 16), 0, 65), jnp.full(4, 15)

    @nnx.jit
    def last_logits(model):
        blocks = [model.block(i) for i in range(4)]
        before, cache = _prefill(model, blocks, tokens[:, :15], lengths, 16)
        after, _ = _decode(model, blocks, model.padded_logits, tokens[:, 15], lengths, cache)
        return jnp.stack([before, after], axis=1)[..., :65]

    expected, error = model(tokens)[:, 14:], {}
    for name, other in (("float32", model), ("bfloat16", narrow)):
        error[name] = np.abs(last_logits(other) - expected).mean(axis=(0, 2))
    assert (3 * error["float32"] < error["bfloat16"]).all()


def head_inputs(scale):
    """Return activations and a head, and their logits in float64."""
    x = (scale * jax.random.normal(jax.random.key(0), (1, 1, 16))).astype(jnp.bfloat16)
    head = jax.random.normal(jax.random.key(1), (128, 16))
    logits = np.asarray(x[0, 0], np.float64) @ np.asarray(head.astype(jnp.bfloat16), np.float64).T
    return x, head, logits


def test_the_gradient_of_the_head_is_summed_over_all_chunks():
    """In bfloat16 most of the 512 equal chunks would be lost."""
    x, head, logits = head_inputs(1.0)
    x_BTC, targets = jnp.tile(x, (1, 512, 1)), jnp.full((1, 512), 7)
    grad = jax.jit(jax.grad(lambda head: _mean_head_loss(CONFIG, x_BTC, head, targets)))
    probs = np.exp(logits) / np.exp(logits).sum()
    expected = (probs - (np.arange(128) == 7))[:, None] * np.asarray(x[0, 0], np.float64)
    np.testing.assert_allclose(grad(head), expected, rtol=0.01, atol=1e-5)


def test_logits_are_not_rounded():
    """Above 32, neighbouring bfloat16 numbers differ by a quarter."""
    x, head, logits = head_inputs(8.0)
    expected = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits
    targets = jnp.arange(128)[None]
    losses = jax.jit(lambda x: _losses_by_chunk(CONFIG, x, head, targets))(jnp.tile(x, (1, 128, 1)))
    np.testing.assert_allclose(losses[0], expected, rtol=0, atol=1e-3)


def test_attention_scores_are_not_rounded():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        (scale * jax.random.normal(key, (1, 128, 1, 64))).astype(jnp.bfloat16)
        for key, scale in zip(keys, (16, 1, 1), strict=True)
    )
    found = causal_attention(q, k, v, backend="xla")[0, :, 0]  # the scale of heads of 64, 1/8, is exact
    q_TH, k_TH, v_TH = (np.asarray(x[0, :, 0], np.float64) for x in (q, k, v))
    weights = np.tril(np.exp(q_TH @ k_TH.T / 8))
    expected = weights / weights.sum(1, keepdims=True) @ v_TH
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=0.04)
