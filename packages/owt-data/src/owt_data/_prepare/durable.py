"""Durable writes: after a power cut a file has its old or its new contents, never empty or truncated ones."""

import os
from pathlib import Path


def write_durably(path: Path, data: str) -> None:
    """Write a small file to disk under a temporary name, then rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder whose contents are on disk, and wait until the new name is on disk too."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
