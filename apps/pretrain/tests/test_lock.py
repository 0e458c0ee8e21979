"""The lock of a run, and what a failed command leaves."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector

from owt_data import DataError
from pretrain._errors import RunFailedError, UsageError
from pretrain._run.files import append_line, write_json
from pretrain._run.folder import MovedFolderError, RunFolder
from pretrain._run.history import read_phases
from pretrain._run.lock import _end, command_runs, lock_run
from pretrain._run.remote_copy import reader_copy
from ray_jax_launch import LaunchError, OutOfMemoryError, StorageFullError, UnsavedCheckpointError, open_uri

ERRORS = (DataError, LaunchError, StorageFullError, OutOfMemoryError, UnsavedCheckpointError, OSError)


def begin(folder):
    """Write what the driver and rank 0 write when a run begins."""
    write_json(folder.config, {})
    folder.push()
    writer = folder.log_writer()
    writer.append("phases.jsonl", {"step": 0, "time_s": 5.0, "phase": "training"})
    writer.append("starts.jsonl", {"step": 0, "time_s": 5.0})
    writer.append("metrics.jsonl", {"step": 7, "loss": 2.0})
    writer.flush()


def fail(place, error, *steps):
    """Lock a run, do the steps with its folder, and raise the error."""
    with lock_run(place) as folder:
        for step in steps:
            step(folder)
        raise error


def test_a_folder_is_held_against_a_second_command(tmp_path):
    with (
        lock_run(str(tmp_path / "run")) as folder,
        pytest.raises(UsageError, match="Another command uses"),
        lock_run(str(tmp_path / "run")),
    ):
        pass
    with lock_run(str(tmp_path / "run")):
        assert folder.path.exists()


def test_a_rejection_leaves_no_folder_behind(tmp_path):
    with pytest.raises(ValueError, match="too few"), lock_run(str(tmp_path / "run")):
        raise ValueError("too few")
    assert list(tmp_path.iterdir()) == []


def test_a_rejection_leaves_an_earlier_run_alone(tmp_path):
    with lock_run(str(tmp_path / "run")) as folder:
        write_json(folder.config, {"a": 1})
    with pytest.raises(ValueError, match="conflict"), lock_run(str(tmp_path / "run")):
        raise ValueError("conflict")
    assert json.loads(folder.config.read_text()) == {"a": 1}


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_run_that_was_rejected_leaves_nothing_and_one_that_failed_its_files(error, tmp_path):
    with contextlib.suppress(error), lock_run(str(tmp_path / "run")) as folder:
        write_json(folder.config, {})
        raise error
    assert (tmp_path / "run" / "config.json").exists() == (error is RuntimeError)


@pytest.mark.parametrize("place", ["run", "run/checkpoints/5"])
def test_what_was_there_before_a_rejection_stays(place, tmp_path):
    (tmp_path / place).mkdir(parents=True)
    with contextlib.suppress(ValueError), lock_run(str(tmp_path / "run")) as folder:
        write_json(folder.config, {})
        raise ValueError("too much")
    assert (tmp_path / place).exists()


def test_a_rejection_deletes_no_checkpoint(tmp_path):
    with contextlib.suppress(ValueError), lock_run(str(tmp_path / "run")) as folder:
        (folder.path / "checkpoints" / "5").mkdir(parents=True)
        raise ValueError("too much")
    assert (tmp_path / "run" / "checkpoints" / "5").exists()


@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_after_a_start_deletes_nothing_and_is_no_bad_input(error, tmp_path):
    with pytest.raises(RunFailedError, match=r"full"):
        fail(tmp_path / "run", error("full"), begin)
    folder = RunFolder(tmp_path / "run")
    assert folder.metrics.read_text() == '{"step": 7, "loss": 2.0}\n'
    assert [(phase.phase, phase.step) for phase in read_phases(folder)] == [("training", 0), ("failed", 7)]


def test_a_run_that_has_begun_ends_at_the_time_of_its_failure(tmp_path: Path) -> None:
    before_s = time.time() - 1
    with pytest.raises(RunFailedError):
        fail(tmp_path / "run", OSError("full"), begin)
    assert read_phases(RunFolder(tmp_path / "run"))[-1].time_s > before_s


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("error", [DataError, StorageFullError])
def test_a_failure_after_a_start_deletes_nothing_in_object_storage(error, is_elsewhere, s3, tmp_path):
    """A worker on another machine has a copy of its own: only the storage knows of its start."""
    uri = f"{s3}/{tmp_path.name}/run"

    def begin_there(folder):
        begin(folder.for_worker() if is_elsewhere else folder)

    with pytest.raises(RunFailedError, match=r"full"):
        fail(uri, error("full"), begin_there)
    folder = RunFolder(tmp_path, uri)
    folder.pull()
    assert folder.metrics.read_text() == '{"step": 7, "loss": 2.0}\n'
    assert [phase.phase for phase in read_phases(folder)] == ["training", "failed"]


def test_a_rejection_leaves_no_object_behind(s3, tmp_path):
    with pytest.raises(LaunchError):
        fail(f"{s3}/{tmp_path.name}/run", LaunchError("too few"), lambda folder: write_json(folder.config, {}))
    filesystem, root = open_uri(f"{s3}/{tmp_path.name}/run")
    infos = filesystem.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
    assert [info.path for info in infos if info.is_file and info.size] == []


def test_a_rejection_leaves_an_earlier_run_in_object_storage_alone(s3: str, tmp_path: Path) -> None:
    uri = f"{s3}/{tmp_path.name}/run"
    with pytest.raises(RunFailedError):
        fail(uri, OSError("lost"), begin)
    with pytest.raises(UsageError):
        fail(uri, UsageError("other settings"))
    folder = RunFolder(tmp_path, uri)
    folder.pull()
    assert folder.config.exists()
    assert folder.metrics.read_text() == '{"step": 7, "loss": 2.0}\n'
    assert [phase.phase for phase in read_phases(folder)] == ["training", "failed"]
    assert command_runs(folder) is False  # this machine still knows it


def test_ctrl_c_before_the_lease_leaves_the_run_of_another_machine_alone(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3}/{tmp_path.name}/run"
    other = RunFolder(tmp_path, uri)
    begin(other)

    def interrupt(lease: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pretrain._run.lease._Lease._update_others", interrupt)
    with pytest.raises(KeyboardInterrupt), lock_run(uri):
        pass
    other.pull()
    assert [phase.phase for phase in read_phases(other)] == ["training"]


def test_a_run_whose_folder_is_gone_may_have_begun_and_gets_no_new_one(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="full"):
        fail(tmp_path / "run", OSError("full"), begin, lambda folder: folder.path.rename(tmp_path / "moved"))
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert [phase.phase for phase in read_phases(RunFolder(tmp_path / "moved"))] == ["training"]


def test_settings_that_a_later_command_cannot_change_are_bad_input_although_the_run_has_begun(tmp_path):
    with pytest.raises(RunFailedError):
        fail(tmp_path / "run", OSError("lost"), begin)
    with pytest.raises(UsageError):
        fail(tmp_path / "run", UsageError("other settings"))
    assert [phase.phase for phase in read_phases(RunFolder(tmp_path / "run"))] == ["training", "failed"]


def test_an_interrupted_run_is_stopped_before_its_first_checkpoint(tmp_path):
    for name, steps in (("begun", [begin]), ("described", [lambda folder: write_json(folder.config, {})])):
        with pytest.raises(KeyboardInterrupt):
            fail(tmp_path / name, KeyboardInterrupt(), *steps)
        assert read_phases(RunFolder(tmp_path / name))[-1].phase == "stopped"


def test_a_new_run_that_fails_before_its_workers_start_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no node"):
        fail(tmp_path / "run", RuntimeError("no node"), lambda folder: write_json(folder.config, {}))
    assert [phase.phase for phase in read_phases(RunFolder(tmp_path / "run"))] == ["failed"]


@pytest.mark.parametrize(
    ("error", "ends"), [(KeyboardInterrupt(), [("stopped", 7, 5.0)]), (RuntimeError("no node"), [])]
)
def test_a_killed_run_ends_at_its_last_sign_of_life_if_the_next_command_is_interrupted(
    error: BaseException, ends: list[tuple[str, int, float]], tmp_path: Path
) -> None:
    with lock_run(tmp_path / "run") as folder:
        begin(folder)
    with pytest.raises(type(error)):
        fail(tmp_path / "run", error)
    first, *found = [(phase.phase, phase.step, phase.time_s) for phase in read_phases(folder)]
    assert first == ("training", 0, 5.0)
    assert found == ends


def test_an_ended_run_is_not_stopped_once_more(tmp_path):
    def stop(folder):
        append_line(folder.phases, {"step": 9, "time_s": 6.0, "phase": "stopped"})

    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "run", KeyboardInterrupt(), begin, stop)
    assert [phase.step for phase in read_phases(RunFolder(tmp_path / "run"))] == [0, 9]


def test_the_lock_tells_whether_a_command_runs_and_who_it_is(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert command_runs(folder) is None
    with lock_run(folder.path):
        assert command_runs(folder) is True
        with pytest.raises(UsageError, match=rf"Another command uses .* \(process {os.getpid()} of .*\) since 20"):
            fail(folder.path, AssertionError())
    assert command_runs(folder) is False
    folder.lock.write_text(folder.lock.read_text().replace('"machine": "', '"machine": "another '))
    assert command_runs(folder) is None


def test_the_lock_holds_the_command_that_has_it_and_no_earlier_one(tmp_path: Path) -> None:
    owners = []
    for _ in range(3):
        with lock_run(tmp_path / "run") as folder:
            owners.append(json.loads(folder.lock.read_text())["owner"])
            assert folder.owner == owners[-1]
        assert command_runs(folder) is False
    assert len({*owners}) == 3


def test_a_reader_of_the_lock_is_no_command_that_trains(tmp_path: Path) -> None:
    with lock_run(tmp_path / "run") as folder:
        pass
    with folder.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert command_runs(folder) is False


def test_a_reader_of_a_run_in_object_storage_sees_the_command_of_this_machine(s3: str, tmp_path: Path) -> None:
    uri = f"{s3}/{tmp_path.name}/run"
    with lock_run(uri):
        assert command_runs(reader_copy(uri)) is True
    assert command_runs(reader_copy(uri)) is False


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_file_that_is_locked_is_the_one_that_has_the_name(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected command deletes its folder, and a third one makes it again, after this command has opened the file."""
    lock, left = fcntl.flock, [tmp_path / "run"]

    def lock_too_late(*args: int) -> None:
        if left:
            shutil.rmtree(folder := left.pop())
            if is_replaced:
                folder.mkdir()
                (folder / ".lock").touch()
        lock(*args)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    with lock_run(tmp_path / "run") as folder:
        assert json.loads(folder.lock.read_text())["owner"] == folder.owner
        with pytest.raises(UsageError, match="Another command uses"):
            fail(folder.path, AssertionError())


@pytest.mark.parametrize("is_in_background", [False, True])
def test_a_command_without_a_launch_is_ended_by_a_signal_that_it_does_not_ignore(is_in_background: bool) -> None:
    def note(number: int, frame: object) -> None:
        noted.append(number)

    noted: list[int] = []
    handlers = {signal.SIGINT: signal.SIG_IGN if is_in_background else note, signal.SIGTERM: note}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        _end("another command has the run")
        limit_s = time.monotonic() + 60
        while not noted and time.monotonic() < limit_s:
            time.sleep(0.01)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert noted == [signal.SIGTERM if is_in_background else signal.SIGINT]


def test_a_reader_of_the_lock_does_not_keep_a_command_from_starting(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with lock_run(folder.path):
        pass
    with folder.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        timer.start()
        with lock_run(folder.path):
            pass
        timer.join()


def test_a_folder_that_was_moved_or_replaced_is_not_written(tmp_path):
    with lock_run(tmp_path / "run") as folder:
        folder.check_place()
        folder.path.rename(tmp_path / "moved")
        with pytest.raises(MovedFolderError, match="was moved, deleted or replaced"):
            folder.check_place()
        with lock_run(tmp_path / "run"), pytest.raises(MovedFolderError, match="was moved, deleted or replaced"):
            folder.check_place()
        with pytest.raises(UsageError, match="Another command uses"):
            fail(tmp_path / "moved", AssertionError())
