"""Verification of a checkpoint's files and archives by their sizes and checksums."""

import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from ray_jax_launch._checkpoint.retry import ABSENT, retry
from ray_jax_launch._errors import DamagedCheckpointError

BLOCK_BYTES = 1 << 22

T = TypeVar("T")
Checksum = tuple[int, int]
"""Size in bytes, and CRC-32."""


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
        DamagedCheckpointError: the file is not JSON, or holds something else.
    """
    try:
        return convert(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{name} cannot be read") from error


def to_checksums(found: Any) -> dict[str, Checksum]:
    """Return checksums by name from JSON."""
    return {name: (int(size), int(crc)) for name, (size, crc) in found.items()}


def compare(name: str, found: Checksum, written: Checksum) -> None:
    """Compare a file with what was written.

    Raises:
        DamagedCheckpointError: the checksums differ.
    """
    if found != written:
        sizes = f"has {found[0]} bytes, not {written[0]}"
        problem = "does not have the checksum it was written with" if found[0] == written[0] else sizes
        raise DamagedCheckpointError(f"{name} {problem}")
