"""Files that a power cut leaves as they were or as they are to be, never empty or cut."""

import os
from pathlib import Path


def write_durably(path: Path, data: str) -> None:
    """Write a small file under a temporary name, and give it its name once it is on disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or a folder, whose contents are on disk, and wait until the new name is on disk too."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
