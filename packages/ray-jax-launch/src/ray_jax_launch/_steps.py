"""Which checkpoints there are, and whether their files are those that were written.

Imports no jax, so that drivers can ask without touching the devices.
"""

import json
import logging
import os
import zlib
from pathlib import Path
from typing import Protocol

from ray_jax_launch._errors import DamagedCheckpointError
from ray_jax_launch._objects import Objects
from ray_jax_launch._storage import StoragePath, is_uri

CHECKSUMS = "checksums.json"
# Beside the items, Orbax writes these last, after the checksums, and restores without them.
_UNCHECKED = (CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt")

_logger = logging.getLogger("ray_jax_launch")
_BLOCK_BYTES = 1 << 22


def latest_step(folder: StoragePath) -> int | None:
    """Number of the newest whole checkpoint in a folder or below a URI, or None where there is none.

    One under way is not listed. Nothing is read: see `intact_step`.
    """
    return max(list_steps(folder), default=None)


def list_steps(folder: StoragePath) -> list[int]:
    """Numbers of all whole checkpoints in a folder or below a URI, in no order."""
    return _kept_in(folder).steps()


def intact_step(folder: StoragePath, *, set_aside: bool = False) -> int | None:
    """Number of the newest checkpoint whose files have the sizes and checksums they were written with.

    Every file of the newest checkpoint is read; of older ones only if it is damaged. In a folder, a checkpoint
    without checksums, as versions before 0.3 could leave them, counts as intact.

    Args:
        folder: where the checkpoints are; a URI is object storage.
        set_aside: rename damaged checkpoints, from 40 to 40.damaged, so that they are listed no more and
            their numbers are free. (In object storage the object that lists it is renamed.) For one process,
            while none writes.

    Returns:
        The number, or None where there is no checkpoint at all. Each damaged one is logged as a warning.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
        LaunchError: the object storage cannot be reached.
    """
    kept = _kept_in(folder)
    damaged: list[tuple[int, str]] = []
    for step in sorted(kept.steps(), reverse=True):
        problem = kept.find_damage(step)
        if problem is None:
            break
        damaged.append((step, problem))
    else:
        step = None
    if damaged and step is None:
        listed = "; ".join(f"{number}: {problem}" for number, problem in damaged)
        raise DamagedCheckpointError(
            f"expected an undamaged checkpoint in {folder}, but all are damaged ({listed}): restore them from a copy, "
            "or begin anew in another folder"
        )
    for number, problem in damaged:
        _logger.warning(
            "checkpoint %s in %s is damaged (%s): going back to checkpoint %s", number, folder, problem, step
        )
        if set_aside:
            kept.set_aside(number)
    return step


def write_checksums(checkpoint: Path) -> None:
    """Note the size and checksum (CRC-32) of every file of a checkpoint's items, in a file beside them."""
    files = {
        str(path.relative_to(checkpoint)): [path.stat().st_size, _crc32(path)]
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and not (path.parent == checkpoint and path.name in _UNCHECKED)
    }
    temporary = checkpoint / f"{CHECKSUMS}.tmp"
    temporary.write_text(json.dumps({"algorithm": "crc32", "files": files}))
    os.replace(temporary, checkpoint / CHECKSUMS)


class _Kept(Protocol):
    """Checkpoints by their numbers."""

    def steps(self) -> list[int]: ...

    def find_damage(self, step: int) -> str | None: ...

    def set_aside(self, step: int) -> None: ...


def _kept_in(folder: StoragePath) -> _Kept:
    return Objects(str(folder)) if is_uri(folder) else _Folders(Path(folder))


class _Folders:
    """Checkpoints in a folder: whole ones have a number as their name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdigit() and path.is_dir()]

    def find_damage(self, step: int) -> str | None:
        checkpoint = self._folder / str(step)
        path = checkpoint / CHECKSUMS
        if not path.exists():
            return None
        try:
            files = json.loads(path.read_text())["files"]
            for name, (size, checksum) in files.items():
                file = checkpoint / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != size:
                    return f"{name} has {file.stat().st_size} bytes, not {size}"
                if _crc32(file) != checksum:
                    return f"{name} does not have the checksum it was written with"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{CHECKSUMS} cannot be read"
        except OSError as error:
            return str(error)
        return None

    def set_aside(self, step: int) -> None:
        checkpoint = self._folder / str(step)
        target, number = checkpoint.with_name(f"{step}.damaged"), 1
        while target.exists():
            number += 1
            target = checkpoint.with_name(f"{step}.damaged{number}")
        checkpoint.rename(target)


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum
