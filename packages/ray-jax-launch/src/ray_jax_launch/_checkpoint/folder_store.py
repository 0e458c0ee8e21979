"""Checkpoints in a folder, with checksums of their files.

<folder>/<step>/<item>/...            files that Orbax wrote
<folder>/<step>/checksums.json        sizes and checksums of all files of the items
<folder>/<step>.orbax-checkpoint-tmp  a checkpoint that is being written, or that a killed process left
<folder>/<step>.damaged               a quarantined checkpoint
<folder>/.trash/                      checkpoints that are being deleted

A checkpoint becomes visible when Orbax renames `<step>.orbax-checkpoint-tmp` to `<step>` (`FolderWriter.commit` in
`writers.py`): `steps` lists folders whose names are numbers.
"""

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray_jax_launch._checkpoint.checksums import (
    BLOCK_BYTES,
    Checksum,
    ChecksummedStream,
    compare,
    parse,
    read_present,
    to_checksums,
)
from ray_jax_launch._checkpoint.retry import ABSENT, retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError

METADATA, METRICS, SCORE = "metadata", "metrics", "score"
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

        Raises:
            LaunchError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)
            self._empty_trash()
            probe = self._folder / f".writable-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise LaunchError(
                f"the folder of the checkpoints must be writable, got {error}. Change its permissions, or name another "
                "folder."
            ) from error

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints."""
        try:
            return retry(str(self._folder), self._list)
        except ABSENT:
            return []

    def version(self, step: int) -> Hashable:
        """Return inode and time of a checkpoint's folder, which differ between checkpoints; None if there is none."""
        try:
            found = retry(str(self._path(step)), self._path(step).stat)
        except ABSENT:
            return None
        return found.st_ino, found.st_mtime_ns

    def metadata(self, step: int) -> dict[str, Any]:
        """Return a checkpoint's metadata.

        Raises:
            DamagedCheckpointError: the metadata cannot be read.
        """
        path = self._path(step) / METADATA / METADATA
        return parse(METADATA, read_present(METADATA, str(path), path.read_bytes), lambda found: {**found})

    def score(self, step: int) -> float | None:
        """Return a checkpoint's score."""
        # Before version 0.4, the file had the name of its folder.
        names = (f"{METRICS}/{METADATA}", f"{METRICS}/{METRICS}")
        metrics = next(filter(None, (self._read_json(step, name) for name in names)), None)
        return metrics.get(SCORE) if isinstance(metrics, dict) else None

    def find_damage(self, step: int) -> str | None:
        """Read all files of a checkpoint. Return a description of the damage, or None.

        Raises:
            LaunchError: the storage cannot be read.
        """
        checkpoint = self._path(step)
        try:
            for name, expected in self._files(step).items():
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
        files: Mapping[str, Checksum | None] = self._files(step) or {
            str(path.relative_to(self._path(step))): None for path in self._path(step).rglob("*") if path.is_file()
        }
        for name, expected in files.items():
            if Path(name).parts[0] in items:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                self._read_file(self._path(step) / name, name, expected, copy=target / name)
        return {Path(name).parts[0] for name in files if len(Path(name).parts) > 1} - {METADATA, METRICS}

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
            files = self._files(step)
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
        while target.exists():
            number += 1
            target = checkpoint.with_name(f"{step}.damaged{number}")
        checkpoint.rename(target)

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
        for path in sorted(checkpoint.rglob("*")):
            if path.is_file() and not (path.parent == checkpoint and path.name in _UNCHECKED):
                files[str(path.relative_to(checkpoint))] = _read(path, sync=True)
        temporary = checkpoint / f"{CHECKSUMS}.tmp"
        with temporary.open("w") as file:
            json.dump({"algorithm": "crc32", "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, checkpoint / CHECKSUMS)

    def sync(self) -> None:
        """Make the rename of a checkpoint durable."""
        with contextlib.suppress(OSError):  # some file systems cannot, but rename in order
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _list(self) -> list[int]:
        with os.scandir(self._folder) as entries:
            return [int(entry.name) for entry in entries if re.fullmatch("[0-9]+", entry.name) and entry.is_dir()]

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _files(self, step: int) -> dict[str, Checksum]:
        """Return the checksums of the files by name, empty if a version before 0.3 wrote the checkpoint.

        Raises:
            DamagedCheckpointError: the checksums are missing or damaged.
        """
        path = self._path(step) / CHECKSUMS
        try:
            content = retry(str(path), path.read_bytes)
        except ABSENT as error:
            if self._read_json(step, f"{METADATA}/{METADATA}") is None:
                raise DamagedCheckpointError(f"{CHECKSUMS} is missing") from error
            return {}  # a version before 0.3 wrote metadata without checksums
        return parse(CHECKSUMS, content, lambda found: to_checksums(found["files"]))

    def _read_file(self, path: Path, name: str, expected: Checksum | None, copy: Path | None = None) -> None:
        found = read_present(name, str(path), partial(_read, path, expected and expected[0], copy=copy))
        compare(name, found, expected or found)

    def _read_json(self, step: int, name: str) -> Any:
        """Return the contents of a JSON file beside the items; None if it is missing or damaged."""
        path = self._path(step) / name
        try:
            content = retry(str(path), path.read_bytes)
        except ABSENT:
            return None
        try:
            return json.loads(content)
        except ValueError:
            return None

    def _empty_trash(self) -> None:
        shutil.rmtree(self._folder / _TRASH, ignore_errors=True)


def _read(path: Path, expected_size: int | None = None, *, copy: Path | None = None, sync: bool = False) -> Checksum:
    """Return size and CRC-32 of a file. The content is not read if the size is not the expected size."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb", buffering=0))
        target = None if copy is None else stack.enter_context(copy.open("wb"))
        size = os.fstat(file.fileno()).st_size
        if expected_size is not None and size != expected_size:
            return size, 0
        source = ChecksummedStream(file)
        while block := source.read(BLOCK_BYTES):
            if target is not None:
                target.write(block)
        if sync:
            os.fsync(file.fileno())
    return source.checksum()
