"""Durable writes: after a power cut a file has its old or its new contents, never empty or truncated ones."""

import errno
import os
from pathlib import Path

from owt_data._paths import open_regular

# Errors of file systems that cannot sync a folder, such as those over object storage.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def write_durably(path: Path, data: str) -> None:
    """Write a small file to disk under a temporary name, then rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open_regular(temporary, "w", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)


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
