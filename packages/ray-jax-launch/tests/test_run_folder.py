"""The folder that a launch makes, with its marker."""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, FileType

from ray_jax_launch import LaunchError
from ray_jax_launch._run_folder import making_run_folder
from ray_jax_launch._storage import open_uri


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_any_exception_deletes_the_marker_and_the_empty_folders(tmp_path, error):
    with pytest.raises(error), making_run_folder(tmp_path / "storage", "run"):
        raise error
    assert [*tmp_path.iterdir()] == []


def test_an_exception_leaves_what_the_run_has_written(tmp_path):
    context = making_run_folder(tmp_path / "storage", "run")
    context.__enter__()
    (tmp_path / "storage" / "run" / "checkpoint").touch()
    assert not context.__exit__(OSError, OSError(), None)
    assert [path.name for path in (tmp_path / "storage" / "run").iterdir()] == ["checkpoint"]


def test_another_start_of_a_run_leaves_the_marker_of_the_first(tmp_path):
    with making_run_folder(tmp_path, "run") as first:
        of_ray = tmp_path / "run" / ".validate_storage_marker"
        of_ray.touch()
        with making_run_folder(tmp_path, "run"):
            pass
        assert first.marker is not None
        assert first.marker.exists()
        assert of_ray.exists()
    assert [*(tmp_path / "run").iterdir()] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from ray_jax_launch._run_folder import making_run_folder

with making_run_folder(Path(sys.argv[1]), "run"):
    (Path(sys.argv[1]) / "run" / ".validate_storage_marker").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_deletes_the_markers_of_a_killed_launch(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert len([*(tmp_path / "run").iterdir()]) == 2
    with making_run_folder(tmp_path, "run") as folder:
        assert [*(tmp_path / "run").glob(".launch-*")] == [folder.marker]
    assert [*(tmp_path / "run").iterdir()] == []


@pytest.mark.parametrize(("hours", "is_left"), [(0, False), (23, False), (25, True)])
def test_a_marker_of_another_host_is_deleted_after_a_day(tmp_path: Path, hours: int, is_left: bool) -> None:
    other = tmp_path / "run" / ".launch-0"
    other.parent.mkdir()
    other.write_text("another host")
    made_s = time.time() - hours * 3600
    os.utime(other, (made_s, made_s))
    with making_run_folder(tmp_path, "run") as folder:
        assert other.exists() == (not is_left)
        assert folder.marker is not None
        assert folder.marker.exists()
    assert other.exists() == (not is_left)


@pytest.mark.parametrize(("hours", "is_left"), [(0, False), (25, True)])
def test_without_locks_a_marker_of_this_host_is_deleted_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int, is_left: bool
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with making_run_folder(tmp_path, "run") as first:
        assert first.marker is not None
        made_s = time.time() - hours * 3600
        os.utime(first.marker, (made_s, made_s))
        with making_run_folder(tmp_path, "run"):
            assert first.marker.exists() == (not is_left)


def test_the_folders_of_a_run_are_on_the_disk_when_its_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ray_jax_launch._storage.sync_folder", synced.append)
    with making_run_folder(tmp_path / "a" / "b", "run"):
        assert synced == [tmp_path / "a" / "b", tmp_path / "a", tmp_path]
    with making_run_folder(tmp_path / "a" / "b", "run"):
        assert len(synced) == 3


def test_a_launch_of_more_than_a_day_keeps_its_marker(tmp_path: Path) -> None:
    with making_run_folder(tmp_path, "run") as first:
        assert first.marker is not None
        os.utime(first.marker, (0, 0))
        with making_run_folder(tmp_path, "run"):
            assert first.marker.exists()


def test_a_marker_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(LaunchError, match="File too large"), making_run_folder(tmp_path / "storage", "run"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


def test_a_marker_that_was_never_complete_is_deleted(tmp_path: Path) -> None:
    left = tmp_path / "run" / ".new.launch-0"
    left.parent.mkdir()
    left.write_text(socket.gethostname())
    with making_run_folder(tmp_path, "run"):
        assert not left.exists()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_launch_leaves_no_file_open(tmp_path: Path, error: type[BaseException] | None) -> None:
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208  (a listing of paths would open one more)
    with contextlib.suppress(KeyboardInterrupt), making_run_folder(tmp_path, "run"), making_run_folder(tmp_path, "run"):
        if error is not None:
            raise error
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


def test_a_relative_folder_is_that_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with making_run_folder(Path("runs"), "run") as folder:
        assert folder.path == tmp_path / "runs" / "run"
        assert folder.marker is not None
        assert folder.marker.parent == folder.path


def test_an_exception_leaves_folders_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    with pytest.raises(KeyboardInterrupt), making_run_folder(tmp_path / "storage", "run"):
        raise KeyboardInterrupt
    assert [*tmp_path.iterdir()] == [tmp_path / "storage"]
    assert [*(tmp_path / "storage").iterdir()] == []


def test_a_run_in_object_storage_has_a_folder_and_no_marker(s3: str, tmp_path: Path) -> None:
    with making_run_folder(f"{s3}/{tmp_path.name}", "a run") as folder:
        assert folder == (f"{s3}/{tmp_path.name}/a%20run", None)
        filesystem, path = open_uri(str(folder.path))
        # The folder was written: a place that cannot be written is known before the loop begins.
        assert filesystem.get_file_info(path).type == FileType.Directory
        assert filesystem.get_file_info(FileSelector(path)) == []


WAITS = """
import signal
import sys
from ray_jax_launch import launch

# Background processes of a shell inherit that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    launch(lambda: None, hardware="gpu:8", storage_path=sys.argv[1], name="run", wait_for_resources_s=600)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_ctrl_c_while_a_launch_waits_for_nodes_leaves_nothing(tmp_path):
    arguments = [sys.executable, "-c", WAITS, str(tmp_path / "storage")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("waiting up to 600 s for more nodes" in line for line in process.stderr)
    assert [*tmp_path.glob("storage/run/.launch-*")] != []
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert output == "interrupted\n", errors
    assert [*tmp_path.iterdir()] == []
