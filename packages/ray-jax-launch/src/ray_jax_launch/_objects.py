"""Checkpoints in object storage, which has no renaming: one is there once the object that lists its parts is.

<uri>/<step>/process-0.tar, process-1.tar, ...   what each process wrote; unpacked together, an Orbax checkpoint
<uri>/<step>/checkpoint.json                     written last: sizes and checksums of those, metadata, score
"""

import json
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from ray_jax_launch._errors import DamagedCheckpointError
from ray_jax_launch._storage import open_uri

_LISTING = "checkpoint.json"
_BLOCK_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Listing:
    """What makes a checkpoint out of its parts."""

    parts: dict[str, tuple[int, int]]
    """By name: size in bytes, and CRC-32."""

    metadata: dict[str, Any]
    """What the user saved beside the arrays."""

    score: float | None
    """What the best are chosen by."""


class Objects:
    """The checkpoints below a URI.

    Args:
        uri: such as `s3://bucket/run/checkpoints`.
        create: make the folder, for a process that will write.

    Raises:
        LaunchError: it cannot be reached.
    """

    def __init__(self, uri: str, *, create: bool = False) -> None:
        self._filesystem, self._root = open_uri(uri, create=create)

    def steps(self) -> list[int]:
        """Numbers of the checkpoints that are whole."""
        return [step for step, names in self._contents().items() if _LISTING in names]

    def find_damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint's parts, or None. Reads all of them."""
        name = _LISTING
        try:
            for name, expected in self.listing(step).parts.items():
                with self._filesystem.open_input_stream(f"{self._root}/{step}/{name}") as stream:
                    source = _Summing(stream)
                    for _ in source.blocks():
                        pass
                    source.check(name, expected)
        except DamagedCheckpointError as error:
            return str(error)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return str(error)
        return None

    def set_aside(self, step: int) -> None:
        """List a checkpoint no more; its parts stay until one of its number is written."""
        listing = f"{self._root}/{step}/{_LISTING}"
        self._filesystem.move(listing, f"{listing}.damaged")

    def listing(self, step: int) -> Listing:
        """What a checkpoint consists of.

        Raises:
            DamagedCheckpointError: it cannot be read.
        """
        with self._filesystem.open_input_stream(f"{self._root}/{step}/{_LISTING}") as stream:
            content = stream.read()
        try:
            found = json.loads(content)
            parts = {name: (int(size), int(checksum)) for name, (size, checksum) in found["parts"].items()}
            return Listing(parts, dict(found["metadata"]), found["score"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{_LISTING} cannot be read") from error

    def write_part(self, step: int, rank: int, folder: Path) -> tuple[int, int]:
        """Upload the files of a folder as one process's part. Returns its size and CRC-32."""
        self._filesystem.create_dir(f"{self._root}/{step}")
        with self._filesystem.open_output_stream(f"{self._root}/{step}/{part_name(rank)}") as stream:
            target = _Summing(stream)
            with tarfile.open(fileobj=cast("IO[bytes]", target), mode="w|", bufsize=_BLOCK_BYTES) as tar:
                for path in sorted(folder.iterdir()):
                    tar.add(path, path.name)
        return target.size, target.checksum

    def read_parts(self, step: int, folder: Path) -> None:
        """Unpack what all processes wrote into a folder.

        Raises:
            DamagedCheckpointError: a part is not what was written.
        """
        for name, expected in self.listing(step).parts.items():
            with self._filesystem.open_input_stream(f"{self._root}/{step}/{name}") as stream:
                source = _Summing(stream)
                try:
                    with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r|", bufsize=_BLOCK_BYTES) as tar:
                        tar.extractall(folder, filter="data")
                except tarfile.TarError as error:
                    raise DamagedCheckpointError(f"{name} is no tar file: {error}") from error
                for _ in source.blocks():  # what follows the archive's end counts as well
                    pass
                source.check(name, expected)

    def commit(self, step: int, listing: Listing) -> None:
        """Make a checkpoint out of the parts that were written."""
        content = json.dumps(asdict(listing)).encode()
        with self._filesystem.open_output_stream(f"{self._root}/{step}/{_LISTING}") as stream:
            stream.write(content)

    def delete(self, step: int) -> None:
        """Delete a checkpoint: first what lists it, so that no half one is ever listed."""
        names = self._contents().get(step, set())
        for name in sorted(names, key=lambda name: name != _LISTING):
            self._filesystem.delete_file(f"{self._root}/{step}/{name}")

    def sweep(self) -> None:
        """Delete the parts that a crash left without a listing."""
        for step, names in self._contents().items():
            if not any(name.startswith(_LISTING) for name in names):
                self.delete(step)

    def _contents(self) -> dict[int, set[str]]:
        from pyarrow.fs import FileSelector  # see open_uri

        contents: dict[int, set[str]] = {}
        for info in self._filesystem.get_file_info(FileSelector(self._root, recursive=True, allow_not_found=True)):
            number, _, name = info.path[len(self._root.rstrip("/")) + 1 :].partition("/")
            if number.isdigit() and name and info.is_file:
                contents.setdefault(int(number), set()).add(name)
        return contents


def part_name(rank: int) -> str:
    """Name of the object that a process writes."""
    return f"process-{rank}.tar"


class _Summing:
    """A stream that knows the size and checksum of what went through it."""

    def __init__(self, stream: IO[bytes] | Any) -> None:
        self._stream = stream
        self.size = self.checksum = 0

    def write(self, block: bytes) -> int:
        self._count(block)
        self._stream.write(block)
        return len(block)

    def read(self, size: int) -> bytes:
        block = self._stream.read(size)
        self._count(block)
        return block

    def blocks(self) -> Iterator[bytes]:
        while block := self.read(_BLOCK_BYTES):
            yield block

    def check(self, name: str, expected: tuple[int, int]) -> None:
        if self.size != expected[0]:
            raise DamagedCheckpointError(f"{name} has {self.size} bytes, not {expected[0]}")
        if self.checksum != expected[1]:
            raise DamagedCheckpointError(f"{name} does not have the checksum it was written with")

    def _count(self, block: bytes) -> None:
        self.size += len(block)
        self.checksum = zlib.crc32(block, self.checksum)
