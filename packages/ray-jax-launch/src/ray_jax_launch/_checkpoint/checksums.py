"""Sizes and checksums of a checkpoint's files and archives."""

import zlib
from typing import Any

from ray_jax_launch._errors import DamagedCheckpointError

BLOCK_BYTES = 1 << 22

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


def compare(name: str, found: Checksum, written: Checksum) -> None:
    """Compare a checksum with the checksum of what was written.

    Raises:
        DamagedCheckpointError: they differ.
    """
    if found[0] != written[0]:
        raise DamagedCheckpointError(f"{name} has {found[0]} bytes, not {written[0]}")
    if found != written:
        raise DamagedCheckpointError(f"{name} does not have the checksum it was written with")


def parse(checksums: Any) -> dict[str, Checksum]:
    """Return checksums by name, out of JSON.

    Raises:
        ValueError, TypeError, AttributeError: the JSON holds something else.
    """
    return {name: (int(size), int(crc)) for name, (size, crc) in checksums.items()}
