"""Which checkpoints a folder holds, and whether their files are those that were written.

Imports no jax, so that drivers can ask without touching the devices.
"""

import json
import logging
import os
import zlib
from pathlib import Path

from ray_jax_launch._errors import DamagedCheckpointError

CHECKSUMS = "checksums.json"

_logger = logging.getLogger("ray_jax_launch")
_BLOCK_BYTES = 1 << 22


def latest_step(folder: Path) -> int | None:
    """Number of the newest whole checkpoint in a folder, or None where there is none.

    A checkpoint under way has a temporary name, which is no number. Nothing is read: see `intact_step`.
    """
    return max(_steps(folder), default=None)


def intact_step(folder: Path, *, set_aside: bool = False) -> int | None:
    """Number of the newest checkpoint whose files have the sizes and checksums they were written with.

    Every file of the newest checkpoint is read; of older ones only if it is damaged. A checkpoint without
    checksums, from before they were written or of a process that was killed just then, counts as intact.

    Args:
        folder: where the checkpoints are.
        set_aside: rename damaged checkpoints, from 40 to 40.damaged, so that they are listed no more and
            their numbers are free. For one process, while none writes.

    Returns:
        The number, or None where there is no checkpoint at all. Each damaged one is logged as a warning.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[tuple[int, str]] = []
    for step in sorted(_steps(folder), reverse=True):
        problem = find_damage(folder / str(step))
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
            _set_aside(folder / str(number))
    return step


def write_checksums(checkpoint: Path) -> None:
    """Note the size and checksum (CRC-32) of every file of a checkpoint, in a file beside them."""
    files = {
        str(path.relative_to(checkpoint)): [path.stat().st_size, _crc32(path)]
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != CHECKSUMS
    }
    temporary = checkpoint / f"{CHECKSUMS}.tmp"
    temporary.write_text(json.dumps({"algorithm": "crc32", "files": files}))
    os.replace(temporary, checkpoint / CHECKSUMS)


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
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


def _steps(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _set_aside(checkpoint: Path) -> None:
    target, number = checkpoint.with_name(f"{checkpoint.name}.damaged"), 1
    while target.exists():
        number += 1
        target = checkpoint.with_name(f"{checkpoint.name}.damaged{number}")
    checkpoint.rename(target)
