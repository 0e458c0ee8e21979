"""The steps that add gradients along a tree: the same bits on each number of devices."""

import dataclasses
import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_gpt2 import (
    OptimizerConfig,
    TreeTrainStep,
    create_optimizer,
    create_train_state,
    estimate_memory,
    make_eval_step,
    make_mesh,
    make_train_step,
    make_tree_eval_step,
    put_batch,
    tensor_digests,
)
from nnx_gpt2._tree_step import _num_threads, _tree_sum

RULE = create_optimizer(OptimizerConfig(warmup_steps=2, clip_norm=0.5), 100)
MUON = create_optimizer(
    OptimizerConfig(name="muon", warmup_steps=2, muon_learning_rate=1e-2, muon_momentum_warmup_steps=3), 100
)
# A run of a process of its own: XLA has as many threads as CPUs, or as `NPROC` says.
SMALL_RUN = """
import jax, numpy as np
from nnx_gpt2 import *
config = GPT2Config(vocab_size=65, seq_len=64, num_layers=2, num_heads=2, embed_dim=128, dropout_rate=0.1)
mesh, rule = make_mesh(), create_optimizer(OptimizerConfig(), 100)
state, step = create_train_state(config, rule, jax.random.key(0), mesh), TreeTrainStep(config, rule, mesh, num_shards=4)
for seed in range(2):
    rows = np.random.default_rng(seed).integers(0, 65, (16, 65)).astype(np.uint16)
    state, _ = step(state, put_batch(rows, mesh), jax.random.key(1))
print(root_digest(tensor_digests(state)))
"""


def windows(config, batch_size=16, seed=0):
    rows = np.random.default_rng(seed).integers(0, config.vocab_size, (batch_size, config.seq_len + 1))
    return rows.astype(np.uint16)


def mesh_of(num_devices):
    return make_mesh(devices=jax.devices()[:num_devices])


def train(config, num_devices, *, num_shards=8, num_steps=2, key=7, rule=RULE, **options):
    mesh = mesh_of(num_devices)
    state = create_train_state(config, rule, jax.random.key(0), mesh)
    step = TreeTrainStep(config, rule, mesh, num_shards=num_shards, **options)
    metrics = {}
    for i in range(num_steps):
        state, metrics = step(state, put_batch(windows(config, seed=i), mesh), jax.random.key(key))
    return state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("num_shards", "changes", "options"),
    [
        pytest.param(4, {"dropout_rate": 0.2}, {"grad_accum_steps": 2}, id="dropout and microbatches"),
        pytest.param(
            8, {"scan_layers": True}, {"end_of_text": 3}, id="documents and stacked layers", marks=pytest.mark.slow
        ),
        pytest.param(8, {}, {"rule": MUON}, id="muon", marks=pytest.mark.slow),
        pytest.param(8, {"dtype": "bfloat16"}, {}, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_number_of_devices_changes_no_bit(num_shards, changes, options, tiny):
    """The last number has one shard per device. Each device compiles programs of its own."""
    config = dataclasses.replace(tiny, **changes)
    alone, of_alone = train(config, 1, num_shards=num_shards, **options)
    for num_devices in (2, num_shards):
        state, metrics = train(config, num_devices, num_shards=num_shards, **options)
        assert tensor_digests(state) == tensor_digests(alone)
        assert metrics == of_alone


def test_the_step_is_that_of_make_train_step_but_for_rounding(tiny):
    state, metrics = train(tiny, 2, num_steps=3, end_of_text=3)
    expected = create_train_state(tiny, RULE, jax.random.key(0))
    step, of_step = make_train_step(tiny, RULE, end_of_text=3), {}
    for i in range(3):
        expected, of_step = step(expected, windows(tiny, seed=i), jax.random.key(7))
    assert metrics["loss"] == pytest.approx(float(of_step["loss"]), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(of_step["grad_norm"]), rel=1e-4)
    for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert int(state.step) == 3


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_neighbors_are_added_first(num_parts):
    parts = np.array([1e8, 3, -1e8, 5, 0.1, 0.2, 0.3, 7e7], np.float32)[:num_parts]
    sums = list(parts)
    while len(sums) > 1:
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
    assert _tree_sum(iter(jnp.asarray(parts))) == sums[0]


@pytest.mark.slow
def test_another_number_of_shards_rounds_otherwise_and_drops_other_units(tiny):
    few, many = train(tiny, 1, num_shards=2)[0], train(tiny, 1, num_shards=8)[0]
    assert tensor_digests(few) != tensor_digests(many)
    dropping = dataclasses.replace(tiny, dropout_rate=0.5)
    losses = {
        train(dropping, 1, num_steps=1, key=key, num_shards=shards)[1]["loss"] for key in (1, 2) for shards in (1, 8)
    }
    assert len(losses) == 4


def test_each_shard_has_its_own_dropout(tiny):
    config = dataclasses.replace(tiny, dropout_rate=0.5)
    mesh = mesh_of(1)
    state = create_train_state(config, RULE, jax.random.key(0), mesh)
    same = np.tile(windows(config, 1), (2, 1))

    def loss(num_shards, rows):
        step = TreeTrainStep(config, RULE, mesh, num_shards=num_shards)
        return float(step(state, put_batch(rows, mesh), jax.random.key(1))[1]["loss"])

    assert loss(2, same) != pytest.approx(loss(1, same[:1]), rel=1e-3)
    at_start, of_two = loss(1, same[:1]), loss(2, same)
    state = dataclasses.replace(state, step=state.step + 1)
    at_next = loss(1, same[:1])
    assert at_next != pytest.approx(at_start, rel=1e-3)
    # The second shard has not the masks of the first one at the next step.
    assert of_two != pytest.approx((at_start + at_next) / 2, rel=1e-5)


def test_a_batch_with_an_unknown_id_is_skipped(tiny):
    mesh = mesh_of(2)
    state = create_train_state(tiny, RULE, jax.random.key(0), mesh)
    rows = jnp.asarray(windows(tiny)).at[11, 3].set(tiny.vocab_size)  # `put_batch` does not know the vocabulary
    after, metrics = TreeTrainStep(tiny, RULE, mesh, num_shards=8)(state, rows, jax.random.key(0))
    assert np.isnan(float(metrics["loss"]))
    assert int(metrics["num_skipped"]) == int(after.step) == 1
    assert tensor_digests(after.params) == tensor_digests(state.params)


def test_the_program_of_a_shard_is_compiled_before_the_first_step(tiny):
    mesh = mesh_of(2)
    state = create_train_state(tiny, RULE, jax.random.key(0), mesh)
    step, batch = TreeTrainStep(tiny, RULE, mesh, num_shards=4), put_batch(windows(tiny), mesh)
    lowered = step.lower(state, batch, jax.random.key(0))
    assert "tensor<4x17xui16>" in lowered.as_text()
    lowered.compile()


def test_validation_losses_are_the_same_on_each_number_of_devices(tiny):
    """The parameters come from one device. They are so large that attention matters."""
    params = create_train_state(tiny, RULE, jax.random.key(0)).params
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    expected = make_eval_step(tiny, end_of_text=3)(params, windows(tiny))
    found = []
    for num_devices in (1, 2, 8):
        mesh = mesh_of(num_devices)
        step = make_tree_eval_step(tiny, mesh, num_shards=8, end_of_text=3)
        losses = step(params, put_batch(windows(tiny), mesh))
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        found.append(np.asarray(losses).tobytes())
    assert found[0] == found[1] == found[2]


def test_a_donated_state_is_deleted_and_has_the_same_step(tiny, monkeypatch):
    mesh = mesh_of(2)
    state = create_train_state(tiny, RULE, jax.random.key(0), mesh)
    args = put_batch(windows(tiny), mesh), jax.random.key(7)
    kept, _ = TreeTrainStep(tiny, RULE, mesh, num_shards=8)(state, *args)
    monkeypatch.setattr("nnx_gpt2._tree_step.is_donated", lambda shapes, mesh: True)
    after, _ = TreeTrainStep(tiny, RULE, mesh, num_shards=8)(state, *args)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert tensor_digests(after) == tensor_digests(kept)


@pytest.mark.parametrize("given", ["3", "", "all"])
def test_the_number_of_threads_is_that_of_the_environment_or_of_the_cpus(given, monkeypatch):
    monkeypatch.setenv("NPROC", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 4, 5, 6}, raising=False)
    assert _num_threads() == (3 if given == "3" else 5)


@pytest.mark.parametrize(
    ("num_devices", "options", "message"),
    [
        (1, {"num_shards": 6}, "num_shards must be a power of two, got 6"),
        (1, {"num_shards": 0}, "num_shards must be a power of two, got 0"),
        (1, {"num_shards": True}, "num_shards must be a power of two, got True"),
        (8, {"num_shards": 4}, "num_shards must be a multiple of 8 devices, got 4. Use 1, 2, 4, ... devices"),
        (1, {"num_shards": 4, "grad_accum_steps": 0}, "grad_accum_steps must be at least 1"),
        (1, {"num_shards": 4, "end_of_text": 65}, "end_of_text must be"),
    ],
)
def test_bad_arguments_are_rejected(num_devices, options, message, tiny):
    with pytest.raises(ValueError, match=message):
        TreeTrainStep(tiny, RULE, mesh_of(num_devices), **options)


def test_devices_that_share_a_copy_are_rejected(tiny):
    with pytest.raises(ValueError, match="mesh must have copies of the parameters on all devices"):
        TreeTrainStep(tiny, RULE, make_mesh(fsdp=2), num_shards=8)


def test_a_batch_that_the_shards_do_not_divide_is_rejected(tiny):
    mesh = mesh_of(1)
    state, rows = create_train_state(tiny, RULE, jax.random.key(0), mesh), jnp.asarray(windows(tiny, 12))
    with pytest.raises(ValueError, match="batch size must be a positive multiple of 8"):
        TreeTrainStep(tiny, RULE, mesh, num_shards=8)(state, rows, jax.random.key(0))
    with pytest.raises(ValueError, match="batch size must be a positive multiple of 8"):
        make_tree_eval_step(tiny, mesh, num_shards=8)(state.params, rows)


def test_a_shard_needs_less_memory_than_a_batch(tiny):
    wide = dataclasses.replace(tiny, seq_len=64)
    whole = estimate_memory(wide, global_batch_size=64)
    shards = estimate_memory(wide, global_batch_size=64, num_shards=16)
    assert shards.temporary_bytes < whole.temporary_bytes
    assert shards.state_bytes <= whole.state_bytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="this system cannot restrict a process to some CPUs")
def test_with_fixed_threads_the_number_of_cpus_changes_no_bit():
    assert sys.platform == "linux"
    found, all_cpus = set(), sorted(os.sched_getaffinity(0))
    for num_cpus in (1, len(all_cpus)):
        cpus = ",".join(map(str, all_cpus[:num_cpus]))
        restricted = f"import os; os.sched_setaffinity(0, {{{cpus}}})" + SMALL_RUN
        environment = {
            **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            "JAX_PLATFORMS": "cpu", "NPROC": "2", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", restricted], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == len(hashlib.sha256().hexdigest())
