"""Checkpoints in a folder, with checksums of their files.

<folder>/<step>/<item>/...            files that Orbax wrote
<folder>/<step>/checksums.json        the step, sizes and checksums of all files of the items, and what `to_json` adds
<folder>/<step>.orbax-checkpoint-tmp  a checkpoint that is being written, or that a killed process left
<folder>/<step>.damaged               a quarantined checkpoint
<folder>/.trash/                      checkpoints that are being deleted

A checkpoint becomes visible when Orbax renames `<step>.orbax-checkpoint-tmp` to `<step>` (`FolderWriter.commit` in
`writers.py`): `steps` lists all names that are numbers. Before that, its files and folders are on the disk.

One command at a time writes to a folder. The caller's lock keeps others away.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Collection, Hashable
from functools import partial
from pathlib import Path
from typing import Any

from ray_jax_launch._checkpoint.checksums import (
    BLOCK_BYTES,
    STEP_NAME,
    Checksum,
    ChecksummedStream,
    check_step,
    compare,
    open_regular,
    parse,
    parse_fields,
    read_present,
    to_checksums,
    to_json,
    write_copy,
)
from ray_jax_launch._checkpoint.retry import ABSENT, STORAGE_FULL, retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError, StorageFullError, shown

METADATA = "metadata"
CHECKSUMS = "checksums.json"
TEMPORARY = ".orbax-checkpoint-tmp"
# Orbax writes these after the checksums, and restores without them.
_UNCHECKED = (CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt")
_TRASH = ".trash"


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
            made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in made:
                _sync_folder(path.parent)
            for path in self._folder.glob(f"*{TEMPORARY}*"):
                _remove(path)
            self._empty_trash()
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
        files, name = self.files(step), f"{METADATA}/{METADATA}"  # the format comes first
        if name in files:
            self._read_file(self._path(step) / name, name, files[name])
        content = _read_content(self._path(step) / METADATA / METADATA, METADATA)
        return parse(METADATA, content, lambda found: {**found})

    def files(self, step: int, *, compare_names: bool = False) -> dict[str, Checksum]:
        """Return the checksums of a checkpoint's files by name.

        Args:
            step: number of the checkpoint.
            compare_names: list the files of the checkpoint too.

        Raises:
            DamagedCheckpointError: the checksums are missing, damaged or of another checkpoint, or a file has none.
            LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
        """
        place = f"{CHECKSUMS} of checkpoint {step} in {self._folder}"
        content = _read_content(self._path(step) / CHECKSUMS, CHECKSUMS)

        def convert(found: Any) -> dict[str, Checksum]:
            files, path = to_checksums(found), self._path(step)
            names = read_present("the folder", str(path), partial(_names, path)) if compare_names else set[str]()
            if unlisted := sorted(names - files.keys()):
                raise DamagedCheckpointError(f"{CHECKSUMS} does not list {shown(unlisted[0])[1:-1]}")
            return files

        fields = {"step": partial(check_step, name=CHECKSUMS, step=step), "files": convert}
        return parse_fields(CHECKSUMS, place, content, fields)["files"]

    def find_damage(self, step: int) -> str | None:
        """Read all files of a checkpoint. Return a description of the damage, or None.

        Raises:
            LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
        """
        checkpoint = self._path(step)
        try:
            for name, expected in self.files(step, compare_names=True).items():
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

    def find_missing(self, step: int) -> str | None:
        """Return the first file of a checkpoint that this host does not see in the size that was written, or None."""
        checkpoint = self._path(step)
        try:
            # NFS asks the server for the listing again when a folder is opened.
            for folder in (self._folder, checkpoint):
                with os.scandir(folder):
                    pass
        except OSError:
            return str(checkpoint)
        try:
            files = self.files(step)
        except DamagedCheckpointError:
            return str(checkpoint / CHECKSUMS)
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

    def delete(self, step: int) -> None:
        """Delete a checkpoint. It is renamed first, so that no incomplete checkpoint is ever listed."""
        trash = self._folder / _TRASH
        trash.mkdir(exist_ok=True)
        self._path(step).rename(trash / f"{step}-{uuid.uuid4().hex}")
        self._empty_trash()

    def write_checksums(self, step: int) -> None:
        """Make the files of a checkpoint that is still being written durable, and write their checksums beside them."""
        (checkpoint,) = self._folder.glob(f"{step}{TEMPORARY}*")
        files: dict[str, Checksum] = {}
        folders = [checkpoint]
        for path in sorted(checkpoint.rglob("*")):
            if path.is_dir():
                folders.append(path)
            elif not (path.parent == checkpoint and path.name in _UNCHECKED):
                name = str(path.relative_to(checkpoint))
                files[name] = _read(path, name, sync=True)
        with (checkpoint / CHECKSUMS).open("w") as file:
            file.write(to_json({"step": step, "files": files}))
            file.flush()
            os.fsync(file.fileno())
        for folder in folders:
            _sync_folder(folder)

    def sync(self) -> None:
        """Make the rename of a checkpoint durable."""
        _sync_folder(self._folder)

    def _list(self) -> list[int]:
        with os.scandir(self._folder) as entries:
            # Also what is no folder: it is damage, and would be in the way of the checkpoint of this number.
            return [int(entry.name) for entry in entries if STEP_NAME.fullmatch(entry.name)]

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _read_file(self, path: Path, name: str, expected: Checksum, copy: Path | None = None) -> None:
        compare(name, read_present(name, str(path), partial(_read, path, name, expected[0], copy=copy)), expected)

    def _empty_trash(self) -> None:
        shutil.rmtree(self._folder / _TRASH, ignore_errors=True)


def _names(checkpoint: Path) -> set[str]:
    """Return the names of the files that `checksums.json` lists.

    Hidden files are not of Orbax: NFS and file managers make them.
    """

    def fail(error: OSError) -> None:
        raise error

    return {
        name
        for folder, _, files in os.walk(checkpoint, onerror=fail)
        for file in files
        if not file.startswith(".") and (name := os.path.relpath(f"{folder}/{file}", checkpoint)) not in _UNCHECKED
    }


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


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    with contextlib.suppress(OSError):  # some file systems cannot, but rename in order
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
