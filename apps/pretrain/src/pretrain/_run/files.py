"""The files of a run: JSON, lines of JSON, and durable files. After a power cut, a durable file is old or new.

Any file of a run may have been replaced or damaged. A pipe or a device in place of a file is not opened, and JSON that
is too deep, or that has numbers beyond those that a run writes, is damaged JSON.
"""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar

from pretrain._errors import UsageError
from pretrain._field_types import MAX_FLOAT, MAX_INTEGER

# Errors of file systems that cannot sync a folder, such as those over object storage.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

# The names of kinds that are neither a file nor a folder. Opening a folder fails by itself.
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)

# The end of the year 9999, the last one of `datetime`.
_MAX_TIME_S = 253_402_300_799.0
_MAX_DEPTH = 50

_logger = logging.getLogger("pretrain")
T = TypeVar("T")


def check_kind(path: Path) -> None:
    """Check that a file, if it exists, is no pipe and no device: opening one may wait forever.

    Raises:
        OSError: it is a pipe, a device or a socket; or it cannot be reached.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    for holds, name in _KINDS:
        if holds(mode):
            raise OSError(errno.EINVAL, name, str(path))


def read_text(path: Path) -> str:
    """Read a file of a run. Bytes that are not UTF-8 are replaced.

    Raises:
        OSError: there is no such file, it is a pipe or a device, or it cannot be read.
    """
    check_kind(path)
    return path.read_text(encoding="utf-8", errors="replace")


def load_json(text: str | bytes) -> Any:
    """Parse JSON from a file that may be damaged.

    Raises:
        ValueError: the text is no JSON, is nested too deep, or has a number beyond those that a run writes.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too deep JSON") from None
    _check_values(value, _MAX_DEPTH)
    return value


def _check_values(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("too deep JSON")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_values(item, depth - 1)
            if name in ("time_s", "began_s") and isinstance(item, int | float) and not 0 <= item <= _MAX_TIME_S:
                raise ValueError(f"{name} must be a time from 1970 to 9999")
    elif isinstance(value, list):
        for item in value:
            _check_values(item, depth - 1)
    elif (isinstance(value, int) and abs(value) > MAX_INTEGER) or (
        isinstance(value, float) and MAX_FLOAT < abs(value) < float("inf")
    ):
        raise ValueError("a number is too large")


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace a file. A power cut leaves the old content or the new one; once this returns, the new one.

    Args:
        path: the file.
        content: the content; a text is written as UTF-8.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a new file, which replaces another at the end of the block. For copies: it is not durable.

    Several processes may do this at the same time. If the block fails, nothing is left.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON, as `write_durably` does."""
    write_durably(path, json.dumps(value, indent=2) + "\n")


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    check_kind(path)
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
    from pydantic import ValidationError  # takes 0.1 s, which `--help` does not need

    try:
        value = _adapter(kind).validate_json(text, strict=True)
        load_json(text)
        return value
    except ValidationError as error:
        first = error.errors()[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        reason, cause = f"{field}: {reason}" if field else reason, error
    except ValueError as error:
        reason, cause = str(error), error
    raise UsageError(f"{name} must be JSON as a run writes it, got an error in it ({reason}). {remedy}") from cause


@functools.cache  # it takes three times as long to make that of a run's description as to use it
def _adapter(kind: type) -> Any:
    """Return pydantic's `TypeAdapter` of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_lines(path: Path, texts: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one per line, each with a step. A missing file has no lines.

    A last line without its end, which a kill leaves, is dropped. Other damaged lines, which a power cut leaves, are
    dropped with a warning. Values that are not finite are left out.

    Args:
        path: the file.
        texts: names whose values are texts. All other values are numbers.
    """
    try:
        *lines, _ = read_text(path).split("\n")
    except FileNotFoundError:
        return []
    values = [value for line in lines if (value := parse_line(line, texts)) is not None]
    if len(values) < len(lines):
        _warn(path, len(lines) - len(values))
    return values


def parse_line(line: str | bytes, texts: Collection[str] = ()) -> dict[str, Any] | None:
    """Parse a line of a log, without the values that are not finite. Return None for a damaged line.

    Args:
        line: the line, without its end.
        texts: names whose values are texts.
    """
    try:
        value = load_json(line if isinstance(line, str) else line.decode(errors="replace"))
    except ValueError:
        return None
    if not is_line(value, texts):
        return None
    return {name: of for name, of in value.items() if not isinstance(of, float) or math.isfinite(of)}


@contextlib.contextmanager
def open_lines(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """Open a log for reading. A missing file is empty.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
    """
    check_kind(path)
    with (path if path.exists() else Path(os.devnull)).open("rb", buffering=buffering) as file:
        yield file


@functools.cache  # once, however often a command reads the file
def _warn(path: Path, num_dropped: int) -> None:
    what = "lines that are no JSON object with a step, or have too large a number"
    _logger.warning("%s: dropped %d %s", path, num_dropped, what)


def is_line(value: Any, texts: Collection[str] = ()) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a line of a log: a dictionary with a step, whose other values have the right type.

    A number of tokens, if it has one, is one that a run can reach.
    """
    return (
        isinstance(value, dict)
        and type(value.get("step")) is int
        and value["step"] >= 0
        and all(type(of) in ((str,) if name in texts else (int, float)) for name, of in value.items())
        and not (value.get("tokens", 0) < 0 or MAX_INTEGER < value.get("tokens", 0) < math.inf)
    )


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
    """Append a JSON object as a line to a file. A last line without its end gets its end first.

    Raises:
        OSError: the file cannot be written, or is a pipe or a device.
    """
    check_kind(path)
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file.fileno(), file.tell()):
            file.write(b"\n")
        file.write(json.dumps(value, allow_nan=False).encode() + b"\n")


def _ends_with_newline(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"
