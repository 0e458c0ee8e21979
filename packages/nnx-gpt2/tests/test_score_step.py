"""Scores of given tokens: equal to those of all logits, on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import GPT2, make_mesh, make_score_step, put_batch, replicated, split_params

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 65, (8, 13))
POSITIONS = RNG.integers(0, 13, (8, 5))


# A chunk has 3 of the 5 scored positions of 8 rows: the last chunk is padded. At the least, it has one.
@pytest.mark.parametrize(("num_devices", "chunk_tokens", "num_rows"), [(1, 24, 24), (1, 4, 8), (8, 24, 5)])
def test_scores_are_those_of_all_logits(tiny, num_devices, chunk_tokens, num_rows):
    """No more logits exist at once on a device than the config allows."""
    model = GPT2(dataclasses.replace(tiny, num_layers=1, loss_chunk_tokens=chunk_tokens), rngs=nnx.Rngs(0))
    logits = np.asarray(model(jnp.asarray(TOKENS)), np.float64)
    at = logits[np.arange(8)[:, None], POSITIONS]
    targets = np.where(RNG.random((8, 5)) < 0.5, at.argmax(-1), RNG.integers(0, 65, (8, 5)))
    expected = np.log(np.exp(at).sum(-1)) - np.take_along_axis(at, targets[..., None], -1)[..., 0]
    params, mesh = split_params(model), None if num_devices == 1 else make_mesh()
    arrays = (TOKENS, POSITIONS, targets)
    if mesh is not None:
        params, arrays = jax.device_put(params, replicated(mesh)), tuple(put_batch(x, mesh) for x in arrays)
    step = make_score_step(model.config, mesh)
    losses, is_likeliest = step(params, *arrays)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    assert np.array_equal(is_likeliest, at.argmax(-1) == targets)
    assert 0 < is_likeliest.sum() < is_likeliest.size
    assert f"tensor<{num_rows}x128xf32>" in step.lower(params, *arrays).as_text()


def test_each_of_several_likeliest_tokens_is_likeliest(tiny):
    params = jax.tree.map(jnp.zeros_like, split_params(GPT2(tiny, rngs=nnx.Rngs(0))))
    _, is_likeliest = make_score_step(tiny)(params, TOKENS[:1], POSITIONS[:1, :2], np.array([[0, 64]]))
    assert is_likeliest.tolist() == [[True, True]]


def test_one_token_is_enough_to_score_the_next_one(tiny):
    model = GPT2(tiny, rngs=nnx.Rngs(0))
    arrays = (TOKENS[:2, :1], np.zeros((2, 1), int), np.array([[3], [4]]))
    losses, _ = make_score_step(tiny)(split_params(model), *arrays)
    expected = -jax.nn.log_softmax(model(jnp.asarray(TOKENS[:2, :1]))[:, 0])[[0, 1], [3, 4]]
    np.testing.assert_allclose(losses[:, 0], expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"tokens must have at least 1 row and 1 position, got"):
        make_score_step(tiny).lower({}, TOKENS[:2, :0], *arrays[1:])


def test_a_mesh_that_shards_parameters_is_rejected(tiny):
    with pytest.raises(ValueError, match=r"mesh must have fsdp = tensor = 1: .*, got \(2, 1\)"):
        make_score_step(tiny, make_mesh(fsdp=2))
    with pytest.raises(ValueError, match="batch size must be a positive multiple of 8 devices"):
        make_score_step(tiny, make_mesh()).lower({}, TOKENS[:7], POSITIONS[:7], POSITIONS[:7])
