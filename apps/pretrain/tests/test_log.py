import json
import signal
import struct
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    TrainState,
    create_optimizer,
    create_train_state,
    flops_per_token,
    make_train_step,
)
from pretrain import PRESETS
from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._training.run_log import RunLog, StepTimer

events: Any = event_pb2  # its classes are made when it is imported, unseen by type checkers


@pytest.fixture
def timer():
    return StepTimer(PRESETS["quickstart"](), "cpu", 1)


def metrics(loss, *, grad_norm=1.0, num_skipped=0, in_a_row=0):
    return {
        "loss": jnp.float32(loss),
        "grad_norm": jnp.float32(grad_norm),
        "num_skipped": jnp.int32(num_skipped),
        "num_skipped_in_a_row": jnp.int32(in_a_row),
    }


def test_a_record_says_what_the_steps_since_the_last_one_took(timer):
    timer.restart(10)
    with timer.waiting_for_data():
        time.sleep(0.02)
    record = timer.record(14, metrics(1.5, grad_norm=0.25))
    assert (record["step"], record["loss"], record["grad_norm"]) == (14, 1.5, 0.25)
    assert record["learning_rate"] == pytest.approx(2e-3 * 14 / 51, rel=1e-5)
    assert record["step_s"] >= 0.005
    assert record["data_wait_s"] >= 0.005
    assert record["tokens_per_s"] == pytest.approx(16 * 64 / record["step_s"])
    assert "mfu" not in record  # this device's peak is not known


@pytest.mark.parametrize("num_devices", [1, 8])
def test_mfu_is_the_share_of_the_peak_of_all_devices(num_devices):
    config = PRESETS["quickstart"]()
    timer = StepTimer(config, "NVIDIA H200", num_devices)
    time.sleep(0.02)
    record = timer.record(1, metrics(1.5))
    flops_per_s = flops_per_token(config.model) * record["tokens_per_s"]
    assert record["mfu"] == pytest.approx(flops_per_s / (989e12 * num_devices))


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_step_that_was_skipped_is_counted_and_has_no_loss(timer, loss):
    timer.record(10, metrics(2.0))
    record = timer.record(20, metrics(loss, num_skipped=3))
    assert (record["num_skipped"], "loss" in record) == (3, False)
    assert record["learning_rate"] == pytest.approx(2e-3 * 17 / 51, rel=1e-5)  # of the seventeenth update
    assert "num_skipped" in timer.record(21, metrics(1.9, num_skipped=3))


def test_a_run_that_only_skips_ends(timer):
    timer.record(40, metrics("nan", num_skipped=49, in_a_row=49))
    with pytest.raises(FloatingPointError, match=r"got none in the last 50 steps up to step 60\. Lower --optim"):
        timer.record(60, metrics("nan", num_skipped=50, in_a_row=50))


def test_to_be_stopped_does_not_end_a_run_that_only_skips(timer):
    assert timer.record(55, metrics("nan", num_skipped=55, in_a_row=55), is_due=False)["num_skipped"] == 55


MODEL = GPT2Config(vocab_size=65, seq_len=8, num_layers=1, num_heads=1, embed_dim=8)
SAVE_EVERY, RECORD_EVERY = 20, 10


def last_step(optimizer, train_step, kill_after=None):
    """The step at which a run ends that has no finite loss from step 23 on, killed and resumed once or not at all."""
    config = PRESETS["quickstart"]()
    state, timer = create_train_state(MODEL, optimizer, jax.random.key(0)), StepTimer(config, "cpu", 1)
    saved, step = jax.tree.map(np.asarray, state), 0
    while step < 200:
        step += 1
        windows = np.full((2, 9), 65 if step >= 23 else 3, np.uint16)  # 65 is no token
        state, found = train_step(state, windows, jax.random.key(1))
        if step % RECORD_EVERY == 0:
            try:
                timer.record(step, found)
            except FloatingPointError:
                return step
        if step % SAVE_EVERY == 0:
            saved = jax.tree.map(np.asarray, state)
        if step == kill_after:
            counters = {name: getattr(saved, name) for name in ("step", "num_skipped", "num_skipped_in_a_row")}
            arrays = {"params": saved.params, "opt_state": saved.opt_state}
            state = TrainState(**jax.tree.map(jnp.asarray, counters | arrays))
            timer, step, kill_after = StepTimer(config, "cpu", 1), int(saved.step), None
    return None


@pytest.mark.fault
def test_a_kill_does_not_move_the_step_at_which_a_diverged_run_ends(record_property):
    record_property("fault", "a diverged run is killed while it skips steps")
    record_property("lost", "steps since the last checkpoint")
    optimizer = create_optimizer(OptimizerConfig(), 200)
    train_step = make_train_step(MODEL, optimizer)
    assert last_step(optimizer, train_step) == 80  # 22 + 50 steps, then the next that is recorded
    assert [last_step(optimizer, train_step, kill_after) for kill_after in (15, 41, 79)] == [80] * 3


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    sent = []
    with RunLog(folder, send=sent.append) as log:
        log.begin(10)
        log.write({"step": 10, "loss": 2.0})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [
        {"step": 0},
        {"step": 10, "loss": 2.0},
    ]
    assert sent == [{"step": 10, "loss": 2.0}]
    assert json.loads(folder.starts.read_text())["step"] == 10
    assert scalars(folder) == {10: {"loss": 2.0}}


def scalars(folder):
    """By step, what TensorBoard shows: of the files in order, less what a later start hides."""
    shown: dict[int, dict[str, float]] = {}
    for path in sorted(folder.tensorboard.iterdir()):
        data, position = path.read_bytes(), 0
        while position + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, position)
            if position + 16 + size > len(data):
                break  # cut off by a kill
            event = events.Event.FromString(data[position + 12 : position + 12 + size])
            position += 16 + size
            if event.session_log.status == events.SessionLog.START:
                shown = {step: values for step, values in shown.items() if step < event.step}
            for value in event.summary.value:
                assert value.tag not in shown.setdefault(event.step, {})
                shown[event.step][value.tag] = value.simple_value
    return shown


def test_tensorboard_hides_what_a_later_start_records_again(tmp_path):
    folder = RunFolder(tmp_path)
    for start, loss in ((0, 3.0), (2, 2.0)):
        with RunLog(folder, send=lambda record: None) as log:
            log.begin(start)
            for step in range(start, 4):
                log.write({"step": step, "loss": loss})
        time.sleep(1.1)  # the name of a file is the second and the process of its start
    assert scalars(folder) == {0: {"loss": 3.0}, 1: {"loss": 3.0}, 2: {"loss": 2.0}, 3: {"loss": 2.0}}


# A run's log from a step on. Once it is told that step 20 is saved, it goes on until it is killed.
LOGGING = """
import sys, time
from pathlib import Path
from pretrain._training.run_log import RunLog
from pretrain._run.folder import RunFolder

folder, start, stop = RunFolder(Path(sys.argv[1])), *map(int, sys.argv[2:])
with RunLog(folder, send=lambda record: None) as log:
    log.begin(start)
    for step in range(start, stop):
        if step == 20:
            log.push()  # then the checkpoint of step 20 is saved
            print("saved", flush=True)
        log.write({"step": step, "loss": float(step), "grad_norm": 0.5})
    while start == 0:
        time.sleep(1)
"""


@pytest.mark.fault
def test_a_kill_after_a_save_loses_no_metric_before_it(tmp_path, record_property):
    record_property("fault", "SIGKILL between a save and the next flush of TensorBoard's events")
    record_property("lost", "steps since the last checkpoint")
    folder = RunFolder(tmp_path)
    for start, stop in ((0, 30), (20, 40)):
        process = subprocess.Popen(
            [sys.executable, "-c", LOGGING, str(tmp_path), str(start), str(stop)], stdout=subprocess.PIPE
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saved\n"
            if start == 0:
                process.send_signal(signal.SIGKILL)
        assert process.returncode == (-signal.SIGKILL if start == 0 else 0)
        # Whatever of the steps after the save is there: all those before it are.
        assert {step: {"loss": float(step), "grad_norm": 0.5} for step in range(20)}.items() <= scalars(folder).items()
    assert [*scalars(folder)] == [*range(40)]
    assert [record["step"] for record in read_lines(folder.metrics)] == [*range(40)]


@pytest.mark.fault
def test_tensorboard_that_cannot_be_written_does_not_stop_the_log(tmp_path, caplog, record_property):
    record_property("fault", "TensorBoard's folder cannot be made")
    record_property("lost", "TensorBoard's curves")
    folder = RunFolder(tmp_path)
    folder.tensorboard.write_text("a file in its place")
    with RunLog(folder, send=lambda record: None) as log:
        log.begin(0)
        log.write({"step": 0, "val_loss": 5.0})
        log.push()
    assert read_lines(folder.metrics) == [{"step": 0, "val_loss": 5.0}]
    (warning,) = caplog.messages
    assert warning.startswith("the run goes on without TensorBoard's events: FileExistsError: ")


def test_what_is_not_finite_is_left_out(tmp_path):
    folder, sent = RunFolder(tmp_path), []
    with RunLog(folder, send=sent.append) as log:
        log.begin(0)
        log.write({"step": 0, "val_loss": float("nan"), "learning_rate": 0.5})
    assert sent == read_lines(folder.metrics) == [{"step": 0, "learning_rate": 0.5}]
