"""Local folders for the files of checkpoints, before their upload to object storage and after their download.

<temporary folder>/ray-jax-launch-<user id>/<name>        files of one process
<temporary folder>/ray-jax-launch-<user id>/<name>.lock   locked by the process until it ends

The kernel releases the lock however the process ends. The next start deletes the files of every lock that it can take.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from ray_jax_launch._errors import LaunchError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Staging:
    """A folder of this process, deleted by `close` or by the next start on this machine.

    The constructor deletes the folders of processes that have ended, of all runs of this user.

    Args:
        uri: of the checkpoints. The name of the folder contains its hash.

    Raises:
        LaunchError: the folder for temporary files belongs to another user.
    """

    def __init__(self, uri: str) -> None:
        parent = _parent()
        _clean_up(parent)
        self._lock = -1
        while self._lock < 0:
            name = f"{hashlib.sha256(os.fsencode(uri)).hexdigest()[:16]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self.path = parent / name
            self._lock = _lock(_lock_path(self.path), os.O_CREAT | os.O_EXCL)
        self.path.mkdir(mode=0o700)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Make a folder in this folder, and delete it at the end of the `with` block."""
        folder = self.make_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def make_folder(self) -> Path:
        """Make a folder in this folder."""
        return Path(tempfile.mkdtemp(dir=self.path))

    def close(self) -> None:
        """Delete everything. A second call does nothing."""
        if self._lock >= 0:
            _delete(self.path)
            os.close(self._lock)
            self._lock = -1


def node_of(folder: Path) -> str:
    """Fingerprint of the node and a folder, equal in processes that see each other's files in the folder."""
    found = folder.stat()
    # The kernel's boot id differs between hosts; macOS has no such file.
    host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    return f"{host} {found.st_dev} {found.st_ino}"


def _parent() -> Path:
    parent = Path(tempfile.gettempdir(), f"ray-jax-launch-{os.getuid()}")
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = parent.lstat()
    # In a folder that all users share, another user could have made this folder, or a link of this name.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise LaunchError(f"{parent} must be a folder of this user, got one of user {found.st_uid}. Set TMPDIR.")
    return parent


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _clean_up(parent: Path) -> None:
    for path in parent.glob("*.lock"):
        lock = _lock(path, 0)
        if lock >= 0:
            _delete(path.with_suffix(""))
            os.close(lock)


def _lock(path: Path, flags: int) -> int:
    """Lock a file. Return its descriptor, or -1 if another process has the lock or deleted the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | flags, 0o600)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    # Before this process took the lock, another process can have taken it to delete the file.
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return -1
    return descriptor


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_path(folder).unlink(missing_ok=True)
