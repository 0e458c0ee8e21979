"""The shares of predictions in the gradient of a batch, against one gradient for each prediction."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import (
    GPT2,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    gradient_shares,
    make_eval_step,
    make_mesh,
    make_train_step,
    merge,
    split_params,
    stack_layers,
    token_losses,
    tree_shardings,
)
from nnx_gpt2._gradient_shares import _repeated
from nnx_gpt2._train_step import segments_of

END = 7
WINDOWS = np.random.default_rng(0).integers(8, 65, (3, 12)).astype(np.uint16)
WINDOWS[0, 5] = WINDOWS[2, 2] = WINDOWS[2, 9] = END


def params_of(config):
    """Parameters of a model whose biases and norms are not those of the start."""
    params = split_params(GPT2(config, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), 200))
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape, x.dtype), params)


def flat(tree, num_dims):
    """The leaves of a tree behind one another, without the first dimensions."""
    return jnp.concatenate([x.reshape(*x.shape[:num_dims], -1) for x in jax.tree.leaves(tree)], axis=-1)


def expected(config, params, end_of_text=None):
    """The shares, and the norms of windows, by one gradient for each prediction."""

    def losses_of(params):
        windows = jnp.asarray(WINDOWS)
        return token_losses(merge(config, params), windows, segment_ids=segments_of(windows, end_of_text))

    jacobian = flat(jax.jit(jax.jacrev(losses_of))(params), 2)
    total = jacobian.mean((0, 1))
    products = np.asarray(jacobian @ total)
    return products / products.size / float(total @ total), np.asarray(jnp.linalg.norm(jacobian.mean(1), axis=-1))


@pytest.mark.parametrize("end_of_text", [pytest.param(None, marks=pytest.mark.slow), END])
def test_shares_are_those_of_one_gradient_for_each_prediction(tiny, end_of_text):
    params = params_of(tiny)
    found = gradient_shares(tiny, params, WINDOWS, end_of_text=end_of_text)
    shares, norms = expected(tiny, params, end_of_text)
    np.testing.assert_allclose(found.shares, shares, atol=1e-6)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    np.testing.assert_allclose(found.shares.sum(), 1, rtol=1e-4)
    losses = make_eval_step(tiny, end_of_text=end_of_text)(params, WINDOWS)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5)


@pytest.mark.parametrize("axes", [pytest.param({"fsdp": 2}, marks=pytest.mark.slow), {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_mesh_has_the_same_shares(tiny, axes):
    params, mesh = params_of(tiny), make_mesh(**axes)
    alone = gradient_shares(tiny, params, WINDOWS, end_of_text=END)
    sharded = jax.device_put(params, tree_shardings(params, mesh))
    found = gradient_shares(tiny, sharded, WINDOWS, mesh=mesh, end_of_text=END)
    for name in ("losses", "shares", "norms", "norm"):
        np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fields", [{"scan_layers": True}, {"remat": "full"}, {"dropout_rate": 0.5}], ids=str)
def test_ways_of_computing_have_the_same_shares(tiny, fields):
    config = dataclasses.replace(tiny, **fields)
    params = params_of(tiny)
    alone = gradient_shares(tiny, params, WINDOWS)
    if config.scan_layers:
        params = stack_layers(params)
    np.testing.assert_allclose(gradient_shares(config, params, WINDOWS).shares, alone.shares, atol=1e-6)


def test_the_norm_is_that_of_the_train_step(tiny):
    optimizer = create_optimizer(OptimizerConfig(), 10)
    state = create_train_state(tiny, optimizer, jax.random.key(0))
    found = gradient_shares(tiny, state.params, WINDOWS)
    _, metrics = make_train_step(tiny, optimizer)(state, WINDOWS, jax.random.key(1))
    np.testing.assert_allclose(found.norm, metrics["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(found.losses.mean(), metrics["loss"], rtol=1e-5)


def test_the_shares_of_bfloat16_sum_to_one(tiny):
    config = dataclasses.replace(tiny, dtype="bfloat16")
    found = gradient_shares(config, params_of(config), WINDOWS)
    np.testing.assert_allclose(found.shares.sum(), 1, rtol=0.05)


def test_a_window_that_is_not_finite_has_no_share_and_does_not_hide_the_others(tiny):
    params = params_of(tiny)
    windows = np.insert(WINDOWS, 1, 65, axis=0)  # 65 is no id
    found, others = gradient_shares(tiny, params, windows), gradient_shares(tiny, params, WINDOWS)
    assert np.isnan(found.losses[1]).all()
    assert np.isnan(found.shares[1]).all()
    assert np.isnan(found.norms[1])
    np.testing.assert_allclose(np.delete(found.shares, 1, axis=0), others.shares, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.norm, others.norm, rtol=1e-5)  # the mean of the windows that are finite
    nothing = gradient_shares(tiny, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params), WINDOWS)
    assert np.isnan(nothing.shares).all()
    assert nothing.norm == 0.0


def test_a_gradient_of_zero_has_shares_of_zero(tiny):
    """In a model of zeros, nothing reaches the parameters."""
    found = gradient_shares(tiny, jax.tree.map(jnp.zeros_like, params_of(tiny)), WINDOWS)
    np.testing.assert_allclose(found.losses, np.log(65), rtol=1e-6)
    assert not found.shares.any()
    assert found.norm == 0.0


def test_each_process_passes_its_part_of_the_copies_of_a_window(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr("nnx_gpt2._gradient_shares.put_batch", lambda rows, mesh: rows)
    np.testing.assert_array_equal(_repeated(WINDOWS[1], make_mesh()), WINDOWS[[1, 1]])
