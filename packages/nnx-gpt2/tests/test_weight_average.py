import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_gpt2 import (
    OptimizerConfig,
    averaged_params,
    create_optimizer,
    create_train_state,
    estimate_memory,
    evaluate_tokens,
    make_eval_step,
    make_mesh,
    make_train_step,
    merge,
)

KEY = jax.random.key(0)
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=5, average_decay=0.9)


def windows(config, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (8, 17)).astype(np.uint16)


@functools.cache
def start(config, optimizer=OPTIMIZER, mesh=None):
    rule = create_optimizer(optimizer, 200)
    return create_train_state(config, rule, KEY, mesh), make_train_step(config, rule, mesh)


def trained(config, num_steps, optimizer=OPTIMIZER, mesh=None):
    """Return the last state, the parameters after each step, and the average after each step."""
    state, step = start(config, optimizer, mesh)
    params, averages = [], []
    for i in range(num_steps):
        state, _ = step(state, windows(config, i), KEY)
        params.append(jax.tree.map(np.array, state.params))
        averages.append(jax.tree.map(np.array, averaged_params(state.opt_state)))
    return state, params, averages


def assert_close(one, other, atol=1e-6):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol, rtol=0), one, other)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("name", "decay", "mesh"),
    [
        pytest.param("adamw", 0.9, None, id="adamw"),
        pytest.param("adamw", 0.999, make_mesh(fsdp=8), id="adamw, fsdp=8", marks=pytest.mark.slow),
        pytest.param("muon", 0.9, make_mesh(fsdp=8), id="muon, fsdp=8"),
    ],
)
def test_the_average_is_that_of_numpy_in_each_of_twenty_steps(tiny, name, decay, mesh):
    optimizer = dataclasses.replace(OPTIMIZER, name=name, average_decay=decay)
    _, params, averages = trained(tiny, 20, optimizer, mesh)
    total = jax.tree.map(np.zeros_like, params[0])
    for count, (now, average) in enumerate(zip(params, averages, strict=True), start=1):
        total = jax.tree.map(lambda x, y: decay * x + (1 - decay) * np.asarray(y, np.float64), total, now)
        assert_close(average, jax.tree.map(lambda x, n=count: x / (1 - decay**n), total))
    # The average is not the last parameters, and not the initial ones.
    assert np.abs(averages[-1]["wte"]["embedding"] - params[-1]["wte"]["embedding"]).max() > 1e-3
    assert np.abs(averages[-1]["wte"]["embedding"] - params[0]["wte"]["embedding"]).max() > 1e-3


def test_before_the_second_update_the_average_is_the_parameters(tiny):
    state, _ = start(tiny)
    assert_equal(averaged_params(state.opt_state), state.params)
    _, params, averages = trained(tiny, 1)
    assert_equal(averages[0], params[0])


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_mesh_has_the_average_of_one_device_sharded_as_the_parameters(tiny, name):
    optimizer = dataclasses.replace(OPTIMIZER, name=name)
    mesh = make_mesh(fsdp=4, tensor=2)
    state, _, averages = trained(tiny, 5, optimizer, mesh)
    assert_close(averages[-1], trained(tiny, 5, optimizer)[2][-1], atol=1e-4)
    for tree in (state, start(tiny, optimizer, mesh)[0]):
        average = averaged_params(tree.opt_state)
        for leaf, param in zip(jax.tree.leaves(average), jax.tree.leaves(tree.params), strict=True):
            assert (leaf.dtype, leaf.shape) == (param.dtype, param.shape) == (jnp.float32, param.shape)
            assert leaf.sharding == param.sharding
        assert average["wte"]["embedding"].addressable_shards[0].data.shape == (64, 8)


def test_a_skipped_step_leaves_the_average_and_its_weights_unchanged(tiny):
    state, step = start(tiny)
    for i in range(3):
        state, _ = step(state, windows(tiny, i), KEY)
    bad = windows(tiny)
    bad[0, 0] = 65  # outside the vocabulary
    skipped, metrics = step(state, bad, KEY)
    assert int(metrics["num_skipped"]) == 1
    assert_equal(skipped.opt_state[-1], state.opt_state[-1])
    # The next update counts as the fourth.
    after, _ = step(skipped, windows(tiny, 4), KEY)
    share = 0.1 / (1 - 0.9**4)
    expected = jax.tree.map(
        lambda old, new: (1 - share) * old + share * new, averaged_params(state.opt_state), after.params
    )
    assert_close(averaged_params(after.opt_state), expected)


@pytest.mark.parametrize(("name", "clip_norm"), [("adamw", 1.0), ("muon", 0.0)])
def test_the_average_does_not_change_training(tiny, name, clip_norm):
    """An optimizer without average has the state that it had before there were averages."""
    plain = OptimizerConfig(name=name, learning_rate=3e-3, warmup_steps=5, clip_norm=clip_norm)
    averaging = dataclasses.replace(plain, average_decay=0.9)
    (one, one_step), (other, other_step) = (start(tiny, optimizer) for optimizer in (plain, averaging))
    assert jax.tree.structure(other.opt_state[0]) == jax.tree.structure(one.opt_state)
    for i in range(3):
        one, one_metrics = one_step(one, windows(tiny, i), KEY)
        other, other_metrics = other_step(other, windows(tiny, i), KEY)
        assert float(one_metrics["loss"]) == pytest.approx(float(other_metrics["loss"]), abs=1e-6)
    assert_close(one.params, other.params)
    with pytest.raises(ValueError, match="opt_state must have an average of the parameters"):
        averaged_params(one.opt_state)


@pytest.mark.parametrize(("mesh", "is_given"), [(None, True), (make_mesh(fsdp=2), False)], ids=["given", "mesh"])
def test_a_step_donates_parameters_and_average_separately(tiny, mesh, is_given, monkeypatch):
    *_, last = trained(tiny, 3)[2]
    monkeypatch.setattr("nnx_gpt2._train_step.is_donated", lambda shapes, mesh: True)
    rule = create_optimizer(OPTIMIZER, 200)
    state = create_train_state(tiny, rule, KEY, mesh)
    expected = jax.tree.map(np.array, state.params)
    if is_given:
        state = create_train_state(tiny, rule, KEY, mesh, params=state.params)
    assert_equal(averaged_params(state.opt_state), expected)
    step = make_train_step(tiny, rule, mesh)
    for i in range(3):
        before = state
        state, _ = step(state, windows(tiny, i), KEY)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, averaged_params(before.opt_state))))
    assert_close(averaged_params(state.opt_state), last, atol=1e-4)


def test_memory_counts_the_average(tiny):
    with_average, without = (
        estimate_memory(tiny, global_batch_size=8, optimizer=dataclasses.replace(OPTIMIZER, average_decay=decay))
        for decay in (0.9, 0.0)
    )
    params_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(start(tiny)[0].params))
    assert params_bytes <= with_average.state_bytes - without.state_bytes < params_bytes + 4096


def test_the_average_is_evaluated_and_saved_as_parameters_are(tiny, tmp_path):
    state, params, averages = trained(tiny, 20)
    average = averaged_params(state.opt_state)
    losses = make_eval_step(tiny)(average, windows(tiny, 30))
    np.testing.assert_allclose(losses, make_eval_step(tiny)(averages[-1], windows(tiny, 30)))
    assert not np.allclose(losses, make_eval_step(tiny)(params[-1], windows(tiny, 30)), atol=1e-4)
    model = merge(tiny, average)
    model.save_pretrained(tmp_path)
    tokens = windows(tiny).reshape(-1)
    loaded = evaluate_tokens(type(model).from_pretrained(tmp_path), tokens)
    assert loaded.loss == pytest.approx(evaluate_tokens(model, tokens).loss, abs=1e-6)


def test_parameters_in_float64_have_an_average_in_float64(tiny):
    with jax.enable_x64(True):
        config = dataclasses.replace(tiny, dtype="float64", param_dtype="float64")
        state, params, averages = trained(config, 3)
        assert {leaf.dtype for leaf in jax.tree.leaves(averaged_params(state.opt_state))} == {jnp.dtype("float64")}
        assert state.opt_state[-1].total_weight.dtype == jnp.float32
        expected = (0.81 * params[0]["wpe"]["embedding"] + 0.9 * params[1]["wpe"]["embedding"]) / 2.71
        expected = expected + params[2]["wpe"]["embedding"] / 2.71
        np.testing.assert_allclose(averages[2]["wpe"]["embedding"], expected, rtol=1e-6)  # the weights are float32


def test_the_average_of_a_bare_optimizer_in_numpy():
    """A constant rate of 1 and a sign-like update: the parameters are 0, -1, -2, ... up to Adam's epsilon."""
    rule = create_optimizer(
        OptimizerConfig(schedule="constant", learning_rate=1.0, weight_decay=0.0, clip_norm=0.0, average_decay=0.5), 9
    )
    params = {"bias": jnp.zeros(2)}
    state = rule.init(params)
    for _ in range(3):
        updates, state = rule.update({"bias": jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
    # Weights 1/4, 1/2 and 1 of -1, -2 and -3.
    np.testing.assert_allclose(averaged_params(state)["bias"], -(0.25 + 1 + 3) / 1.75, rtol=1e-4)
