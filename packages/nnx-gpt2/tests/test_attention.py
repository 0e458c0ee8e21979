"""Each backend that this machine can run, against the plain formula."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_gpt2 import _attention, causal_attention, document_ids, make_mesh, replicated
from nnx_gpt2._target import Target


def heads(num_positions, num_heads=3, head_dim=16, batch_size=2):
    shape = (batch_size, num_positions, num_heads, head_dim)
    return [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3)]


def plain(q, k, v, segment_ids=None):
    """In numpy and float64: softmax(q k / sqrt(H)) v over what is visible."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones(scores.shape[-2:], bool))[None, None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    weights = np.where(visible, np.exp(scores), 0)
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def segments(num_positions):
    tokens = jax.random.randint(jax.random.key(1), (2, num_positions), 0, 20)
    return document_ids(tokens, 7)


# One block, several full blocks, and a shorter last block.
@pytest.mark.parametrize("num_positions", [1, 17, 256, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_xla(num_positions, masked):
    q, k, v = heads(num_positions)
    ids = segments(num_positions) if masked else None
    mixed = causal_attention(q, k, v, segment_ids_BT=ids, backend="xla")
    np.testing.assert_allclose(mixed, plain(q, k, v, None if ids is None else np.asarray(ids)), atol=2e-6)


# Pallas' kernel in interpret mode: the result of a TPU without its rounding.
@pytest.mark.parametrize(("num_positions", "masked"), [(128, False), (768, True)], ids=["one tile", "several tiles"])
def test_splash(num_positions, masked):
    q, k, v = heads(num_positions, num_heads=2, head_dim=64)
    ids = segments(num_positions) if masked else None

    def weighted(backend):
        def loss(q, k, v):
            mixed = causal_attention(q, k, v, segment_ids_BT=ids, backend=backend)
            return (mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape))).sum(), mixed

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    ((_, mixed), grads), ((_, expected), expected_grads) = weighted("splash"), weighted("xla")
    np.testing.assert_allclose(mixed, expected, atol=2e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=2e-4)


@pytest.mark.parametrize(("num_positions", "tile"), [(128, 128), (640, 128), (768, 384), (1024, 512), (2048, 512)])
def test_splash_takes_the_largest_tiles_that_divide_the_positions(num_positions, tile):
    q = jnp.zeros((1, num_positions, 1, 64))
    gradient = jax.grad(lambda q: causal_attention(q, q, q, backend="splash").sum())
    found = re.findall(r'"(block_\w+)": (\d+)', str(jax.make_jaxpr(gradient)(q)))
    passes = {"block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"}
    assert passes <= {name for name, _ in found}
    assert {size for _, size in found} == {str(tile)}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs an NVIDIA GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_cudnn(masked):
    q, k, v = (x.astype(jnp.bfloat16) for x in heads(256, head_dim=64))
    ids = segments(256) if masked else None
    mixed = causal_attention(q, k, v, segment_ids_BT=ids, backend="cudnn")
    np.testing.assert_allclose(mixed.astype(jnp.float32), plain(q, k, v, ids), atol=0.03)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="test_cudnn runs the kernel itself")
@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_is_called_for_causal_attention_within_segments(masked, monkeypatch):
    """The same call of jax, computed by its plain formula."""
    attend = jax.nn.dot_product_attention

    def attend_without_gpu(*heads, implementation, **options):
        assert implementation == "cudnn"
        return attend(*heads, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend_without_gpu)
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(gpu, 1))
    q, k, v = (x.astype(jnp.bfloat16) for x in heads(64))
    ids = segments(64) if masked else None
    mixed = causal_attention(q, k, v, segment_ids_BT=ids, backend="cudnn")
    np.testing.assert_allclose(mixed.astype(jnp.float32), plain(q, k, v, ids), atol=0.03)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernel might run")
def test_auto_takes_splash_on_a_tpu_for_full_tiles_without_dropout(monkeypatch):
    short, full, key = heads(100), heads(128), jax.random.key(0)
    dropped = causal_attention(*full, dropout_rate=0.1, dropout_key=key, backend="xla")
    tpu = SimpleNamespace(platform="tpu")
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(tpu, None))
    np.testing.assert_allclose(causal_attention(*full), plain(*full), atol=2e-6)  # it may be a part of several devices
    with pytest.raises(ValueError, match="on TPUs one device or a step over a mesh, and no dropout, got float32"):
        causal_attention(*full, backend="splash")
    monkeypatch.setattr(_attention, "target_for", lambda x: Target(tpu, 1))
    np.testing.assert_allclose(causal_attention(*short), plain(*short), atol=2e-6)
    np.testing.assert_array_equal(causal_attention(*full, dropout_rate=0.1, dropout_key=key), dropped)
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):  # the kernel's own error
        causal_attention(*full)


def test_there_is_no_array_of_all_pairs_of_positions():
    q, k, v = heads(512)
    program = jax.jit(lambda q, k, v: causal_attention(q, k, v)).lower(q, k, v).as_text()
    assert "512x128" in program or "128x512" in program
    assert "512x512" not in program


def test_dropped_weights_keep_their_expectation():
    q, k, v = heads(4, num_heads=1, head_dim=8, batch_size=1)
    expected = causal_attention(q, k, v)
    keys = jax.random.split(jax.random.key(1), 4000)
    dropped = jax.vmap(lambda key: causal_attention(q, k, v, dropout_rate=0.5, dropout_key=key))(keys)
    np.testing.assert_allclose(dropped.mean(0), expected, atol=0.15)
    # The first position has a single weight, which is dropped half of the time.
    assert float((dropped[:, 0, 0] == 0).all(-1).mean()) == pytest.approx(0.5, abs=0.04)


def test_no_two_rows_of_weights_drop_the_same():
    """The values are unit vectors, which show the weights. 128 positions are two blocks of queries."""
    q = k = jnp.zeros((2, 128, 2, 128))
    v = jnp.broadcast_to(jnp.eye(128)[None, :, None], q.shape)
    drop = jax.jit(lambda q, k, v, key: causal_attention(q, k, v, dropout_rate=0.5, dropout_key=key))
    weights = np.asarray(drop(q, k, v, jax.random.key(0)))
    masks = [weights[sequence, :, head] > 0 for sequence in range(2) for head in range(2)]
    for row in range(40, 128):  # the first rows are too short to be certain to differ
        others = np.concatenate([masks[0][row + 1 :], *(mask[row:] for mask in masks[1:])])
        same = (others[:, : row + 1] == masks[0][row, : row + 1]).all(axis=1)
        assert not same.any(), f"row {row} and another one"


def test_weights_are_dropped_within_segments():
    """The values are unit vectors, which show the weights. 100 positions are two blocks of queries."""
    q, k, _ = heads(100, head_dim=100)
    v = jnp.broadcast_to(jnp.eye(100)[None, :, None], q.shape)
    ids = segments(100)
    expected = plain(q, k, v, np.asarray(ids))
    dropped = causal_attention(q, k, v, segment_ids_BT=ids, dropout_rate=0.1, dropout_key=jax.random.key(0))
    is_kept = np.asarray(dropped) > 0
    np.testing.assert_allclose(dropped, np.where(is_kept, expected / 0.9, 0), atol=1e-6)
    assert is_kept.sum() / (expected > 0).sum() == pytest.approx(0.9, abs=0.03)


# Interpret mode on four devices: each has half of the rows and one of two heads.
def test_splash_over_a_mesh_gives_each_device_its_own_rows_segments_and_heads():
    mesh = make_mesh(tensor=2, devices=jax.devices()[:4])
    q, k, v = heads(128, num_heads=2, head_dim=64)
    ids = segments(128)
    assert not np.array_equal(ids[0], ids[1])

    def over_mesh(q, k, v, ids):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return causal_attention(q, k, v, segment_ids_BT=ids, backend="splash")

    placed = jax.device_put((q, k, v, ids), replicated(mesh))
    mixed = jax.jit(over_mesh)(*placed)
    np.testing.assert_allclose(mixed, plain(q, k, v, np.asarray(ids)), atol=2e-5)


def test_a_document_ends_with_its_end_of_text():
    tokens = jnp.array([[5, 7, 1, 2, 7, 7, 3]])
    np.testing.assert_array_equal(document_ids(tokens, 7), [[0, 0, 1, 1, 1, 2, 3]])


@pytest.mark.parametrize(
    ("num_positions", "options", "message"),
    [
        (
            128,
            {"backend": "cudnn"},
            "an even number of positions, heads of a width that is a multiple of 8 up to 128, and no dropout, got "
            "float32[2, 128, 3, 16] on cpu, dropout 0. Choose auto.",
        ),
        (
            100,
            {"backend": "splash"},
            "attention backend splash must have a multiple of 128 positions, on TPUs one device or a step over a mesh, "
            "and no dropout",
        ),
        (
            128,
            {"backend": "splash", "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
            ", dropout 0.1. Choose auto.",
        ),
    ],
)
def test_a_backend_rejects_inputs_that_it_does_not_support(num_positions, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_attention(*heads(num_positions), **options)
