"""Checkpoints in object storage, which has no renaming: one is there once the object that lists its parts is.

<uri>/<step>/process-0.tar, process-1.tar, ...   what each process wrote; unpacked together, an Orbax checkpoint
<uri>/<step>/process-1.json, ...                 sizes and checksums of those, for process 0; deleted at the end
<uri>/<step>/checkpoint.json                     written last: sizes and checksums of the parts, metadata, score
"""

import contextlib
import json
import shutil
import tarfile
import zlib
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from ray_jax_launch._checkpoint.retry import retry
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


class ObjectStore:
    """The checkpoints below a URI.

    Every request is repeated for a while when the storage fails.

    Args:
        uri: such as `s3://bucket/run/checkpoints`.

    Raises:
        LaunchError: it cannot be reached.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._root = open_uri(uri)

    def prepare(self) -> None:
        """Make the folder, and delete the parts that a killed process left without a listing."""
        open_uri(self._uri, create=True)
        for step, names in self._contents().items():
            if not any(name.startswith(_LISTING) for name in names):
                self.delete(step)

    def steps(self) -> list[int]:
        """Numbers of the complete checkpoints."""
        return [step for step, names in self._contents().items() if _LISTING in names]

    def version(self, step: int) -> Hashable:
        """Something that stays equal as long as a checkpoint is there; None once it is deleted."""
        try:
            return self._read(f"{step}/{_LISTING}")
        except FileNotFoundError:
            return None

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved as a checkpoint's metadata.

        Raises:
            DamagedCheckpointError: it cannot be read.
        """
        return self.listing(step).metadata

    def score(self, step: int) -> float | None:
        """What the best checkpoints are chosen by."""
        try:
            return self.listing(step).score
        except DamagedCheckpointError:
            return None

    def find_damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint's parts, or None. Reads all of them.

        Raises:
            LaunchError: the storage fails, so that nobody can tell.
        """
        try:
            for name, expected in self.listing(step).parts.items():
                self._read_part(step, name, partial(self._check, step, name, expected))
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def quarantine(self, step: int) -> None:
        """Quarantine a checkpoint: list it no longer. Its parts stay until one of its number is written."""
        listing = f"{self._root}/{step}/{_LISTING}"
        self._filesystem.move(listing, f"{listing}.damaged")

    def listing(self, step: int) -> Listing:
        """What a checkpoint consists of.

        Raises:
            DamagedCheckpointError: that cannot be read.
        """
        try:
            content = self._read(f"{step}/{_LISTING}")
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{_LISTING} is missing") from error
        try:
            found = json.loads(content)
            parts = {name: (int(size), int(checksum)) for name, (size, checksum) in found["parts"].items()}
            return Listing(parts, dict(found["metadata"]), found["score"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{_LISTING} cannot be read") from error

    def write_part(self, step: int, rank: int, folder: Path) -> tuple[int, int]:
        """Upload the files of a folder as one process's part. Returns its size and CRC-32."""
        return retry(self._address(step, part_name(rank)), partial(self._upload, step, rank, folder))

    def write_note(self, step: int, rank: int, save_id: str, part: tuple[int, int]) -> None:
        """Tell process 0 the size and CRC-32 of the part that this process wrote in a save."""
        self._write(f"{step}/{_note_name(rank)}", json.dumps({"save": save_id, "part": part}).encode())

    def read_note(self, step: int, rank: int, save_id: str) -> tuple[int, int]:
        """What a process told in `write_note`.

        Raises:
            FileNotFoundError: it told nothing in this save.
        """
        found: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(self._read(f"{step}/{_note_name(rank)}"))
        if found.get("save") != save_id:
            raise FileNotFoundError(f"process {rank} has uploaded no part of checkpoint {step}: its own error says why")
        size, checksum = found["part"]
        return size, checksum

    def read_parts(self, step: int, folder: Path) -> None:
        """Unpack what all processes wrote into a folder.

        Raises:
            DamagedCheckpointError: a part is not what was written.
        """
        for name, expected in self.listing(step).parts.items():
            self._read_part(step, name, partial(self._download, step, name, expected, folder))

    def commit(self, step: int, listing: Listing) -> None:
        """Make a checkpoint out of the parts that were written."""
        self._write(f"{step}/{_LISTING}", json.dumps(asdict(listing)).encode())
        for name in self._contents().get(step, set()) - listing.parts.keys() - {_LISTING}:
            self._delete(f"{step}/{name}")

    def delete(self, step: int) -> None:
        """Delete a checkpoint: first the object that lists it, so that no half checkpoint is ever listed."""
        names = self._contents().get(step, set())
        for name in sorted(names, key=lambda name: name != _LISTING):
            self._delete(f"{step}/{name}")

    def _address(self, step: int, name: str) -> str:
        return f"{name} of checkpoint {step} in {self._uri}"

    def _read(self, name: str) -> bytes:
        def read() -> bytes:
            with self._filesystem.open_input_stream(f"{self._root}/{name}") as stream:
                return stream.read()

        return retry(f"{name} in {self._uri}", read)

    def _write(self, name: str, content: bytes) -> None:
        def write() -> None:
            with self._filesystem.open_output_stream(f"{self._root}/{name}") as stream:
                stream.write(content)

        retry(f"{name} in {self._uri}", write)

    def _delete(self, name: str) -> None:
        def delete() -> None:
            try:
                self._filesystem.delete_file(f"{self._root}/{name}")
            except FileNotFoundError:  # by the attempt before, whose answer was lost
                return

        retry(f"{name} in {self._uri}", delete)

    def _upload(self, step: int, rank: int, folder: Path) -> tuple[int, int]:
        self._filesystem.create_dir(f"{self._root}/{step}")
        with self._filesystem.open_output_stream(f"{self._root}/{step}/{part_name(rank)}") as stream:
            target = _Summing(stream)
            with tarfile.open(fileobj=cast("IO[bytes]", target), mode="w|", bufsize=_BLOCK_BYTES) as tar:
                for path in sorted(folder.iterdir()):
                    tar.add(path, path.name)
        return target.size, target.checksum

    def _check(self, step: int, name: str, expected: tuple[int, int]) -> None:
        with self._filesystem.open_input_stream(f"{self._root}/{step}/{name}") as stream:
            source = _Summing(stream)
            source.read_rest()
            source.check(name, expected)

    def _download(self, step: int, name: str, expected: tuple[int, int], folder: Path) -> None:
        with self._filesystem.open_input_stream(f"{self._root}/{step}/{name}") as stream:
            source = _Summing(stream)
            try:
                with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r|", bufsize=_BLOCK_BYTES) as tar:
                    for member in tar:
                        _unpack(tar, member, folder, name)
            except (tarfile.TarError, UnicodeError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
                raise DamagedCheckpointError(f"{name} is no tar file: {error}") from error
            source.read_rest()  # what follows the archive's end counts as well
            source.check(name, expected)

    def _read_part(self, step: int, name: str, read: Callable[[], None]) -> None:
        try:
            retry(self._address(step, name), read)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{name} is missing") from error

    def _contents(self) -> dict[int, set[str]]:
        from pyarrow.fs import FileSelector  # see open_uri

        selector = FileSelector(self._root, recursive=True, allow_not_found=True)
        contents: dict[int, set[str]] = {}
        for info in retry(self._uri, partial(self._filesystem.get_file_info, selector)):
            number, _, name = info.path[len(self._root.rstrip("/")) + 1 :].partition("/")
            if number.isdigit() and name and info.is_file:
                contents.setdefault(int(number), set()).add(name)
        return contents


def part_name(rank: int) -> str:
    """Name of the object that a process writes."""
    return f"process-{rank}.tar"


def _note_name(rank: int) -> str:
    return f"process-{rank}.json"


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, part: str) -> None:
    """Write one member of a tar file: folders and regular files below a folder, and nothing else anywhere.

    `TarFile.extractall(filter="data")` does the same, and is missing in Python 3.11.0 to 3.11.3.
    """
    path = PurePosixPath(member.name)
    is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
    if path.is_absolute() or ".." in path.parts or "\0" in member.name or not (is_file or member.isdir()):
        raise DamagedCheckpointError(
            f"{part} must hold files and folders with relative names, got {member.name!r} of type {member.type!r}"
        )
    target = folder / path
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, "a regular file has content"
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file, _BLOCK_BYTES)


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

    def read_rest(self) -> None:
        while self.read(_BLOCK_BYTES):
            pass

    def check(self, name: str, expected: tuple[int, int]) -> None:
        if self.size != expected[0]:
            raise DamagedCheckpointError(f"{name} has {self.size} bytes, not {expected[0]}")
        if self.checksum != expected[1]:
            raise DamagedCheckpointError(f"{name} does not have the checksum it was written with")

    def _count(self, block: bytes) -> None:
        self.size += len(block)
        self.checksum = zlib.crc32(block, self.checksum)
