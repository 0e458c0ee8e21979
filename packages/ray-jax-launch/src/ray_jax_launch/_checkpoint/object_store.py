"""Checkpoints in object storage, which cannot rename: a checkpoint exists once the object that lists it exists.

<uri>/<step>.json                           written last: step, name of the save, number of processes, metadata
<uri>/<step>.<save>/process-0.tar           what Orbax keeps about all items: the tree, shapes and types
<uri>/<step>.<save>/process-<N>.<item>.tar  the shards of an item that process N wrote
<uri>/<step>.<save>/parts/<N>.json          written by process N after its archives: their checksums and files
<uri>/<step>.<save>.deleted                 the archives of this save are being deleted
<uri>/<step>.json.damaged                   a quarantined checkpoint

All archives unpacked into one folder are an Orbax checkpoint. Each save has a name of its own, so no archive is written
twice: a process that writes a step again, and dies, cannot damage the checkpoint of this step. pyarrow cannot create an
object on the condition that there is none, so `commit` looks for the listing first. If two commands list the same step
at the same moment, the second listing counts, and both are of complete archives. The lease of the run, which is not
part of this package, keeps two commands apart.

The number of requests of a process does not grow with the number of processes: the objects of a checkpoint are counted
and deleted by their prefix, a thousand a request, and the list of the checkpoints is that of the objects beside the
folders.
"""

import contextlib
import re
import tarfile
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from ray_jax_launch._checkpoint.checksums import (
    ALL,
    BLOCK_BYTES,
    STEP_NAME,
    Checksum,
    ChecksummedStream,
    Share,
    check_name,
    check_step,
    compare,
    parse_fields,
    read_present,
    share_of,
    to_checksums,
    to_count,
    to_json,
    write_copy,
)
from ray_jax_launch._checkpoint.retry import retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError
from ray_jax_launch._storage import make_folder, open_uri

_COMMON = "process-0.tar"
_SAVE = re.compile("[0-9a-z]+-[0-9]+")
_LISTING = re.compile(rf"({STEP_NAME.pattern})\.json")
_DAMAGED = re.compile(rf"({STEP_NAME.pattern})\.json\.damaged[0-9]*")
_ARCHIVES = re.compile(rf"({STEP_NAME.pattern})\.({_SAVE.pattern})")
_DELETED = re.compile(rf"{_ARCHIVES.pattern}\.deleted")
# Archives of a save that ended without a listing. Younger ones may be those of a process that is writing, or that is
# suspended and goes on. A save takes an hour at most.
_ABANDONED_AFTER_S = 24 * 3600.0
# Descriptions that a process reads at the same time.
_NUM_READERS = 16


@dataclass(frozen=True, slots=True)
class Listing:
    """Contents of `<step>.json`, beside its format."""

    step: int
    """Number of the checkpoint."""

    save: str
    """Name of the save that wrote the archives."""

    processes: int
    """Number of the processes that wrote archives."""

    metadata: dict[str, Any]
    """The user's metadata."""


@dataclass(frozen=True, slots=True)
class Part:
    """Contents of `parts/<N>.json`, beside its format."""

    step: int
    """Number of the checkpoint."""

    archives: dict[str, Checksum]
    """Checksums of the archives of the process by name."""

    files: dict[str, list[str]]
    """Names of the files in the archives of the items."""


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
        """Make the folder.

        Raises:
            LaunchError: the storage cannot be written.
        """
        make_folder(self._uri, self._filesystem, self._root)

    def clean_up(self) -> None:
        """Delete archives that a killed process left: of deleted checkpoints, and without a listing for a day.

        Younger archives without a listing stay, because another process may be writing them. The archives of
        quarantined checkpoints stay too.

        Raises:
            LaunchError: the storage cannot be written, or a newer version of this package wrote a checkpoint.
        """
        self.sweep()
        names = self._names("")
        listed, damaged = ({int(match[1]) for match in _matches(of, names)} for of in (_LISTING, _DAMAGED))
        saves: dict[int, set[str]] = {}
        for match in _matches(_ARCHIVES, names):
            saves.setdefault(int(match[1]), set()).add(match[2])
        for step, left in saves.items():
            if step in damaged or (step in listed and len(left) == 1):
                continue
            if step in listed:
                try:
                    left.discard(self.listing(step).save)
                except DamagedCheckpointError:  # any of the archives may be those of the listing
                    continue
            for save in left:
                if time.time() - self._last_written_s(f"{step}.{save}") > _ABANDONED_AFTER_S:
                    self._delete_archives(step, save)

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints, in increasing order."""
        return sorted(int(match[1]) for match in _matches(_LISTING, self._names("")))

    def version(self, step: int) -> bytes | None:
        """Return the listing, which differs between checkpoints; None if there is none."""
        try:
            return self._read(f"{step}.json")
        except FileNotFoundError:
            return None

    def metadata(self, step: int) -> dict[str, Any]:
        """Return a checkpoint's metadata.

        Raises:
            DamagedCheckpointError: the metadata cannot be read.
        """
        return self.listing(step).metadata

    def find_damage(self, step: int, share: Share = ALL) -> str | None:
        """Read the archives of a checkpoint, or those that are the share of a process. Return their damage, or None.

        Raises:
            LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
        """
        try:
            listing = self.listing(step)
            for rank, some in share_of(share, listing.processes):
                archives = self._part(listing, rank).archives
                for name in sorted(archives)[some]:
                    self._read_archive(listing, name, archives[name])
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def quarantine(self, step: int) -> None:
        """Rename a checkpoint's listing, so that the number is free. The archives stay."""
        names = self._names("")
        target, number = f"{step}.json.damaged", 1
        while target in names:
            number += 1
            target = f"{step}.json.damaged{number}"

        def rename() -> None:
            with contextlib.suppress(FileNotFoundError):  # see `_delete`
                self._filesystem.move(f"{self._root}/{step}.json", f"{self._root}/{target}")

        retry(f"{step}.json in {self._uri}", rename)

    def unlist(self, step: int) -> None:
        """Delete the listing of a checkpoint, so that none is listed without its archives. `sweep` deletes these.

        The archives of a listing that cannot be read stay until `clean_up` deletes them.
        """
        with contextlib.suppress(DamagedCheckpointError):
            self._write(f"{step}.{self.listing(step).save}.deleted", b"")
        self._delete(f"{step}.json")

    def sweep(self) -> None:
        """Delete the archives of checkpoints that are no longer listed, also of those that another process unlisted.

        A process that was killed before it deleted the listing leaves a complete checkpoint. It stays.
        """
        names = self._names("")
        listed = {match[1] for match in _matches(_LISTING, names)}
        for match in _matches(_DELETED, names):
            if match[1] not in listed:
                self._delete_archives(int(match[1]), match[2])
                self._delete(match[0])

    def listing(self, step: int) -> Listing:
        """Read the listing of a checkpoint.

        Raises:
            DamagedCheckpointError: the listing is missing or damaged.
            LaunchError: the storage cannot be read, or a newer version of this package wrote the listing.
        """
        return Listing(**self._parse(step, f"{step}.json", _OF_LISTING))

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
                partial(self._pack, f"{step}.{save}/{archive}", folder, names),
            )
            for archive, names in archives.items()
        }
        # Every node needs all files of `process-0.tar`.
        files = {archive: names for archive, names in archives.items() if archive != _COMMON}
        content = to_json({"step": step, "archives": checksums, "files": files})
        self._write(f"{step}.{save}/parts/{rank}.json", content.encode())

    def commit(self, step: int, num_processes: int, save: str, metadata: dict[str, Any]) -> None:
        """List a checkpoint that all processes have uploaded.

        Raises:
            FileNotFoundError: a process has not uploaded its archives in this save.
            FileExistsError: a checkpoint of this number is listed. It stays.
        """
        uploaded = self._names(f"{step}.{save}/parts")
        for rank in range(num_processes):
            if f"{rank}.json" not in uploaded:
                raise FileNotFoundError(
                    f"process {rank} has not uploaded its shards of checkpoint {step}. See its own error."
                )
        if self.version(step) is not None:
            raise FileExistsError(f"another run has listed checkpoint {step} in {self._uri}. Stop that run.")
        listing = {"step": step, "save": save, "processes": num_processes, "metadata": metadata}
        self._write(f"{step}.json", to_json(listing).encode())

    def download(
        self,
        step: int,
        items: Collection[str],
        folder: Path,
        find_needed: Callable[[], set[str]] | None = None,
        share: Collection[Share] = (ALL,),
    ) -> None:
        """Unpack some items of a checkpoint into a folder, and what Orbax keeps about all items.

        Archives without needed files are not read. Nor are the descriptions of the other processes once all needed
        files are found, which makes a restore with the layout of the save cheap. The order in which processes are asked
        is a guess: a process probably needs what the process at its place among the others has written.

        Args:
            step: number of the checkpoint.
            items: names of the items.
            folder: where to unpack.
            find_needed: returns the names of the needed files such as `items/params.h.0.w/1.0`, called when what Orbax
                keeps about all items is unpacked. Default: all files are needed.
            share: of each process that reads the folder, its rank and the number of all processes.

        Raises:
            DamagedCheckpointError: an archive is not what was written.
        """
        listing = self.listing(step)
        first = self._part(listing, 0)
        self._read_archive(listing, _COMMON, first.archives[_COMMON], folder)
        needed = None if find_needed is None else find_needed()

        def fetch(rank: int) -> list[str]:
            part, found = self._part(listing, rank) if rank else first, list[str]()
            for name, files in part.files.items():
                if {*name.split(".")[1:-1]} <= {*items} and (needed is None or not needed.isdisjoint(files)):
                    self._read_archive(listing, name, part.archives[name], folder)
                    found += files
            return found

        order = _nearest_first(listing.processes, share)
        with ThreadPoolExecutor(_NUM_READERS, "checkpoint-reader") as readers:
            while order and needed != set():
                some, order = order[:_NUM_READERS], order[_NUM_READERS:]
                found = [*readers.map(fetch, some)]
                if needed is not None:
                    needed = needed.difference(*found)

    def _parse(self, step: int, name: str, fields: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
        """Read a JSON file of a checkpoint."""
        content = read_present(name, self._uri, partial(self._read, name))
        fields = {"step": partial(check_step, name=name, step=step), **fields}
        return parse_fields(name, f"{name} in {self._uri}", content, fields)

    def _part(self, listing: Listing, rank: int) -> Part:
        return Part(**self._parse(listing.step, f"{listing.step}.{listing.save}/parts/{rank}.json", _OF_PART))

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
                self._filesystem.delete_dir(f"{self._root}/{step}.{save}")
            except FileNotFoundError:  # see `_delete`
                return

        retry(f"{step}.{save} in {self._uri}", delete)

    def _read_archive(self, listing: Listing, name: str, written: Checksum, folder: Path | None = None) -> None:
        """Read an archive, compare its checksum, and unpack it where a folder is given."""

        def read() -> Checksum:
            path = f"{self._root}/{listing.step}.{listing.save}/{name}"
            with self._filesystem.open_input_stream(path) as stream:
                source = ChecksummedStream(stream)
                if folder is not None:
                    _unpack(source, name, folder)
                return source.read_to_end()

        compare(name, read_present(name, f"{name} of checkpoint {listing.step} in {self._uri}", read), written)

    def _names(self, folder: str) -> set[str]:
        """Return the names of the objects and folders in a folder, not those in its folders."""
        return {info.base_name for info in self._contents(folder, recursive=False)}

    def _last_written_s(self, folder: str) -> float:
        """Return the time in seconds of the youngest object of a folder."""
        files = [info for info in self._contents(folder, recursive=True) if info.is_file]
        return max((time.time() if info.mtime is None else info.mtime_ns / 1e9 for info in files), default=0.0)

    def _contents(self, folder: str, *, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector  # see open_uri

        path = f"{self._root.rstrip('/')}/{folder}".rstrip("/")
        selector = FileSelector(path, recursive=recursive, allow_not_found=True)
        return retry(f"{self._uri}/{folder}", partial(self._filesystem.get_file_info, selector))


def _to_save(found: Any) -> str:
    if not _SAVE.fullmatch(found):
        raise ValueError("no name of a save")
    return found


def _to_files(found: Any) -> dict[str, list[str]]:
    return {name: [check_name(file) for file in files] for name, files in found.items()}


_OF_LISTING = {"save": _to_save, "processes": to_count, "metadata": lambda found: {**found}}
_OF_PART = {"archives": to_checksums, "files": _to_files}


def _matches(pattern: re.Pattern[str], names: Iterable[str]) -> list[re.Match[str]]:
    return [match for name in names if (match := pattern.fullmatch(name))]


def _nearest_first(num_saved: int, share: Collection[Share]) -> list[int]:
    """Return the processes that saved, the first one and those at the places of the processes that read first."""
    places = [rank * num_saved / num_ranks for rank, num_ranks in share]
    return sorted(range(num_saved), key=lambda saved: (saved > 0, min(abs(saved - place) for place in places)))


def _archive_of(rank: int, file: str) -> str | None:
    """Return the archive of a file such as `items/params.h.0.w/1.0`, a shard of the item `params`.

    What Orbax keeps about the items is the same in all processes, so only process 0 uploads it.
    """
    _, leaf, *rest = file.split("/")
    if rest and not rest[-1].startswith("."):
        return f"process-{rank}.{leaf.partition('.')[0]}.tar"
    return _COMMON if rank == 0 else None


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
