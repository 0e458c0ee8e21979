"""Temporary folders of the clusters that this user's processes start on this machine: sockets, logs and other files.

<temporary folder>/ray-jax-<user id>                 closed to other users
<temporary folder>/ray-jax-<user id>/<name>          Ray's temporary folder of one cluster
<temporary folder>/ray-jax-<user id>/<name>/lock     locked by the driver until it ends
<temporary folder>/ray-jax-<user id>/<name>/failed   exists if a launch has failed: the logs stay

The kernel releases the lock however the driver ends. The reaper (`_reaper.py`) then deletes the folder. If the reaper
is killed too, the next start deletes it. The logs of the newest failed launches stay.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import uuid
from pathlib import Path

from ray_jax_launch._errors import LaunchError

NUM_KEPT = 5
# Ray's longest name below its temporary folder, and the longest path of a socket.
_SOCKET_LENGTH = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_MAX_PATH_LENGTH = 103 if sys.platform == "darwin" else 107
_FAILED = "failed"


class ClusterFolder:
    """Ray's temporary folder of a cluster that this process starts. No other user can read what is in it.

    The constructor deletes the folders of clusters whose driver has ended.

    Raises:
        LaunchError: no folder for temporary files can be used.
    """

    def __init__(self) -> None:
        parent = _parent()
        clean_up(parent)
        self._lock = -1
        while self._lock < 0:
            self.path = parent / uuid.uuid4().hex[:6]
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # of another process, which deletes it
                self.path.mkdir(mode=0o700)
                self._lock = _lock(self.path)

    def close(self) -> None:
        """Release the lock. The folder stays until `delete`."""
        os.close(self._lock)


def mark_failed(folder: Path) -> None:
    """Let the logs of a cluster stay after its end."""
    with contextlib.suppress(OSError):  # somebody has deleted the folder
        (folder / _FAILED).touch(mode=0o600)


def clean_up(parent: Path) -> None:
    """Delete the folders of clusters whose driver has ended, but not the logs of the newest failed launches."""
    ended: list[tuple[float, Path, int]] = []
    for path in parent.iterdir():
        with contextlib.suppress(OSError):  # another process deletes it, or it is no folder
            lock = _lock(path)
            if lock >= 0:
                failed = path / _FAILED
                ended.append((failed.stat().st_mtime if failed.exists() else 0.0, path, lock))
    for place, (failed_s, path, lock) in enumerate(sorted(ended, reverse=True)):
        try:
            with contextlib.suppress(OSError):  # such as a file of another user; the next start tries again
                _delete(path, keeps_logs=failed_s > 0 and place < NUM_KEPT)
        finally:
            os.close(lock)


def _parent() -> Path:
    """Return the folder that holds all clusters of this user, and make it if it does not exist."""
    name = f"ray-jax-{os.getuid()}"
    # As Ray does: RAY_TMPDIR, then TMPDIR except on macOS, where it is too long for sockets.
    given = os.environ.get("RAY_TMPDIR")
    candidates = [given] if given else [*([] if sys.platform == "darwin" else [os.environ.get("TMPDIR")]), "/tmp"]
    longest = _MAX_PATH_LENGTH - _SOCKET_LENGTH - len(f"/{name}/123456")
    reason = ""
    for base in (Path(text).absolute() for text in candidates if text):
        if len(os.fsencode(base)) > longest:
            reason = reason or f"one of {len(os.fsencode(base))} characters"
            continue
        parent = base / name
        try:
            if given:
                base.mkdir(parents=True, exist_ok=True)
            parent.mkdir(mode=0o700, exist_ok=True)
            found = parent.lstat()
            # In a folder that all users share, another user could have made this folder, or a link of this name.
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                reason = reason or f"{str(base)!r}, where another user has made {name}"
                continue
            parent.chmod(0o700)
            if os.access(parent, os.W_OK | os.X_OK):
                return parent
            reason = reason or f"{str(base)!r} (Permission denied)"
        except OSError as error:
            reason = reason or f"{str(base)!r} ({error.strerror})"
    raise LaunchError(
        f"{'RAY_TMPDIR' if given else 'TMPDIR'} must be a folder of at most {longest} characters that can be written, "
        f"got {reason}. Set RAY_TMPDIR to another folder on a local disk."
    )


def _lock(folder: Path) -> int:
    """Lock a folder. Return the descriptor of its lock, or -1 if another process has the lock or deleted the folder."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    # Before this process took the lock, another process can have taken it to delete the folder.
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return -1
    return descriptor


def _delete(folder: Path, *, keeps_logs: bool) -> None:
    """Delete a folder whose lock this process has, the lock last, or all but its logs."""
    sessions = [path for path in folder.iterdir() if path.name not in ("lock", _FAILED)]
    for session in sessions:
        inner = [*session.iterdir()] if keeps_logs and session.is_dir() and not session.is_symlink() else [session]
        for path in inner:
            if path.name != "logs":
                _remove(path)
    if not keeps_logs:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
