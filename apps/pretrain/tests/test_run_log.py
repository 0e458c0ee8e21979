import signal
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run.description import DataDescription, RunDescription
from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample, read_phases, seconds_by_phase
from pretrain._training.run_log import RunLog

events: Any = event_pb2  # its import makes the classes; type checkers do not see them


CONFIG = with_vocab_size(PRESETS["quickstart"](), 257)
DATA = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={})
DESCRIPTION = RunDescription(config=CONFIG, data=DATA, hardware="cpu:1", versions={})


def start_log(folder, send=lambda record: None, clock=time.time):
    return RunLog(folder, DESCRIPTION, send=send, clock=clock)


def begin(log, start, began_s=0.0):
    log.begin(start, began_s, "cpu", 2)


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    sent = []
    with start_log(folder, sent.append) as log:
        begin(log, 10)
        log.write({"step": 10, "loss": 2.0})
    assert read_lines(folder.metrics) == [{"step": 0}, {"step": 10, "loss": 2.0}]
    assert [line for line in sent if "phase" not in line] == [{"step": 10, "loss": 2.0}]
    (start,) = read_lines(folder.starts)
    assert {name: start[name] for name in ("step", "workers", "devices", "device")} == {
        "step": 10, "workers": 1, "devices": 2, "device": "cpu",
    }  # fmt: skip
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
        with start_log(folder) as log:
            begin(log, start)
            for step in range(start, 4):
                log.write({"step": step, "loss": loss})
        time.sleep(1.1)  # the name of a file is the second and the process of its start
    assert scalars(folder) == {0: {"loss": 3.0}, 1: {"loss": 3.0}, 2: {"loss": 2.0}, 3: {"loss": 2.0}}


# A run's log from a step on. Once it is told that step 20 is saved, it goes on until it is killed.
LOGGING = """
import sys, time
from pathlib import Path
from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe
from pretrain._run.folder import RunFolder
from pretrain._training.run_log import RunLog

folder, start, stop = RunFolder(Path(sys.argv[1])), *map(int, sys.argv[2:])
data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={})
with RunLog(folder, describe(PRESETS["quickstart"](), data, "cpu:1"), send=lambda record: None) as log:
    log.begin(start, time.time(), "cpu", 1)
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
    with start_log(folder) as log:
        begin(log, 0)
        log.write({"step": 0, "val_loss": 5.0})
        log.push()
    assert read_lines(folder.metrics) == [{"step": 0, "val_loss": 5.0}]
    (warning,) = caplog.messages
    assert warning.startswith("the run goes on without TensorBoard's events: FileExistsError: ")


def test_what_is_not_finite_is_left_out(tmp_path):
    folder, sent = RunFolder(tmp_path), []
    with start_log(folder, sent.append) as log:
        begin(log, 0)
        log.write({"step": 0, "val_loss": float("nan"), "learning_rate": 0.5})
    assert read_lines(folder.metrics) == [{"step": 0, "learning_rate": 0.5}]
    assert {"step": 0, "learning_rate": 0.5} in sent


def test_a_sample_of_a_step_is_written_once(tmp_path):
    folder = RunFolder(tmp_path)
    for start in (0, 10):
        with start_log(folder) as log:
            begin(log, start)
            for step in range(start, 30, 10):
                log.write_sample(Sample(step=step, prompt="a", text=f"a{step}"))
    assert [(sample["step"], sample["text"]) for sample in read_lines(folder.samples)] == [
        (0, "a0"), (10, "a10"), (20, "a20"),
    ]  # fmt: skip


def phases(folder):
    return [(phase.phase, phase.step, phase.time_s) for phase in read_phases(folder)]


@pytest.fixture
def interrupted_at_20(tmp_path):
    """A run whose workers have logged up to second 20, at step 5, and then been killed."""
    folder, now = RunFolder(tmp_path), iter((3.0, 4.0, 9.0))
    log = start_log(folder, clock=lambda: next(now))
    begin(log, 0, 1.0)
    log.phase(0, "compiling")
    log.phase(1, "training")
    log.phase(2, "training")  # it goes on
    log.write({"step": 5, "time_s": 20.0})
    return folder


BEFORE = [("starting", 0, 1.0), ("loading", 0, 3.0), ("compiling", 0, 4.0), ("training", 1, 9.0)]


def test_workers_that_start_again_were_restarting_since_the_last_sign_of_life(interrupted_at_20):
    with start_log(interrupted_at_20, clock=lambda: 30.0) as log:
        begin(log, 5, 1.0)
        log.phase(5, "finished")
    assert phases(interrupted_at_20) == [
        *BEFORE, ("restarting", 5, 20.0), ("loading", 5, 30.0), ("finished", 5, 30.0),
    ]  # fmt: skip


def test_a_run_is_stopped_from_a_kill_to_the_next_command(interrupted_at_20):
    with start_log(interrupted_at_20, clock=lambda: 30.0) as log:
        begin(log, 5, 25.0)
    assert phases(interrupted_at_20) == [
        *BEFORE, ("stopped", 1, 20.0), ("starting", 5, 25.0), ("loading", 5, 30.0), ("stopped", 5, 30.0),
    ]  # fmt: skip
    found = seconds_by_phase(read_phases(interrupted_at_20), 30.0)
    assert found == {"starting": 7.0, "loading": 1.0, "compiling": 5.0, "training": 11.0}
