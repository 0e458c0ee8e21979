"""Files that get their names when they are complete. A kill leaves the earlier file, or none."""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

# Errors of file systems that cannot sync a folder, such as those over object storage.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def write_file(path: Path, data: str | memoryview, *, durable: bool = False) -> None:
    """Write a file under a temporary name, then rename it. Several processes may write the same file.

    Args:
        path: the file.
        data: the contents.
        durable: whether to wait until the contents and the name are on disk, which a power cut needs.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


@contextlib.contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and its parents if they are missing. Those that are made and are empty at the end are removed."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it is not empty, or could not be made
                folder.rmdir()


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder whose contents are on disk, and wait until the new name is on disk too."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, if the file system can sync a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)
