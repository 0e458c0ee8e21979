"""The folder of a run, made for a launch: workers find it by a marker file."""

import contextlib
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._ray_internals.ray_train import STORAGE_MARKER_NAME
from ray_jax_launch._storage import StoragePath, join_path, make_durable_folder, open_uri

_MARKER = ".launch-"
_NEW = ".new"  # before the name of a marker that is not locked yet
# A killed launch leaves its marker. On this host its lock tells. That of another host counts as left after this time.
_LEFT_AFTER_S = 24 * 3600.0


class RunFolder(NamedTuple):
    """The folder of a run, or its URI."""

    path: StoragePath
    marker: Path | None
    """A file in the folder, which every worker must find there. None in object storage."""


@contextlib.contextmanager
def making_run_folder(storage_path: StoragePath, name: str) -> Iterator[RunFolder]:
    """Make the run's folder, with a marker file while the block runs.

    If the block raises, the folders that were made are deleted, unless there is something in them.

    Raises:
        LaunchError: the storage cannot be written or reached.
    """
    run_path = join_path(storage_path, name)
    if not isinstance(run_path, Path):
        open_uri(run_path, create=True)
        yield RunFolder(run_path, None)
        return
    run_path = run_path.absolute()
    marker = run_path / f"{_MARKER}{uuid.uuid4().hex}"
    made: list[Path] = []
    lock = -1
    try:
        try:
            made += (path for path in (*reversed(run_path.parents), run_path) if not path.exists())
            make_durable_folder(run_path)
            for other in [*run_path.glob(f"{_MARKER}*"), *run_path.glob(f"{_NEW}{_MARKER}*")]:
                with contextlib.suppress(OSError):  # its launch has ended just now
                    if _is_left(other):
                        other.unlink()
            lock = _make_marker(marker)
        except OSError as error:
            raise LaunchError(
                f"storage_path must be a folder that can be written, got {run_path} ({error.strerror}). Choose another."
            ) from error
        yield RunFolder(run_path, marker)
    except BaseException:  # of any kind, also Ctrl-C: a launch that has not begun leaves nothing
        _delete_markers(marker)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # it does not exist, or there is something in it
                path.rmdir()
        raise
    else:
        _delete_markers(marker)
    finally:
        if lock >= 0:
            os.close(lock)


def _make_marker(marker: Path) -> int:
    """Make a marker, which is locked from the moment that it has its name. Return the descriptor of the lock."""
    new = marker.with_name(f"{_NEW}{marker.name}")
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the marker counts as left after a day
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, socket.gethostname().encode())
        new.rename(marker)
    except BaseException:  # also Ctrl-C
        os.close(lock)
        new.unlink(missing_ok=True)
        raise
    return lock


def _is_left(marker: Path) -> bool:
    """Return whether the launch of a marker has ended."""
    with marker.open() as file:
        if file.read() == socket.gethostname():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                pass  # the file system has no locks
            else:
                return True
    return time.time() - marker.stat().st_mtime > _LEFT_AFTER_S


def _delete_markers(marker: Path) -> None:
    """Delete the marker of a launch. The last launch deletes Ray's too, which Ray leaves behind."""
    with contextlib.suppress(OSError):  # the folder could not be made, or can no longer be reached
        marker.unlink(missing_ok=True)
        if not any(marker.parent.glob(f"{_MARKER}*")):
            (marker.parent / STORAGE_MARKER_NAME).unlink(missing_ok=True)
