import contextlib
import dataclasses
import os
import time

import numpy as np
import pytest

from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run import log_parts
from pretrain._run.description import DataDescription, RunDescription
from pretrain._run.files import read_lines
from pretrain._run.folder import MovedFolderError, RunFolder
from pretrain._run.history import Sample, read_phases, seconds_by_phase
from pretrain._run.lock import lock_run
from pretrain._run.log_parts import STARTS, TEXTS
from pretrain._run.metrics import read_records
from pretrain._run.step_losses import ValLosses
from pretrain._surroundings.processor import processor_name
from pretrain._trackers import tensorboard
from pretrain._trackers.tensorboard import TensorBoard
from pretrain._training.run_log import RunLog
from ray_jax_launch import open_uri

CONFIG = dataclasses.replace(with_vocab_size(PRESETS["quickstart"](), 257), trackers=())
DATA = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={})
DESCRIPTION = RunDescription(config=CONFIG, data=DATA, hardware="cpu:1", versions={})


def start_log(folder, send=lambda record: None, clock=time.time):
    return RunLog(folder, CONFIG, DESCRIPTION, send=send, clock=clock)


def begin(log, start, began_s=0.0):
    log.begin(start, began_s)
    log.open("cpu", 2)


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    sent = []
    with start_log(folder, sent.append) as log:
        begin(log, 10)
        log.write({"step": 10, "loss": 2.0, "windows": "0123456789abcdef"})
    assert read_records(folder.metrics) == [{"step": 0}, {"step": 10, "loss": 2.0, "windows": "0123456789abcdef"}]
    # Only numbers: `log_metrics` makes no gauges of metrics with a text among them.
    assert [line for line in sent if "phase" not in line] == [{"step": 10, "loss": 2.0}]
    (start,) = read_lines(folder.starts, texts=TEXTS[STARTS])
    assert {name: start[name] for name in ("step", "workers", "devices", "device")} == {
        "step": 10, "workers": 1, "devices": 2, "device": "cpu",
    }  # fmt: skip


def test_a_start_has_the_times_of_its_command_and_of_its_workers(tmp_path):
    folder = RunFolder(tmp_path)
    with start_log(folder, clock=lambda: 30.12478) as log:
        begin(log, 7, 25.5)
    assert read_lines(folder.starts, texts=TEXTS[STARTS]) == [
        {
            "step": 7,
            "time_s": 30.125,
            "began_s": 25.5,
            "workers": 1,
            "devices": 2,
            "device": "cpu",
            "processor": processor_name(),
        }
    ]


def test_each_line_of_each_log_is_on_disk_after_a_push(tmp_path, monkeypatch):
    synced, sync = {}, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.update({os.fstat(file).st_ino: os.fstat(file)}), sync(file)))
    with start_log(RunFolder(tmp_path)) as log:
        begin(log, 0)
        log.write({"step": 1, "loss": 2.0})
        log.write_sample(Sample(step=1, prompt="a", text="ab"))
        log.write_losses(1, [2.0])
        log.phase(1, "saving")
        synced.clear()
        log.push()
        paths = [tmp_path, *tmp_path.iterdir()]
        names = {"metrics.jsonl", "samples.jsonl", "starts.jsonl", "phases.jsonl", "step_losses.f32"}
        assert {path.name for path in paths[1:]} == names
        assert {path for path in paths if path.stat().st_ino not in synced} == set()
        assert {path for path in paths if synced[path.stat().st_ino].st_size != path.stat().st_size} == set()


def test_a_record_reaches_object_storage_before_a_save(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(log_parts, "UPLOAD_EVERY_S", 0.1)
    uri = f"{s3}/{tmp_path.name}/run"
    reader = RunFolder(tmp_path / "reader", uri)
    with start_log(RunFolder(tmp_path / "driver", uri)) as log:
        begin(log, 0)
        log.write({"step": 1, "loss": 2.0})
        until_s = time.monotonic() + 60
        while not reader.metrics.exists() or not read_records(reader.metrics):
            assert time.monotonic() < until_s
            time.sleep(0.1)
            reader.pull()
        assert read_records(reader.metrics) == [{"step": 1, "loss": 2.0}]


def test_what_a_tracker_writes_at_its_end_reaches_object_storage(s3, tmp_path, monkeypatch):
    """Offline wandb writes a row when the next one begins, or at the end."""

    class WritesAtItsEnd(TensorBoard):
        def __init__(self, folder, *args):
            super().__init__(folder, *args)
            self.folder = folder

        def close(self):
            super().close()
            (self.folder / "last-row").write_text("row of the last step")

    monkeypatch.setattr(tensorboard, "TensorBoard", WritesAtItsEnd)
    uri = f"{s3}/{tmp_path.name}/run"
    config = dataclasses.replace(CONFIG, trackers=("tensorboard",))
    with RunLog(RunFolder(tmp_path / "driver", uri), config, DESCRIPTION, send=lambda record: None) as log:
        begin(log, 0)
        log.write({"step": 1, "loss": 2.0})
    filesystem, root = open_uri(uri)
    with filesystem.open_input_stream(f"{root}/tensorboard/last-row") as file:
        assert file.read() == b"row of the last step"


def test_the_events_of_a_tracker_reach_object_storage_before_a_save(s3, tmp_path):
    """They are uploaded as files, after they were written."""
    uri = f"{s3}/{tmp_path.name}/run"
    config = dataclasses.replace(CONFIG, trackers=("tensorboard",))
    filesystem, root = open_uri(uri)
    with RunLog(RunFolder(tmp_path / "driver", uri), config, DESCRIPTION, send=lambda record: None) as log:
        begin(log, 0)
        log.write({"step": 6, "loss": 2.0})
        log.push()
        with filesystem.open_input_stream(f"{root}/tensorboard/recorded_steps") as file:
            assert file.read() == b"7"


@pytest.mark.parametrize("fails", [False, True])
def test_a_start_reaches_object_storage_at_once_and_leaves_no_copy(fails, s3, tmp_path):
    uri = f"{s3}/{tmp_path.name}/run"
    reader, copies = RunFolder(tmp_path / "reader", uri), []
    with contextlib.suppress(OSError), start_log(RunFolder(tmp_path / "driver", uri)) as log:
        begin(log, 0)
        copies.append(log.folder.path)
        assert copies[0].is_dir()
        reader.pull()
        assert [start["step"] for start in read_lines(reader.starts, texts=TEXTS[STARTS])] == [0]
        if fails:
            raise OSError("full")
    assert not copies[0].exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_tracker_has_the_records_and_the_samples_however_the_run_ends(fails, tmp_path):
    folder, config = RunFolder(tmp_path), dataclasses.replace(CONFIG, trackers=("tensorboard",))
    with contextlib.suppress(OSError), RunLog(folder, config, DESCRIPTION, send=lambda record: None) as log:
        begin(log, 0)
        log.write({"step": 1, "grad_norm_max": 2.0})
        log.write_sample(Sample(step=1, prompt="def ", text="def some_words"))
        if fails:
            raise OSError("full")
    events = b"".join(path.read_bytes() for path in folder.tensorboard.rglob("events*"))
    assert b"grad_norm_max" in events
    assert b"some_words" in events


def test_what_is_not_finite_is_left_out(tmp_path):
    folder, sent = RunFolder(tmp_path), []
    with start_log(folder, sent.append) as log:
        begin(log, 0)
        log.write({"step": 0, "val_loss": float("nan"), "learning_rate": 0.5})
    assert read_records(folder.metrics) == [{"step": 0, "learning_rate": 0.5}]
    assert {"step": 0, "learning_rate": 0.5} in sent


def test_a_sample_of_a_step_is_written_once(tmp_path):
    folder = RunFolder(tmp_path)
    for start in (0, 0, 10):  # the first one has ended before its first checkpoint
        with start_log(folder) as log:
            begin(log, start)
            for step in range(start, 30, 10):
                log.write_sample(Sample(step=step, prompt="a", text=f"a{step}"))
    assert [(sample["step"], sample["text"]) for sample in read_lines(folder.samples, texts=("prompt", "text"))] == [
        (0, "a0"), (10, "a10"), (20, "a20"),
    ]  # fmt: skip


def phases(folder):
    return [(phase.phase, phase.step, phase.time_s) for phase in read_phases(folder)]


@pytest.fixture
def interrupted_at_20(tmp_path):
    """A run whose workers have logged up to second 20, at step 5, and then been killed."""
    folder, now = RunFolder(tmp_path), iter((3.0, 3.5, 4.0, 9.0))
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


def test_workers_that_fail_are_not_stopped_because_they_may_start_again(tmp_path):
    folder, error = RunFolder(tmp_path), OSError("full")
    with contextlib.suppress(OSError), start_log(folder, clock=lambda: 30.0) as log:
        begin(log, 0, 25.0)
        raise error
    assert phases(folder) == [("starting", 0, 25.0), ("loading", 0, 30.0)]


def test_a_start_that_is_rejected_writes_nothing(tmp_path):
    folder, sent, error = RunFolder(tmp_path), [], ValueError("other arrays")
    with contextlib.suppress(ValueError), start_log(folder, sent.append) as log:
        log.begin(5, 1.0)
        raise error
    assert [line["phase"] for line in sent] == ["starting", "loading"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_log_writes_nothing_after_its_folder_was_moved(is_replaced, tmp_path):
    """Neither into a new folder of the former name, nor into that of another run."""
    place, window = tmp_path / "run", ValLosses(losses=np.ones(1, np.float32), last_count=1)
    with lock_run(place) as folder:
        log = start_log(folder)
        begin(log, 0)
        place.rename(tmp_path / "moved")
        if is_replaced:
            place.mkdir()
            (place / ".lock").write_text('{"owner": "another"}')
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for write in (
            lambda: log.write({"step": 1, "loss": 2.0}),
            lambda: log.write_sample(Sample(step=1, prompt="a", text="ab")),
            lambda: log.write_losses(1, [2.0]),
            lambda: log.write_val_losses(window),
            lambda: log.phase(1, "saving"),
            log.push,
            lambda: start_log(folder),
        ):
            with pytest.raises(MovedFolderError, match="was moved, deleted or replaced"):
                write()
        log.end(1, "a text")  # it cannot fail a run
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert place.exists() == is_replaced


def test_workers_of_a_later_command_that_start_again_were_restarting_too(interrupted_at_20):
    log = start_log(interrupted_at_20, clock=lambda: 30.0)
    begin(log, 5, 25.0)  # another command, whose workers are killed
    with start_log(interrupted_at_20, clock=lambda: 40.0) as log:
        begin(log, 5, 25.0)
        log.phase(5, "finished")
    assert phases(interrupted_at_20)[-3:] == [("restarting", 5, 30.0), ("loading", 5, 40.0), ("finished", 5, 40.0)]


def test_a_command_after_a_stop_begins_with_its_own_start(tmp_path):
    folder = RunFolder(tmp_path)
    for began_s in (25.0, 45.0):
        with start_log(folder, clock=lambda now=began_s + 5: now) as log:
            begin(log, 0, began_s)
    assert phases(folder) == [
        ("starting", 0, 25.0), ("loading", 0, 30.0), ("stopped", 0, 30.0),
        ("starting", 0, 45.0), ("loading", 0, 50.0), ("stopped", 0, 50.0),
    ]  # fmt: skip


def test_a_run_is_stopped_from_a_kill_to_the_next_command(interrupted_at_20):
    with start_log(interrupted_at_20, clock=lambda: 30.0) as log:
        begin(log, 5, 25.0)
        log.write({"step": 7, "time_s": 31.0})
    assert phases(interrupted_at_20) == [
        *BEFORE, ("stopped", 1, 20.0), ("starting", 5, 25.0), ("loading", 5, 30.0), ("stopped", 7, 30.0),
    ]  # fmt: skip
    found = seconds_by_phase(read_phases(interrupted_at_20), 30.0)
    assert found == {"starting": 7.0, "loading": 1.0, "compiling": 5.0, "training": 11.0}
