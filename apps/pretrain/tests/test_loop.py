import dataclasses
import functools
import logging
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    abstract_train_state,
    create_optimizer,
    create_train_state,
    make_mesh,
    make_train_step,
)
from owt_data import PrepareOptions, open_tokens, prepare, read_steps_by_tasks
from pretrain import PRESETS, TrainConfig, main
from pretrain._training import loop, setup, train_batches
from pretrain._training.load_state import restore
from pretrain._training.loop import due
from pretrain._training.setup import warn_of_bfloat16
from pretrain._training.step_meter import StepMeter
from ray_jax_launch import Checkpoints, LaunchError, latest_step
from ray_jax_launch._checkpoint.writers import FolderWriter

MODEL = GPT2Config(vocab_size=65, seq_len=8, num_layers=1, num_heads=1, embed_dim=8)
SMALL_RUN = (
    "--data book.txt --tokenizer bytes --hardware local --train.max-steps 2 --train.global-batch-size 4 "
    "--model.seq-len 16 --model.num-layers 1 --model.num-heads 1 --model.embed-dim 8"
)


def test_a_state_comes_back_with_its_counters_and_its_record(tmp_path):
    unrecorded = {"loss_sum": 0.5, "num_losses": 1, "grad_norm_max": 2.0}
    optimizer, mesh = create_optimizer(OptimizerConfig(), 100), make_mesh()
    state = create_train_state(MODEL, optimizer, jax.random.key(0), mesh)
    record = {"step": 30, "loss": 1.5}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            30,
            {"params": state.params, "opt_state": state.opt_state},
            metadata={"record": record, "num_skipped": 7, "num_skipped_in_a_row": 3, "unrecorded": unrecorded},
        )
        checkpoints.wait()
        found, metadata = restore(checkpoints, 30, abstract_train_state(MODEL, optimizer, mesh))
    assert (int(found.step), int(found.num_skipped), int(found.num_skipped_in_a_row)) == (30, 7, 3)
    assert (metadata["record"], metadata["unrecorded"]) == (record, unrecorded)
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(state, name))


def test_a_run_counts_as_finished_once_its_last_checkpoint_is_complete(tmp_path, monkeypatch):
    """A save that fails after that would be lost without a word."""
    noted, commit = [], FolderWriter.commit

    def commit_late(*args):
        time.sleep(2)
        return commit(*args)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    monkeypatch.setattr(FolderWriter, "commit", commit_late)
    monkeypatch.setattr(loop, "mark_finished", lambda value: noted.append(latest_step("runs/run/checkpoints")))
    assert main(f"{SMALL_RUN} --name run --trackers".split()) == 0
    assert noted == [2]


@pytest.mark.parametrize("split", ["train", "val"])
def test_token_files_that_a_node_does_not_see_are_named_before_anything_is_computed(split, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 20)
    prepare(str(tmp_path / "text.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    data = open_tokens(str(tmp_path / "tokens"), tokenizer="bytes")
    train_batches.check_readable(data, 8)
    data = open_tokens(str(tmp_path / "tokens"), tokenizer="bytes")  # as a worker gets it: nothing is open
    path = tmp_path / "tokens" / f"{split}.bin"
    path.unlink()
    with pytest.raises(LaunchError, match=rf"a folder that all nodes share, got {path}, which node .* does not see"):
        train_batches.check_readable(data, 8)


@pytest.fixture
def cluster():
    """A Ray of this test alone. Without one, Ray Data connects to any Ray of this machine, also one that is ending."""
    ray.shutdown()  # that of a run of an earlier test
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def test_batches_are_the_same_when_ray_data_takes_over(cluster, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    prepare(str(tmp_path / "text.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    data = open_tokens(str(tmp_path / "tokens"), tokenizer="bytes")
    config = PRESETS["baby"]()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=9, order="shuffle"))
    few = functools.partial(read_steps_by_tasks, first_steps=3)
    monkeypatch.setattr("owt_data.read_steps_by_tasks", few)
    with_ray_data, alone = (
        [*train_batches.train_batches(config, data, 2, uses_ray_data=uses_ray_data)] for uses_ray_data in (True, False)
    )
    assert len(with_ray_data) == 7
    for windows, expected in zip(with_ray_data, alone, strict=True):
        np.testing.assert_array_equal(windows, expected)


def test_what_is_done_every_so_many_steps_is_also_done_at_the_last_step():
    train = TrainConfig(max_steps=10, checkpoint_every=4, eval_every=5, log_every=3)
    found = {step: due(train, step) for step in range(1, 11)}
    assert [step for step in found if found[step].checkpoint] == [4, 8, 10]
    assert [step for step in found if found[step].validation] == [5, 10]
    assert [step for step in found if found[step].record] == [3, 6, 9, 10]


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        ("bfloat16", "7.5", ["Tesla T4 computes bfloat16 slowly (compute capability 7.5): --model.dtype float32 is"]),
        ("float32", "7.5", []),
        ("bfloat16", "8.0", []),
    ],
)
def test_bfloat16_on_an_old_gpu_is_a_line_in_the_log(dtype, capability, expected, caplog):
    config = PRESETS["tutorial"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    warn_of_bfloat16(config, SimpleNamespace(device_kind="Tesla T4", compute_capability=capability))
    assert [message.partition(" faster")[0] for message in caplog.messages] == expected


def test_rank_0_alone_warns_of_bfloat16(monkeypatch, caplog):
    config = PRESETS["tutorial"]()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    warn_of_bfloat16(config, SimpleNamespace(device_kind="Tesla T4", compute_capability="7.5"))
    assert (config.model.dtype, caplog.messages) == ("bfloat16", [])


@pytest.mark.parametrize(("platform", "compiled"), [("cpu", 1), ("tpu", 1), ("gpu", 0)])
def test_the_step_is_compiled_beside_the_load_but_not_on_a_gpu(platform, compiled):
    """The compiler for GPUs times kernels, while the checkpoint is read."""
    lowered = []
    step = SimpleNamespace(lower=lambda *shapes: lowered.append(shapes) or SimpleNamespace(compile=lambda: None))
    parts: Any = SimpleNamespace(
        mesh=make_mesh(), device=SimpleNamespace(platform=platform), train_step=step, like="shapes", key="key"
    )
    rows = np.arange(12, dtype=np.uint16).reshape(4, 3)
    windows = setup.Setup.first_windows(parts, iter([rows]))
    np.testing.assert_array_equal(windows, rows)
    assert [(like, key) for like, _, key in lowered] == [("shapes", "key")] * compiled


@pytest.mark.slow
def test_the_time_of_a_step_does_not_include_the_first_one_of_a_start(tmp_path, monkeypatch):
    """Its clock starts when the device has nothing to do."""
    occupy = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), x).sum())
    busy = jax.block_until_ready(jnp.zeros((512, 512)))
    jax.block_until_ready(occupy(busy))  # compiles
    add_zero = jax.jit(lambda value, number: value + (0 * number).astype(value.dtype))
    newest, are_computed = {}, []

    class SlowStep:
        def __init__(self, *args, **kwargs):
            self.step = make_train_step(*args, **kwargs)
            self.lower = self.step.lower

        def __call__(self, *state):
            state, metrics = self.step(*state)
            long_work = occupy(busy)
            newest.update({name: add_zero(value, long_work) for name, value in metrics.items()})
            return state, {**newest}

    def start(meter):
        are_computed.append(all(value.is_ready() for value in newest.values()))
        return start_clock(meter)

    start_clock = StepMeter.start
    monkeypatch.setattr(setup, "make_train_step", SlowStep)
    monkeypatch.setattr(StepMeter, "start", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    assert main(SMALL_RUN.split()) == 0
    assert are_computed
    assert all(are_computed)
