"""Local folders for the files of checkpoints on their way to and from object storage.

<temporary folder>/ray-jax-launch-<user id>/<name>        the files
<temporary folder>/ray-jax-launch-<user id>/<name>.lock   locked by the process that owns them, as long as it lives

The kernel drops the lock when the process ends, however it ends. So a lock that can be taken belongs to files that
nobody needs, and the next start deletes them.
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
    """A folder that belongs to this process, and is deleted by `close` or by the next start on this machine.

    To make one deletes the folders whose processes have ended, of any run of this user.

    Args:
        uri: of the checkpoints; its hash is part of the name.

    Raises:
        LaunchError: the folder for temporary files belongs to somebody else.
    """

    def __init__(self, uri: str) -> None:
        parent = _parent()
        _clean_up(parent)
        self._lock = -1
        while self._lock < 0:
            name = f"{hashlib.sha256(uri.encode()).hexdigest()[:16]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self.path = parent / name
            self._lock = _lock(_lock_path(self.path), os.O_CREAT | os.O_EXCL)
        self.path.mkdir(mode=0o700)

    def node(self) -> str:
        """Identity of the node and its folder for temporary files: equal in processes that see each other's files."""
        found = self.path.parent.stat()
        # The kernel's boot id differs between hosts; macOS has no such file.
        host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
        return f"{host} {found.st_dev} {found.st_ino}"

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A new folder in this one, deleted at the end of the `with` block."""
        folder = self.make_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def make_folder(self) -> Path:
        """A new folder in this one."""
        return Path(tempfile.mkdtemp(dir=self.path))

    def close(self) -> None:
        """Delete everything. A second call does nothing."""
        if self._lock >= 0:
            _delete(self.path)
            os.close(self._lock)
            self._lock = -1


def _parent() -> Path:
    parent = Path(tempfile.gettempdir(), f"ray-jax-launch-{os.getuid()}")
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = parent.lstat()
    # In a folder that all users share, somebody else could have made it, or a link of that name.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise LaunchError(f"{parent} must be a folder of this user, got one of user {found.st_uid}. Set TMPDIR")
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
    """A descriptor of a locked file; -1 where another process has the lock or deleted the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | flags, 0o600)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    # Between opening and locking, a process that cleans up can have taken the lock and deleted the file.
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return -1
    return descriptor


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_path(folder).unlink(missing_ok=True)
