"""Verification of a checkpoint's files and archives: their format, their sizes and their checksums.

A checkpoint has a part for each process that wrote it: the files of this process, described by a JSON file that the
process wrote. Later, any number of processes share the parts to verify them (`share_of`). The JSON files hold the
number of their format, the version of ray-jax-launch that wrote them, and a checksum of the whole, beside their own
fields.
"""

import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from ray_jax_launch._checkpoint.retry import ABSENT, retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError

BLOCK_BYTES = 1 << 22
FORMAT = 1
_CHECKSUM = "checksum"
# The number of a checkpoint, which is the name of its folder. It fits 64 bits.
STEP_NAME = re.compile("0|[1-9][0-9]{0,17}")
_PACKAGE = "ray-jax-launch"
_VERSION = re.compile(r"[0-9][\w.+!-]{0,40}", re.ASCII)
# Names and sizes that no file system has are damage of the file that holds them.
_MAX_NAME_BYTES, _MAX_BYTES = 255, 1 << 62

T = TypeVar("T")
Checksum = tuple[int, int]
"""Size in bytes, and CRC-32."""
Share = tuple[int, int]
"""Rank of a process, and number of the processes that share some work."""
ALL: Share = (0, 1)


class ChecksummedStream:
    """A binary stream that computes the checksum of all bytes read or written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size = self._crc = 0

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes."""
        block = self._stream.read(size)
        self._add(block)
        return block

    def write(self, block: bytes) -> None:
        """Write a block."""
        self._stream.write(block)
        self._add(block)

    def read_to_end(self) -> Checksum:
        """Read the rest, and return the checksum."""
        while self.read(BLOCK_BYTES):
            pass
        return self.checksum()

    def checksum(self) -> Checksum:
        """Return the checksum of the bytes so far."""
        return self._size, self._crc

    def _add(self, block: bytes) -> None:
        self._size += len(block)
        self._crc = zlib.crc32(block, self._crc)


def open_regular(path: Path, name: str) -> IO[bytes]:
    """Open a regular file to read, without a buffer. Never waits for a writer, as the opening of a pipe does.

    Raises:
        DamagedCheckpointError: it is a folder, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedCheckpointError(f"{name} is no regular file")
    return open(path, "rb", 0, opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK))


def write_copy(file: IO[bytes], block: bytes) -> None:
    """Write a block to the local copy of a file that is read, open without a buffer.

    Raises:
        LaunchError: the copy cannot be written. No `OSError`, after which the file would be read again.
    """
    left = memoryview(block)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise LaunchError(
            f"{file.name} could not be written: {error.strerror}. Free some space, raise the limit of `ulimit -f`, or "
            "set TMPDIR to another folder."
        ) from error


def read_present(name: str, address: str, read: Callable[[], T]) -> T:
    """Call a function that reads a file of a checkpoint, and retry it.

    Raises:
        DamagedCheckpointError: the file is missing.
    """
    try:
        return retry(address, read)
    except ABSENT as error:
        raise DamagedCheckpointError(f"{name} is missing") from error


def parse(name: str, content: bytes, convert: Callable[[Any], T]) -> T:
    """Convert the contents of a JSON file.

    Raises:
        DamagedCheckpointError: the file is not JSON, is nested too deeply, or holds something else.
    """
    try:
        return convert(json.loads(content))
    except (DamagedCheckpointError, LaunchError):  # which the function has found
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpointError(f"{name} cannot be read") from error


def to_json(fields: Mapping[str, Any]) -> str:
    """Return the JSON of a file with these fields, a format, a version and a checksum."""
    content = json.loads(json.dumps({"format": FORMAT, "version": version(_PACKAGE), **fields}))
    return json.dumps(content | {_CHECKSUM: _checksum(content)})


def _checksum(content: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the fields of a JSON file, less its checksum, in any order."""
    fields = {name: value for name, value in content.items() if name != _CHECKSUM}
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def parse_fields(name: str, place: str, content: bytes, convert: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Convert the fields of a file that `to_json` has made.

    Args:
        name: of the file.
        place: of the file, for the message of a `LaunchError`.
        content: of the file.
        convert: a function for each field.

    Raises:
        DamagedCheckpointError: the file is not JSON, a field is missing or holds something else, or the checksum is
            another.
        LaunchError: a newer version of this package wrote the file.
    """

    def split(found: Any) -> tuple[int, str, dict[str, Any]]:
        rest = dict(found)
        number, writer = rest.pop("format"), rest.pop("version")
        if type(number) is not int or number < 1 or not _VERSION.fullmatch(writer):
            raise ValueError
        return number, writer, rest

    number, writer, found = parse(name, content, split)
    problem = f"format {number}" if number > FORMAT else ""
    if not problem:
        fields = parse(name, content, lambda found: {field: to(found[field]) for field, to in convert.items()})
        # After the fields that must be there: a changed letter in the name of a field is damage.
        unknown = sorted(found.keys() - convert.keys() - {_CHECKSUM})
        if not unknown:
            if parse(name, content, lambda found: found[_CHECKSUM] != _checksum(found)):
                raise DamagedCheckpointError(f"{name} does not have the checksum it was written with")
            return fields
        problem = f"the field {unknown[0][:40]!r}"
    raise LaunchError(
        f"{place} must have format {FORMAT}, which {_PACKAGE} {version(_PACKAGE)} reads, got {problem}, which "
        f"{_PACKAGE} {writer} wrote. Install {_PACKAGE} {writer} or later."
    )


def share_of(share: Share, num_parts: int) -> list[tuple[int, slice]]:
    """Return the parts of a checkpoint that are the share of a process, and of each part which of its files.

    >>> share_of((1, 2), 5), share_of((5, 8), 3)
    ([(1, slice(0, None, 1)), (3, slice(0, None, 1))], [(2, slice(1, None, 2))])
    """
    rank, num_ranks = share
    num_of_part = max(1, len(range(rank % num_parts, num_ranks, num_parts)))  # which share one part
    parts = range(rank % num_parts, num_parts, num_ranks)
    return [(part, slice(rank // num_parts, None, num_of_part)) for part in parts]


def to_count(found: Any) -> int:
    """Return the number of the processes that wrote a checkpoint, from JSON.

    Raises:
        ValueError: it is no such number.
    """
    if type(found) is not int or not 0 < found < _MAX_BYTES:
        raise ValueError("no number of processes")
    return found


def check_step(found: Any, name: str, step: int) -> int:
    """Check that a file with the number of its checkpoint is in the folder of this checkpoint.

    Raises:
        DamagedCheckpointError: the folder was renamed or copied.
        ValueError: it is no number.
    """
    if type(found) is not int:
        raise ValueError("no number of a checkpoint")
    if found != step:
        raise DamagedCheckpointError(f"{name} is that of checkpoint {found}")
    return found


def to_checksums(found: Any) -> dict[str, Checksum]:
    """Return checksums by name from JSON.

    Raises:
        ValueError, TypeError, AttributeError: a name is no relative path, or a number is no size or checksum.
    """
    checksums = {check_name(name): (size, crc) for name, (size, crc) in found.items()}
    for number in (number for checksum in checksums.values() for number in checksum):
        if type(number) is not int or not 0 <= number < _MAX_BYTES:
            raise ValueError("no size or checksum")
    return checksums


def check_name(name: str) -> str:
    """Return the name of a file, relative to the folder of a checkpoint.

    Raises:
        ValueError: the name leads out of the folder, or no file can have it.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError("no relative path")
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in path.parts):
        raise ValueError("a name that is too long")
    return name


def compare(name: str, found: Checksum, written: Checksum) -> None:
    """Compare a file with what was written.

    Raises:
        DamagedCheckpointError: the checksums differ.
    """
    if found != written:
        sizes = f"has {found[0]} bytes, not {written[0]}"
        problem = "does not have the checksum it was written with" if found[0] == written[0] else sizes
        raise DamagedCheckpointError(f"{name} {problem}")
