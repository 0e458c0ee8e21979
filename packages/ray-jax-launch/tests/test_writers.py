"""Writers of checkpoints in their process: threads, log filters, folders, and saves or deletions that fail."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ray_jax_launch import Checkpoints, LaunchError, UnsavedCheckpointError, checkpoint_steps, intact_step
from ray_jax_launch._checkpoint import writers
from ray_jax_launch._checkpoint.folder_store import FolderStore
from ray_jax_launch._checkpoint.save_events import notify_of_saves

TREE = {"w": jnp.arange(7.0)}


def error_of(call: Callable[[], Any]) -> Any:
    """Return what `logging` keeps of the error of a function."""
    try:
        call()
    except Exception:  # of any kind
        return sys.exc_info()
    raise AssertionError("no error")


NOWHERE: Any = Path("/nowhere")  # Orbax declares its own path class, but accepts any
OF_ORBAX = f"{Path(ocp.__file__).parent}/utils.py"


@pytest.mark.parametrize(
    ("level", "path", "call", "is_shown"),
    [
        (logging.WARNING, OF_ORBAX, None, False),
        (logging.ERROR, OF_ORBAX, None, True),
        (logging.WARNING, __file__, None, True),
        (logging.ERROR, __file__, lambda: 1 / 0, True),
        (logging.ERROR, __file__, lambda: ocp.PyTreeCheckpointHandler().metadata(NOWHERE), False),
    ],
    ids=["warning of Orbax", "error of Orbax", "other warning", "other traceback", "traceback of Orbax"],
)
def test_only_warnings_and_tracebacks_of_orbax_are_hidden(level: int, path: str, call: Any, is_shown: bool) -> None:
    record = logging.LogRecord("absl", level, path, 1, "look", (), None if call is None else error_of(call))
    assert writers._is_shown(record) == is_shown


def test_a_process_is_changed_once_however_many_writers_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    writers._silence_tracebacks()
    hook = sys.unraisablehook
    writers._silence_tracebacks()
    assert sys.unraisablehook is hook
    for name in ("absl", "asyncio"):
        assert logging.getLogger(name).filters.count(writers._is_shown) == 1
    hidden = SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    others = [SimpleNamespace(object=None, exc_value=RuntimeError("look")), SimpleNamespace(**vars(hidden))]
    others[1].object = shown
    for unraisable in (hidden, *others):
        hook(unraisable)  # pyright: ignore[reportArgumentType]
    assert shown == others


def test_closed_checkpoints_leave_no_thread(place: Path | str) -> None:
    """The first time starts what the process keeps. Threads of Orbax end a moment after their work."""

    def count() -> int:
        return sum(not thread.daemon for thread in threading.enumerate())

    kept, opened = 0, []
    for step in range(1, 4):
        with Checkpoints(place) as checkpoints:
            opened.append(checkpoints)  # Python ends the threads of an object that is gone
            checkpoints.save(step, {"params": TREE}, metadata={})
            checkpoints.wait()
            checkpoints.restore(step, {"params": TREE})
        until_s = time.monotonic() + 60
        while step == 3 and count() > kept and time.monotonic() < until_s:
            time.sleep(0.05)
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoints"):
                thread.join(timeout=60)
        assert step < 3 or count() <= kept
        kept = count()


def test_a_relative_folder_stays_where_it_was_when_the_loop_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpoints("runs") as checkpoints:
        checkpoints.save(1, {"params": TREE}, metadata={"step": 1})
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(2, {"params": TREE}, metadata={"step": 2})
        checkpoints.wait()
        assert checkpoints.broadcast_metadata(1) == {"step": 1}
        np.testing.assert_array_equal(checkpoints.restore(2, {"params": TREE})["params"]["w"], TREE["w"])
    assert intact_step(tmp_path / "runs") == 2
    assert os.listdir(tmp_path / "elsewhere") == []  # noqa: PTH208


@pytest.mark.parametrize("raised", ["other", "save"])
def test_a_save_that_fails_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: str
) -> None:
    problem, saved, failed, is_reported = OSError("broken disk"), [], [], threading.Event()

    def fail(store: FolderStore, step: int, num_processes: int) -> None:
        raise problem

    def loop() -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"params": TREE}, metadata={})
            checkpoints.wait()
            monkeypatch.setattr(FolderStore, "write_checksums", fail)
            checkpoints.save(3, {"params": TREE}, metadata={})
            if raised == "other":
                raise ZeroDivisionError
            assert is_reported.wait(timeout=300)
            assert checkpoints.latest_step() == checkpoints.durable_step() == 1
            raise failed[0]  # as `stop_requested` does

    def report(error: Exception) -> None:
        failed.append(error)
        is_reported.set()

    expected_error = ZeroDivisionError if raised == "other" else UnsavedCheckpointError
    with (
        notify_of_saves(lambda folder, step: saved.append((folder, step)), report),
        pytest.raises(expected_error),
    ):
        loop()
    assert saved == [(tmp_path, 1)]
    assert [type(error) for error in failed] == [UnsavedCheckpointError]
    assert "broken disk" in str(failed[0])
    expected = [str(failed[0])] if raised == "other" else []
    assert [record.message for record in caplog.records if record.name == "ray_jax_launch"] == expected
    assert checkpoint_steps(tmp_path) == [1]


@pytest.mark.parametrize("error", [OSError("busy"), LaunchError("busy")], ids=["folder", "object storage"])
def test_a_checkpoint_that_cannot_be_deleted_is_logged_and_deleted_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail_once(store: FolderStore, step: int) -> None:
        if step == 3:
            raise error
        unlist(store, step)

    def fail(store: FolderStore) -> None:
        raise error

    unlist = FolderStore.unlist
    monkeypatch.setattr(FolderStore, "unlist", fail_once)
    monkeypatch.setattr(FolderStore, "sweep", fail)
    with Checkpoints(tmp_path, num_to_keep=3) as checkpoints:
        for step in (1, 3, 5):
            checkpoints.save(step, {"params": TREE}, metadata={})
    with Checkpoints(tmp_path, num_to_keep=1) as checkpoints:
        for step in (7, 9):
            checkpoints.save(step, {"params": TREE}, metadata={})
            checkpoints.wait()
    assert checkpoint_steps(tmp_path) == [3, 9]
    assert caplog.messages.count(f"checkpoint 3 in {tmp_path} cannot be deleted: busy") == 1
    assert f"files of old checkpoints in {tmp_path} cannot be deleted: busy" in caplog.messages
    assert len([*tmp_path.glob(".trash-*")]) == 3
    monkeypatch.undo()
    with Checkpoints(tmp_path, num_to_keep=1) as checkpoints:
        checkpoints.save(11, {"params": TREE}, metadata={})
    assert [path.name for path in tmp_path.iterdir()] == ["11"]
