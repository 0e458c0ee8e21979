"""Checkpoints in object storage, which cannot rename: a checkpoint exists once the object that lists it exists.

<uri>/<step>/process-0.tar              what Orbax keeps about all items: the tree, shapes and types
<uri>/<step>/process-<N>.<item>.tar     the shards of an item that process N wrote
<uri>/<step>/checkpoint.json            written last: checksums of the archives, their files, metadata, score
<uri>/<step>/checkpoint.json.damaged    the same, of a quarantined checkpoint
<uri>/<step>/checksums-<N>-<save>.json  checksums of process N's archives, for process 0; deleted at the end of a save

All archives unpacked into one folder are an Orbax checkpoint. Up to version 0.5, `process-<N>.tar` held all items.
"""

import json
import shutil
import tarfile
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from ray_jax_launch._checkpoint.checksums import (
    BLOCK_BYTES,
    Checksum,
    ChecksummedStream,
    compare,
    parse,
    read_present,
    to_checksums,
)
from ray_jax_launch._checkpoint.retry import retry
from ray_jax_launch._errors import DamagedCheckpointError
from ray_jax_launch._storage import open_uri

_LISTING, _COMMON = "checkpoint.json", "process-0.tar"


@dataclass(frozen=True, slots=True)
class Listing:
    """Contents of `checkpoint.json`."""

    archives: dict[str, Checksum]
    """Checksums by name."""

    files: dict[str, list[str]]
    """Names of the files in the archives of the items, if several processes wrote them; since version 0.6."""

    metadata: dict[str, Any]
    """The user's metadata."""

    score: float | None
    """The best checkpoints have the lowest scores."""


class ObjectStore:
    """Checkpoints below a URI. Requests are repeated for a while when the storage fails.

    Args:
        uri: such as `s3://bucket/run/checkpoints`.

    Raises:
        LaunchError: the storage cannot be reached.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._root = open_uri(uri)

    def prepare(self) -> None:
        """Make the folder, and delete archives that a killed process left without a listing."""
        open_uri(self._uri, create=True)
        for step, names in self._contents().items():
            if not any(name.startswith(_LISTING) for name in names):
                self.delete(step)

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints."""
        return [step for step, names in self._contents().items() if _LISTING in names]

    def version(self, step: int) -> Hashable:
        """Return the listing, which differs between checkpoints; None if there is none."""
        try:
            return self._read(f"{step}/{_LISTING}")
        except FileNotFoundError:
            return None

    def metadata(self, step: int) -> dict[str, Any]:
        """Return a checkpoint's metadata.

        Raises:
            DamagedCheckpointError: the metadata cannot be read.
        """
        return self.listing(step).metadata

    def score(self, step: int) -> float | None:
        """Return a checkpoint's score."""
        try:
            return self.listing(step).score
        except DamagedCheckpointError:
            return None

    def find_damage(self, step: int) -> str | None:
        """Read all archives of a checkpoint. Return a description of the damage, or None.

        Raises:
            LaunchError: the storage cannot be read.
        """
        try:
            for name, written in self.listing(step).archives.items():
                self._read_archive(step, name, written)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def quarantine(self, step: int) -> None:
        """Rename a checkpoint's listing. The archives stay until a checkpoint of the same number is written."""
        listing = f"{self._root}/{step}/{_LISTING}"
        self._filesystem.move(listing, f"{listing}.damaged")

    def delete(self, step: int) -> None:
        """Delete a checkpoint: the listing first, so that no incomplete checkpoint is ever listed."""
        names = self._contents().get(step, set())
        for name in sorted(names, key=lambda name: name != _LISTING):
            self._delete(f"{step}/{name}")

    def listing(self, step: int) -> Listing:
        """Read the listing of a checkpoint.

        Raises:
            DamagedCheckpointError: the listing is missing or damaged.
        """
        content = read_present(_LISTING, self._uri, partial(self._read, f"{step}/{_LISTING}"))
        return parse(
            _LISTING,
            content,
            lambda found: Listing(
                to_checksums(found["parts"]), dict(found.get("files", {})), dict(found["metadata"]), found["score"]
            ),
        )

    def upload(self, step: int, rank: int, save_id: str, folder: Path) -> None:
        """Upload what Orbax wrote in one process, and then the checksums for `commit`."""
        archives: dict[str, list[str]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if (archive := _archive_of(rank, name)) is not None:
                archives.setdefault(archive, []).append(name)
        checksums = {
            archive: retry(
                f"{archive} of checkpoint {step} in {self._uri}",
                partial(self._pack, f"{step}/{archive}", folder, names),
            )
            for archive, names in archives.items()
        }
        # Every node needs all files of `process-0.tar`.
        files = {archive: names for archive, names in archives.items() if archive != _COMMON}
        self._write(_checksums_name(step, rank, save_id), json.dumps([checksums, files]).encode())

    def commit(
        self, step: int, num_processes: int, save_id: str, metadata: dict[str, Any], score: float | None
    ) -> None:
        """List a checkpoint that all processes have uploaded, and delete other objects of its number.

        Raises:
            FileNotFoundError: a process has not uploaded its archives in this save.
        """
        archives: dict[str, Checksum] = {}
        files: dict[str, list[str]] = {}
        for rank in range(num_processes):
            try:
                checksums, names = json.loads(self._read(_checksums_name(step, rank, save_id)))
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"process {rank} has not uploaded its shards of checkpoint {step}. See its own error."
                ) from error
            archives |= to_checksums(checksums)
            files |= names if num_processes > 1 else {}
        # "parts" is the key of all versions: version 0.5 can read this checkpoint too.
        listing = {"parts": archives, "files": files, "metadata": metadata, "score": score}
        self._write(f"{step}/{_LISTING}", json.dumps(listing).encode())
        for name in self._contents().get(step, set()) - archives.keys() - {_LISTING}:
            self._delete(f"{step}/{name}")

    def download(
        self, step: int, items: Collection[str], folder: Path, is_needed: Callable[[str], bool] = lambda file: True
    ) -> None:
        """Unpack some items of a checkpoint into a folder, and what Orbax keeps about all items.

        Args:
            step: number of the checkpoint.
            items: names of the items.
            folder: where to unpack.
            is_needed: returns whether a file such as `items/params.h.0.w/1.0` is needed. An archive without such
                files is not read. It is called when what Orbax keeps about all items is unpacked.

        Raises:
            DamagedCheckpointError: an archive is not what was written.
        """
        listing = self.listing(step)
        for name in sorted(listing.archives, key=lambda name: name != _COMMON):
            files = listing.files.get(name)
            if {*name.split(".")[1:-1]} <= {*items} and (files is None or any(map(is_needed, files))):
                self._read_archive(step, name, listing.archives[name], folder)

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
            except FileNotFoundError:  # deleted by the attempt before, whose answer was lost
                return

        retry(f"{name} in {self._uri}", delete)

    def _pack(self, name: str, folder: Path, files: list[str]) -> Checksum:
        self._filesystem.create_dir(f"{self._root}/{name.partition('/')[0]}")
        with self._filesystem.open_output_stream(f"{self._root}/{name}") as stream:
            target = ChecksummedStream(stream)
            with tarfile.open(fileobj=cast("IO[bytes]", target), mode="w|", bufsize=BLOCK_BYTES) as tar:
                for file in files:
                    tar.add(folder / file, file)
        return target.checksum()

    def _read_archive(self, step: int, name: str, written: Checksum, folder: Path | None = None) -> None:
        """Read an archive, compare its checksum, and unpack it where a folder is given."""

        def read() -> Checksum:
            with self._filesystem.open_input_stream(f"{self._root}/{step}/{name}") as stream:
                source = ChecksummedStream(stream)
                if folder is not None:
                    _unpack(source, name, folder)
                return source.read_to_end()

        compare(name, read_present(name, f"{name} of checkpoint {step} in {self._uri}", read), written)

    def _contents(self) -> dict[int, set[str]]:
        from pyarrow.fs import FileSelector  # see open_uri

        selector = FileSelector(self._root, recursive=True, allow_not_found=True)
        contents: dict[int, set[str]] = {}
        for info in retry(self._uri, partial(self._filesystem.get_file_info, selector)):
            number, _, name = info.path[len(self._root.rstrip("/")) + 1 :].partition("/")
            if number.isdigit() and name and info.is_file:
                contents.setdefault(int(number), set()).add(name)
        return contents


def _archive_of(rank: int, file: str) -> str | None:
    """Return the archive of a file such as `items/params.h.0.w/1.0`, a shard of the item `params`.

    What Orbax keeps about the items is the same in all processes, so only process 0 uploads it.
    """
    _, leaf, *rest = file.split("/")
    if rest and not rest[-1].startswith("."):
        return f"process-{rank}.{leaf.partition('.')[0]}.tar"
    return _COMMON if rank == 0 else None


def _checksums_name(step: int, rank: int, save_id: str) -> str:
    return f"{step}/checksums-{rank}-{save_id}.json"


def _unpack(source: ChecksummedStream, name: str, folder: Path) -> None:
    """Unpack the regular files of a tar file, and write nothing outside the folder.

    `TarFile.extractall(filter="data")` does the same, and is missing in Python 3.11.0 to 3.11.3.
    """
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r|", bufsize=BLOCK_BYTES) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
                    raise tarfile.ExtractError(f"{member.name!r} of type {member.type!r}")
                content = tar.extractfile(member)
                if content is not None:  # no folder
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    with content, (folder / path).open("wb") as file:
                        shutil.copyfileobj(content, file, BLOCK_BYTES)
    except (tarfile.TarError, ValueError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{name} must be a tar file of files with relative names, got {error}") from error
