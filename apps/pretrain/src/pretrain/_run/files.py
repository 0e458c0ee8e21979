"""Files that a kill or a power cut leaves complete, as they were or as they become."""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any, TypeVar

from pretrain._errors import UsageError

# What file systems answer that cannot sync a folder, such as those over object storage.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

_logger = logging.getLogger("pretrain")
T = TypeVar("T")


def write_durably(path: Path, text: str) -> None:
    """Replace a file. Once this returns, the new contents outlast a power cut; before, the old ones do."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make what was written to a file outlast a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlast a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def parse_json(kind: type[T], text: str | bytes, name: object, remedy: str) -> T:
    """Parse JSON as a dataclass or another type, and check the type of every field.

    Args:
        kind: what the JSON must hold.
        text: the JSON.
        name: what holds it, for the error.
        remedy: what the user can do where the JSON is anything else, a sentence.

    Raises:
        UsageError: the JSON is damaged, or holds something else.
    """
    from pydantic import TypeAdapter, ValidationError  # a tenth of a second, which `--help` does without

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        reason = f"{field}: {reason}" if field else reason
        raise UsageError(
            f"{name} must be JSON that a run has written, got an error in it ({reason}). {remedy}"
        ) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one per line, each with a step.

    A last line that a kill cut off is dropped. Other lines that are no such objects, such as a power cut leaves, are
    dropped with a warning.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    values = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if (
            isinstance(value, dict)
            and type(value.get("step")) is int
            and set(map(type, value.values())) <= {int, float}
        ):
            values.append(value)
    if len(values) < len(lines):
        _logger.warning("%s: dropped %d lines that are no JSON objects of numbers", path, len(lines) - len(values))
    return values


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Add a JSON object to a file that has one per line, after what a kill cut off."""
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file.fileno(), file.tell()):
            file.write(b"\n")
        file.write(json.dumps(value, allow_nan=False).encode() + b"\n")


def _ends_with_newline(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"
