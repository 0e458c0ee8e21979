"""Checkpoints in a folder, with checksums of their files.

<folder>/<step>/<item>/...            files that Orbax wrote
<folder>/<step>/_parts/<N>.json       checksums of the files that process N wrote, by process N
<folder>/<step>/checksums.json        the step, the number of processes, checksums of the other files, by process 0
<folder>/<step>.orbax-checkpoint-tmp  a checkpoint that is being written, or that a killed process left
<folder>/<step>.damaged               a quarantined checkpoint
<folder>/.trash-<step>-<id>           a checkpoint that is being deleted

A checkpoint becomes visible when Orbax renames `<step>.orbax-checkpoint-tmp` to `<step>` (`FolderWriter.commit` in
`writers.py`): `steps` lists all names that are numbers. Before that, its files and folders are on the disk.

One command at a time writes to a folder. The caller's lock keeps others away.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray_jax_launch._checkpoint.checksums import (
    ALL,
    BLOCK_BYTES,
    STEP_NAME,
    Checksum,
    ChecksummedStream,
    Share,
    check_step,
    compare,
    open_regular,
    parse,
    parse_fields,
    read_present,
    share_of,
    to_checksums,
    to_count,
    to_json,
    write_copy,
)
from ray_jax_launch._checkpoint.retry import ABSENT, STORAGE_FULL, retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError, StorageFullError, shown
from ray_jax_launch._storage import make_durable_folder, sync_folder

METADATA = "metadata"
CHECKSUMS = "checksums.json"
PARTS = "_parts"
TEMPORARY = ".orbax-checkpoint-tmp"
# Orbax writes these after the checksums, and restores without them.
_UNCHECKED = (CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt")
_TRASH = ".trash-"
_TEMPORARY_ITEM = re.compile(rf"{re.escape(TEMPORARY)}[^/]*/")
# What one process writes of an item. The first process writes all else, when all processes have written.
_OWN_FOLDER, _OWN_FILE = "ocdbt.process_", "array_metadatas/process_"
_OWN = re.compile(rf"[^/]+/(?:{re.escape(_OWN_FOLDER)}|{_OWN_FILE})(0|[1-9][0-9]*)(?:/.*)?", re.DOTALL)


class FolderStore:
    """Checkpoints in a folder. The name of a complete checkpoint is its number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder, and delete checkpoints that a killed process left half written or half deleted.

        This would delete what another process is writing. Call it only while the caller's lock keeps other processes
        away.

        Raises:
            LaunchError: the folder cannot be written.
            StorageFullError: the disk is full.
        """
        try:
            make_durable_folder(self._folder)
            for path in self._folder.glob(f"*{TEMPORARY}*"):
                _remove(path)
            probe = self._folder / f".writable-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno in STORAGE_FULL:
                raise StorageFullError(
                    f"the folder of the checkpoints is full: {error}. Free some space, then start again."
                ) from error
            if isinstance(error, FileExistsError | NotADirectoryError):
                raise LaunchError(
                    f"the place of the checkpoints is no folder: {error}. Move the file away, or name another folder."
                ) from error
            raise LaunchError(
                f"the folder of the checkpoints cannot be written: {error}. Change its permissions, or name another "
                "folder."
            ) from error

    def steps(self) -> list[int]:
        """Return the numbers of the checkpoints, complete unless they are damaged."""
        try:
            return retry(str(self._folder), self._list)
        except ABSENT:
            return []

    def version(self, step: int) -> Hashable:
        """Return inode and time of a checkpoint's folder, which differ between checkpoints; None if there is none."""
        try:
            found = retry(str(self._path(step)), self._path(step).lstat)  # a link to nothing is there too
        except ABSENT:
            return None
        return found.st_ino, found.st_mtime_ns

    def metadata(self, step: int) -> dict[str, Any]:
        """Return a checkpoint's metadata.

        Raises:
            DamagedCheckpointError: the metadata is not what was written.
            LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
        """
        (_, files), name = self._description(step), f"{METADATA}/{METADATA}"  # the format comes first
        if name in files:
            self._read_file(self._path(step) / name, name, files[name])
        content = _read_content(self._path(step) / METADATA / METADATA, METADATA)
        return parse(METADATA, content, lambda found: {**found})

    def files(self, step: int, share: Share = ALL, *, compare_names: bool = False) -> dict[str, Checksum]:
        """Return the checksums by name of a checkpoint's files, or of those that are the share of a process.

        Args:
            step: number of the checkpoint.
            share: of the process.
            compare_names: list the files of the checkpoint too.

        Raises:
            DamagedCheckpointError: the checksums are missing, damaged or of another checkpoint, or a file has none.
            LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
        """
        num_processes, common = self._description(step)
        files: dict[str, Checksum] = {}
        for rank, some in share_of(share, num_processes):
            part = self._part(step, rank)
            if compare_names:
                self._compare_names(step, part.keys(), _part_name(rank), partial(_written_by, rank))
                if rank == 0:
                    self._compare_names(step, common.keys(), CHECKSUMS, partial(_written_by_none, num_processes))
            files |= dict([*({} if rank else common).items(), *part.items()][some])
        return files

    def find_damage(self, step: int, share: Share = ALL) -> str | None:
        """Read the files of a checkpoint, or those that are the share of a process. Return their damage, or None.

        Raises:
            LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
        """
        checkpoint = self._path(step)
        try:
            for name, expected in self.files(step, share, compare_names=True).items():
                self._read_file(checkpoint / name, name, expected)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def copy_items(self, step: int, items: Collection[str], target: Path) -> set[str]:
        """Copy items of a checkpoint to another folder, and compare their checksums.

        Returns:
            Names of all items of the checkpoint.

        Raises:
            DamagedCheckpointError: a file is not what was written.
        """
        files = self.files(step, compare_names=True)
        for name, expected in files.items():
            if Path(name).parts[0] in items:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                self._read_file(self._path(step) / name, name, expected, copy=target / name)
        return {Path(name).parts[0] for name in files if len(Path(name).parts) > 1} - {METADATA}

    def find_missing(self, step: int, share: Share = ALL) -> str | None:
        """Return the first file of a share that this host does not see in the size that was written, or None."""
        checkpoint = self._path(step)
        try:
            # NFS asks the server for the listing again when a folder is opened.
            for folder in (self._folder, checkpoint):
                with os.scandir(folder):
                    pass
        except OSError:
            return str(checkpoint)
        try:
            files = self.files(step, share)
        except DamagedCheckpointError as error:
            return f"{checkpoint} as it was written ({error})"
        for name, (size, _) in files.items():
            path = checkpoint / name
            try:
                found_size = path.stat().st_size
            except OSError:
                found_size = None
            if found_size != size:
                return str(path)
        return None

    def quarantine(self, step: int) -> None:
        """Rename a checkpoint, so that it is no longer listed and its number is free."""
        checkpoint = self._path(step)
        target, number = checkpoint.with_name(f"{step}.damaged"), 1
        while os.path.lexists(target):
            number += 1
            target = checkpoint.with_name(f"{step}.damaged{number}")

        def rename() -> None:
            with contextlib.suppress(FileNotFoundError):  # renamed by the attempt before, whose answer was lost
                checkpoint.rename(target)

        retry(str(checkpoint), rename)
        self.sync()

    def unlist(self, step: int) -> None:
        """Rename a checkpoint, so that no incomplete checkpoint is ever listed. `sweep` deletes it."""
        self._path(step).rename(self._folder / f"{_TRASH}{step}-{uuid.uuid4().hex}")

    def sweep(self) -> None:
        """Delete the files of checkpoints that are no longer listed, also of those that another process unlisted."""
        for path in self._folder.glob(f"{_TRASH}*"):
            shutil.rmtree(path, ignore_errors=True)

    clean_up = sweep

    def write_part(self, step: int, rank: int) -> None:
        """Make the files that a process has written durable, and write their checksums. The process calls this."""
        checkpoint = self._temporary(step)
        files, folders = _written_by(rank, checkpoint)
        # The first process will rename the folders of the items, too.
        checksums = {_TEMPORARY_ITEM.sub("/", name): _read(checkpoint / name, name, sync=True) for name in files}
        (checkpoint / PARTS).mkdir(exist_ok=True)
        _write(checkpoint / _part_name(rank), to_json({"step": step, "files": checksums}))
        _sync_folders(folders)

    def write_checksums(self, step: int, num_processes: int) -> None:
        """Make the other files of a checkpoint durable, and write their checksums, once all processes have theirs.

        Raises:
            FileNotFoundError: a process has not written its checksums.
        """
        checkpoint = self._temporary(step)
        parts = {entry.name for entry in os.scandir(checkpoint / PARTS)}
        for rank in range(num_processes):
            if f"{rank}.json" not in parts:
                raise FileNotFoundError(f"process {rank} has not written its shards of checkpoint {step}.")
        files, folders = _written_by_none(num_processes, checkpoint)
        checksums = {name: _read(checkpoint / name, name, sync=True) for name in files}
        _write(checkpoint / CHECKSUMS, to_json({"step": step, "processes": num_processes, "files": checksums}))
        _sync_folders([*folders, checkpoint / PARTS])

    def sync(self) -> None:
        """Make the rename of a checkpoint durable."""
        sync_folder(self._folder)

    def _list(self) -> list[int]:
        with os.scandir(self._folder) as entries:
            # Also what is no folder: it is damage, and would be in the way of the checkpoint of this number.
            return [int(entry.name) for entry in entries if STEP_NAME.fullmatch(entry.name)]

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _read_file(self, path: Path, name: str, expected: Checksum, copy: Path | None = None) -> None:
        compare(name, read_present(name, str(path), partial(_read, path, name, expected[0], copy=copy)), expected)

    def _description(self, step: int) -> tuple[int, dict[str, Checksum]]:
        """Return the number of the processes that wrote a checkpoint, and the checksums of its common files."""
        fields = self._parse(step, CHECKSUMS, {"processes": to_count, "files": to_checksums})
        return fields["processes"], fields["files"]

    def _part(self, step: int, rank: int) -> dict[str, Checksum]:
        """Return the checksums of the files that a process wrote."""
        return self._parse(step, _part_name(rank), {"files": to_checksums})["files"]

    def _parse(self, step: int, name: str, fields: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
        content = _read_content(self._path(step) / name, name)
        place = f"{name} of checkpoint {step} in {self._folder}"
        return parse_fields(name, place, content, {"step": partial(check_step, name=name, step=step), **fields})

    def _compare_names(
        self, step: int, names: Collection[str], listed_in: str, find: Callable[[Path], tuple[list[str], list[Path]]]
    ) -> None:
        """Check that all files of a checkpoint that a function finds have a checksum."""
        found, _ = read_present("the folder", str(self._path(step)), partial(find, self._path(step)))
        if unlisted := [name for name in found if name not in names]:
            raise DamagedCheckpointError(f"{listed_in} does not list {shown(unlisted[0])[1:-1]}")

    def _temporary(self, step: int) -> Path:
        (checkpoint,) = self._folder.glob(f"{step}{TEMPORARY}*")
        return checkpoint


def _part_name(rank: int) -> str:
    return f"{PARTS}/{rank}.json"


def _written_by(rank: int, checkpoint: Path) -> tuple[list[str], list[Path]]:
    """Return the names of the files that a process wrote, and its folders."""
    with os.scandir(checkpoint) as entries:
        items = [checkpoint / entry.name for entry in entries if entry.is_dir()]
    files, folders = _walk([path for item in items if (path := item / f"{_OWN_FOLDER}{rank}").is_dir()])
    files += [path for item in items if (path := item / f"{_OWN_FILE}{rank}").is_file()]
    return sorted(str(path.relative_to(checkpoint)) for path in files), folders


def _written_by_none(num_processes: int, checkpoint: Path) -> tuple[list[str], list[Path]]:
    """Return the names of the files that are no part of one process, and their folders."""

    def is_common(path: Path) -> bool:
        name = str(path.relative_to(checkpoint))
        own = _OWN.fullmatch(name)
        return name not in (*_UNCHECKED, PARTS) and (own is None or int(own[1]) >= num_processes)

    files, folders = _walk([checkpoint], is_common)
    return sorted(str(path.relative_to(checkpoint)) for path in files), folders


def _walk(folders: list[Path], is_wanted: Callable[[Path], bool] = lambda path: True) -> tuple[list[Path], list[Path]]:
    """Return the files in folders, and these folders with those in them.

    Hidden files are not of Orbax: NFS and file managers make them.
    """

    def fail(error: OSError) -> None:
        raise error

    found: tuple[list[Path], list[Path]] = ([], [])
    for top in folders:
        for folder, names, files in os.walk(top, onerror=fail):
            path = Path(folder)
            names[:] = [name for name in names if is_wanted(path / name)]
            found[0].extend(path / file for file in files if not file.startswith(".") and is_wanted(path / file))
            found[1].append(path)
    return found


def _read_content(path: Path, name: str) -> bytes:
    """Return the bytes of a small file.

    Raises:
        DamagedCheckpointError: the file is missing, or no regular file.
    """

    def read() -> bytes:
        with open_regular(path, name) as file:
            return file.read()

    return read_present(name, str(path), read)


def _read(
    path: Path, name: str, expected_size: int | None = None, *, copy: Path | None = None, sync: bool = False
) -> Checksum:
    """Return size and CRC-32 of a file. The content is not read if the size is not the expected size.

    Raises:
        DamagedCheckpointError: it is no regular file.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_regular(path, name))
        target = None if copy is None else stack.enter_context(copy.open("wb", 0))
        size = os.fstat(file.fileno()).st_size
        if expected_size is not None and size != expected_size:
            return size, 0
        source = ChecksummedStream(file)
        while block := source.read(BLOCK_BYTES):
            if target is not None:
                write_copy(target, block)
        if sync:
            os.fsync(file.fileno())
    return source.checksum()


def _write(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folders(folders: Iterable[Path]) -> None:
    for folder in folders:
        sync_folder(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
