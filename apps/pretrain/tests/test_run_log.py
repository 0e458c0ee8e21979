import json
import signal
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._training.run_log import RunLog

events: Any = event_pb2  # its import makes the classes; type checkers do not see them


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
