"""Training that starts from given parameters."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_gpt2 import (
    GPT2,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    make_mesh,
    make_train_step,
    mean_loss,
    merge,
    pretrained_config,
    split_params,
)

FOLDER = Path(__file__).parent / "fixtures" / "hf-gpt2-tiny"
KEY = jax.random.key(0)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


def windows(num_tokens):
    return np.random.default_rng(3).integers(0, 300, (8, num_tokens)).astype(np.uint16)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("axes", "scan_layers"),
    [
        pytest.param(None, False, marks=pytest.mark.slow),
        (None, True),
        ({"fsdp": 4}, False),
        pytest.param({"fsdp": 4}, True, marks=pytest.mark.slow),
    ],
)
def test_training_starts_from_published_weights(axes, scan_layers):
    """The state is that of a new model, but for the parameters. The first loss is that of the loaded model."""
    mesh = None if axes is None else make_mesh(**axes)
    model = GPT2.from_pretrained(FOLDER, scan_layers=scan_layers)
    rule = create_optimizer(OPTIMIZER, 20)
    state = create_train_state(model.config, rule, KEY, mesh, params=split_params(model))
    new = create_train_state(model.config, rule, KEY, mesh)
    assert_equal(state.params, split_params(model))
    assert_equal(state.opt_state, new.opt_state)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (leaf.dtype, leaf.shape) == (like.dtype, like.shape)
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    state, metrics = make_train_step(model.config, rule, mesh)(state, windows(32), KEY)
    assert int(state.step) == 1
    assert float(metrics["loss"]) == pytest.approx(float(mean_loss(model, jnp.asarray(windows(32)))), abs=1e-5)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_state_moves_between_one_device_and_a_mesh(on_mesh):
    model = GPT2.from_pretrained(FOLDER)
    rule, mesh = create_optimizer(OPTIMIZER, 20), make_mesh(fsdp=8)
    source, target = (None, mesh) if on_mesh else (mesh, None)
    first = create_train_state(model.config, rule, KEY, source, params=split_params(model))
    second = create_train_state(model.config, rule, KEY, target, params=first.params)
    assert_equal(second.params, split_params(model))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(second)} == {8 if on_mesh else 1}
    table = second.params["wte"]["embedding"]
    assert [shard.data.shape for shard in table.addressable_shards] == ([(384, 6)] * 8 if on_mesh else [(384, 48)])


@pytest.mark.parametrize(
    ("seq_len", "scan_layers"), [pytest.param(31, False, marks=pytest.mark.slow), (7, True), (1, False)]
)
def test_a_shorter_context_has_the_first_positions(seq_len, scan_layers):
    """From the files, and from the parameters of a model with the longer context."""
    full = GPT2.from_pretrained(FOLDER, scan_layers=scan_layers)
    short = GPT2.from_pretrained(FOLDER, scan_layers=scan_layers, seq_len=seq_len)
    assert short.config == dataclasses.replace(full.config, seq_len=seq_len)
    np.testing.assert_array_equal(short.wpe.embedding[...], full.wpe.embedding[:seq_len])
    tokens = jnp.asarray(windows(seq_len), jnp.int32)
    np.testing.assert_allclose(short(tokens), full(tokens), atol=1e-5)
    rule = create_optimizer(OPTIMIZER, 20)
    for mesh in (None, make_mesh(fsdp=2)):
        state = create_train_state(short.config, rule, KEY, mesh, params=split_params(full))
        assert_equal(state.params, split_params(short))
        made = create_train_state(short.config, rule, KEY, mesh)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, made)


def test_a_longer_context_than_the_published_one_is_rejected():
    message = "seq_len must be at most 32, the positions of the saved model, got 33."
    for use in (GPT2.from_pretrained, pretrained_config):
        with pytest.raises(ValueError, match=message):
            use(FOLDER, seq_len=33)
        assert use(FOLDER, seq_len=32) is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("mesh", [None, make_mesh(fsdp=2)], ids=["one", "mesh"])
def test_arrays_of_numpy_get_the_type_of_the_state(tiny, dtype, mesh):
    rule = create_optimizer(OPTIMIZER, 20)
    params = jax.tree.map(lambda x: np.asarray(x).astype(dtype), create_train_state(tiny, rule, KEY).params)
    state = create_train_state(tiny, rule, KEY, mesh, params=params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert_equal(state.params, jax.tree.map(lambda x: x.astype(np.float32), params))


@pytest.mark.parametrize("mesh", [None, make_mesh(fsdp=8)], ids=["one", "mesh"])
def test_the_given_parameters_stay_as_they_are(tiny, mesh, monkeypatch):
    """Steps of two states donate their arrays, and change them."""
    rule = create_optimizer(OPTIMIZER, 20)
    given = create_train_state(tiny, rule, KEY, mesh).params
    host = jax.tree.map(np.array, given)
    before = jax.tree.map(np.array, given)
    monkeypatch.setattr("nnx_gpt2._train_step.is_donated", lambda shapes, mesh: True)
    step = make_train_step(tiny, rule, mesh)
    for params in (given, host, given):
        state = create_train_state(tiny, rule, KEY, mesh, params=params)
        after, _ = step(state, windows(17) % 65, KEY)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
        assert not np.array_equal(after.params["ln_f"]["bias"], before["ln_f"]["bias"])
        assert_equal(params, before)


def test_a_tuned_model_is_saved_and_loaded(tmp_path):
    """Twenty steps on one batch of half the context, from published weights."""
    model = GPT2.from_pretrained(FOLDER, seq_len=16)
    rule = create_optimizer(OPTIMIZER, 20)
    state = create_train_state(model.config, rule, KEY, params=split_params(model))
    step = make_train_step(model.config, rule)
    losses = []
    for _ in range(20):
        state, metrics = step(state, windows(17), KEY)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    merge(model.config, state.params).save_pretrained(tmp_path)
    assert_equal(split_params(GPT2.from_pretrained(tmp_path)), state.params)
    assert pretrained_config(tmp_path) == model.config
