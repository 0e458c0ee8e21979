"""Checkpoints in object storage, which cannot rename: a checkpoint exists once the object that lists it exists.

<uri>/<step>/<save>/process-0.tar           what Orbax keeps about all items: the tree, shapes and types
<uri>/<step>/<save>/process-<N>.<item>.tar  the shards of an item that process N wrote
<uri>/<step>/<save>/checksums-<N>.json      checksums of process N's archives, for process 0
<uri>/<step>/checkpoint.json                written last: step, name of the save, checksums, metadata
<uri>/<step>/checkpoint.json.damaged        the same, of a quarantined checkpoint

All archives unpacked into one folder are an Orbax checkpoint. Each save has a name of its own, so no archive is written
twice: a process that writes a step again, and dies, cannot damage the checkpoint of this step. pyarrow cannot create an
object on the condition that there is none, so `commit` looks for the listing first. If two commands list the same step
at the same moment, the second listing counts, and both are of complete archives. The lease of the run, which is not
part of this package, keeps two commands apart.
"""

import contextlib
import json
import re
import tarfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from ray_jax_launch._checkpoint.checksums import (
    BLOCK_BYTES,
    STEP_NAME,
    Checksum,
    ChecksummedStream,
    check_name,
    check_step,
    compare,
    parse_fields,
    read_present,
    to_checksums,
    to_json,
    write_copy,
)
from ray_jax_launch._checkpoint.retry import retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError
from ray_jax_launch._storage import make_folder, open_uri

_LISTING, _COMMON = "checkpoint.json", "process-0.tar"
_SAVE = re.compile("[0-9a-z]+-[0-9]+")
# Archives of a save that ended without a listing. Younger ones may be those of a process that is writing, or that is
# suspended and goes on. A save takes an hour at most.
_ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Listing:
    """Contents of `checkpoint.json`, beside its format."""

    step: int
    """Number of the checkpoint."""

    save: str
    """Name of the save that wrote the archives."""

    archives: dict[str, Checksum]
    """Checksums by name."""

    files: dict[str, list[str]]
    """Names of the files in the archives of the items, if several processes wrote them."""

    metadata: dict[str, Any]
    """The user's metadata."""


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
        """Make the folder, and delete archives that a killed process left without a listing a day ago or earlier.

        Younger archives stay, because another process may be writing them. The archives of quarantined checkpoints
        stay too.

        Raises:
            LaunchError: the storage cannot be written, or a newer version of this package wrote a checkpoint.
        """
        make_folder(self._uri, self._filesystem, self._root)
        for step, written_s in self._contents().items():
            if any(name.startswith(f"{_LISTING}.") for name in written_s):
                continue
            saves: dict[str, float] = {}
            for save, name in (name.split("/", 1) for name in written_s if "/" in name):
                saves[save] = max(saves.get(save, 0.0), written_s[f"{save}/{name}"])
            if _LISTING in written_s and len(saves) > 1:
                try:
                    saves.pop(self.listing(step).save, None)
                except DamagedCheckpointError:  # any of the archives may be those of the listing
                    continue
            elif _LISTING in written_s:
                continue
            for save, last_s in saves.items():
                if time.time() - last_s > _ABANDONED_AFTER_S:
                    self._delete_archives(step, save)

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints."""
        return [step for step, names in self._contents().items() if _LISTING in names]

    def version(self, step: int) -> bytes | None:
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

    def find_damage(self, step: int) -> str | None:
        """Read all archives of a checkpoint. Return a description of the damage, or None.

        Raises:
            LaunchError: the storage cannot be read, or a newer version of this package wrote the listing.
        """
        try:
            listing = self.listing(step)
            for name, written in listing.archives.items():
                self._read_archive(step, listing.save, name, written)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def quarantine(self, step: int) -> None:
        """Rename a checkpoint's listing, so that the number is free. The archives stay."""
        names = self._contents().get(step, {})
        target, number = f"{_LISTING}.damaged", 1
        while target in names:
            number += 1
            target = f"{_LISTING}.damaged{number}"

        def rename() -> None:
            with contextlib.suppress(FileNotFoundError):  # see `_delete`
                self._filesystem.move(f"{self._root}/{step}/{_LISTING}", f"{self._root}/{step}/{target}")

        retry(f"{step}/{_LISTING} in {self._uri}", rename)

    def delete(self, step: int) -> None:
        """Delete a checkpoint: the listing first, so that no incomplete checkpoint is ever listed.

        The archives of a listing that cannot be read stay until `prepare` deletes them.
        """
        try:
            save = self.listing(step).save
        except DamagedCheckpointError:
            save = None
        self._delete(f"{step}/{_LISTING}")
        if save is not None:
            self._delete_archives(step, save)

    def listing(self, step: int) -> Listing:
        """Read the listing of a checkpoint.

        Raises:
            DamagedCheckpointError: the listing is missing or damaged.
            LaunchError: the storage cannot be read, or a newer version of this package wrote the listing.
        """
        return self._parse(step, read_present(_LISTING, self._uri, partial(self._read, f"{step}/{_LISTING}")))

    def is_listed(self, step: int, save: str) -> bool:
        """Return whether a checkpoint is listed, and is that of a save.

        Raises:
            DamagedCheckpointError: the listing is damaged.
        """
        content = self.version(step)
        return content is not None and self._parse(step, content).save == save

    def upload(self, step: int, rank: int, save: str, folder: Path) -> None:
        """Upload what Orbax wrote in one process, and then the checksums for `commit`."""
        archives: dict[str, list[str]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if (archive := _archive_of(rank, name)) is not None:
                archives.setdefault(archive, []).append(name)
        checksums = {
            archive: retry(
                f"{archive} of checkpoint {step} in {self._uri}",
                partial(self._pack, f"{step}/{save}/{archive}", folder, names),
            )
            for archive, names in archives.items()
        }
        # Every node needs all files of `process-0.tar`.
        files = {archive: names for archive, names in archives.items() if archive != _COMMON}
        self._write(_checksums_name(step, rank, save), json.dumps([checksums, files]).encode())

    def commit(self, step: int, num_processes: int, save: str, metadata: dict[str, Any]) -> None:
        """List a checkpoint that all processes have uploaded.

        Raises:
            FileNotFoundError: a process has not uploaded its archives in this save.
            FileExistsError: a checkpoint of this number is listed. It stays.
        """
        archives: dict[str, Checksum] = {}
        files: dict[str, list[str]] = {}
        for rank in range(num_processes):
            try:
                checksums, names = json.loads(self._read(_checksums_name(step, rank, save)))
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"process {rank} has not uploaded its shards of checkpoint {step}. See its own error."
                ) from error
            archives |= to_checksums(checksums)
            files |= names if num_processes > 1 else {}
        if self.version(step) is not None:
            raise FileExistsError(f"another run has listed checkpoint {step} in {self._uri}. Stop that run.")
        contents = {"archives": archives, "files": files, "metadata": metadata}
        self._write(f"{step}/{_LISTING}", to_json({"step": step, "save": save, **contents}).encode())

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
                self._read_archive(step, listing.save, name, listing.archives[name], folder)

    def _parse(self, step: int, content: bytes) -> Listing:
        fields = {"step": partial(check_step, name=_LISTING, step=step), **_FIELDS}
        return Listing(**parse_fields(_LISTING, f"{_LISTING} of checkpoint {step} in {self._uri}", content, fields))

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
        with self._filesystem.open_output_stream(f"{self._root}/{name}") as stream:
            target = ChecksummedStream(stream)
            with tarfile.open(fileobj=cast("IO[bytes]", target), mode="w|", bufsize=BLOCK_BYTES) as tar:
                for file in files:
                    tar.add(folder / file, file)
        return target.checksum()

    def _delete_archives(self, step: int, save: str) -> None:
        def delete() -> None:
            try:
                self._filesystem.delete_dir(f"{self._root}/{step}/{save}")
            except FileNotFoundError:  # see `_delete`
                return

        retry(f"{step}/{save} in {self._uri}", delete)

    def _read_archive(self, step: int, save: str, name: str, written: Checksum, folder: Path | None = None) -> None:
        """Read an archive, compare its checksum, and unpack it where a folder is given."""

        def read() -> Checksum:
            with self._filesystem.open_input_stream(f"{self._root}/{step}/{save}/{name}") as stream:
                source = ChecksummedStream(stream)
                if folder is not None:
                    _unpack(source, name, folder)
                return source.read_to_end()

        compare(name, read_present(name, f"{name} of checkpoint {step} in {self._uri}", read), written)

    def _contents(self) -> dict[int, dict[str, float]]:
        """Return the time in seconds at which each object of each step was written."""
        from pyarrow.fs import FileSelector  # see open_uri

        selector = FileSelector(self._root, recursive=True, allow_not_found=True)
        contents: dict[int, dict[str, float]] = {}
        for info in retry(self._uri, partial(self._filesystem.get_file_info, selector)):
            number, _, name = info.path[len(self._root.rstrip("/")) + 1 :].partition("/")
            if STEP_NAME.fullmatch(number) and name and info.is_file:
                contents.setdefault(int(number), {})[name] = time.time() if info.mtime is None else info.mtime_ns / 1e9
        return contents


def _to_save(found: Any) -> str:
    if not _SAVE.fullmatch(found):
        raise ValueError("no name of a save")
    return found


def _to_files(found: Any) -> dict[str, list[str]]:
    return {name: [check_name(file) for file in files] for name, files in found.items()}


_FIELDS = {
    "save": _to_save,
    "archives": to_checksums,
    "files": _to_files,
    "metadata": lambda found: {**found},
}


def _archive_of(rank: int, file: str) -> str | None:
    """Return the archive of a file such as `items/params.h.0.w/1.0`, a shard of the item `params`.

    What Orbax keeps about the items is the same in all processes, so only process 0 uploads it.
    """
    _, leaf, *rest = file.split("/")
    if rest and not rest[-1].startswith("."):
        return f"process-{rank}.{leaf.partition('.')[0]}.tar"
    return _COMMON if rank == 0 else None


def _checksums_name(step: int, rank: int, save: str) -> str:
    return f"{step}/{save}/checksums-{rank}.json"


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
                    with content, (folder / path).open("wb", 0) as file:
                        while block := content.read(BLOCK_BYTES):
                            write_copy(file, block)
    except LaunchError:  # of the copy
        raise
    except (tarfile.TarError, ValueError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{name} must be a tar file of files with relative names, got {error}") from error
