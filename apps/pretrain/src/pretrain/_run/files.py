"""The files of a run: JSON, lines of JSON, and durable files. After a power cut, a durable file is old or new."""

import errno
import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from pretrain._errors import UsageError

# Errors of file systems that cannot sync a folder, such as those over object storage.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

_logger = logging.getLogger("pretrain")
T = TypeVar("T")


def write_durably(path: Path, text: str) -> None:
    """Replace a file. A power cut leaves the old content or the new one; once this returns, the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON, as `write_durably` does."""
    write_durably(path, json.dumps(value, indent=2) + "\n")


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the file system can."""
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
        kind: the type.
        text: the JSON.
        name: the JSON's file or place, for the error.
        remedy: the last sentence of the error.

    Raises:
        UsageError: the text is not JSON of this type.
    """
    from pydantic import TypeAdapter, ValidationError  # takes 0.1 s, which `--help` does not need

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        reason = f"{field}: {reason}" if field else reason
        raise UsageError(f"{name} must be JSON as a run writes it, got an error in it ({reason}). {remedy}") from error


def read_lines(path: Path, texts: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one per line, each with a step.

    A last line without its end, which a kill leaves, is dropped. Other damaged lines, which a power cut leaves, are
    dropped with a warning.

    Args:
        path: the file.
        texts: names whose values are texts. All other values are numbers.
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
            and all(type(of) in ((str,) if name in texts else (int, float)) for name, of in value.items())
        ):
            values.append(value)
    if len(values) < len(lines):
        _logger.warning("%s: dropped %d lines that are not JSON objects with a step", path, len(lines) - len(values))
    return values


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted name.

    >>> flatten({"seed": 1, "model": {"num_layers": 2}})
    {'seed': 1, 'model.num_layers': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append a JSON object as a line to a file. A last line without its end gets its end first."""
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file.fileno(), file.tell()):
            file.write(b"\n")
        file.write(json.dumps(value, allow_nan=False).encode() + b"\n")


def _ends_with_newline(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"
