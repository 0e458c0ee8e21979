"""Checkpoints in a folder: the files, and whether they are those that were written.

<folder>/<step>/<item>/...            what Orbax wrote
<folder>/<step>/checksums.json        sizes and checksums of all files of the items
<folder>/<step>.orbax-checkpoint-tmp  a checkpoint that is being written, or was when its process was killed
<folder>/.trash/                      checkpoints that are being deleted
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

from ray_jax_launch._checkpoint.checksums import BLOCK_BYTES, Checksum, ChecksummedStream, compare, parse
from ray_jax_launch._checkpoint.retry import ABSENT, retry
from ray_jax_launch._errors import DamagedCheckpointError, LaunchError

METADATA, METRICS, SCORE = "metadata", "metrics", "score"
CHECKSUMS = "checksums.json"
TEMPORARY = ".orbax-checkpoint-tmp"
# Beside the items, Orbax writes these last, after the checksums, and restores without them.
_UNCHECKED = (CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt")
_TRASH = ".trash"


class FolderStore:
    """The checkpoints in a folder. A complete one has its step as its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder, and delete what a killed process left half written or half deleted.

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
                "folder"
            ) from error

    def steps(self) -> list[int]:
        """Numbers of the complete checkpoints."""
        try:
            return retry(str(self._folder), self._list)
        except ABSENT:
            return []

    def version(self, step: int) -> Hashable:
        """Something that stays equal as long as a checkpoint is there; None once it is deleted."""
        try:
            found = retry(str(self._path(step)), self._path(step).stat)
        except ABSENT:
            return None
        return found.st_ino, found.st_mtime_ns

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved as a checkpoint's metadata.

        Raises:
            DamagedCheckpointError: it cannot be read.
        """
        metadata = self._read_json(step, METADATA)
        if not isinstance(metadata, dict):
            raise DamagedCheckpointError(f"the metadata of checkpoint {step} are no JSON object")
        return metadata

    def score(self, step: int) -> float | None:
        """What the best checkpoints are chosen by."""
        metrics = self._read_json(step, METRICS)
        return metrics.get(SCORE) if isinstance(metrics, dict) else None

    def find_damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint's files, or None. Reads all of them.

        Raises:
            LaunchError: the storage fails, so that nobody can tell.
        """
        checkpoint = self._path(step)
        try:
            for name, expected in self._files(step).items():
                self._read_file(checkpoint / name, name, expected)
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def copy_items(self, step: int, items: Collection[str], target: Path) -> set[str]:
        """Copy some items of a checkpoint to another folder, and compare their checksums.

        Returns:
            The names of all items of the checkpoint.

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
        """The first file of a checkpoint that this host does not see with the size it was written with, or None."""
        checkpoint = self._path(step)
        try:
            # To open a folder makes NFS ask the server for its listing again.
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
        """Quarantine a checkpoint: rename it, so that it is no longer listed and its number is free."""
        checkpoint = self._path(step)
        target, number = checkpoint.with_name(f"{step}.damaged"), 1
        while target.exists():
            number += 1
            target = checkpoint.with_name(f"{step}.damaged{number}")
        checkpoint.rename(target)

    def delete(self, step: int) -> None:
        """Delete a checkpoint: first rename it, so that no half checkpoint is ever listed."""
        trash = self._folder / _TRASH
        trash.mkdir(exist_ok=True)
        self._path(step).rename(trash / f"{step}-{uuid.uuid4().hex}")
        self._empty_trash()

    def sign(self, step: int) -> None:
        """Make the files of a checkpoint that is still being written durable, and note their checksums beside them."""
        (checkpoint,) = self._folder.glob(f"{step}{TEMPORARY}*")
        write_checksums(checkpoint)

    def sync(self) -> None:
        """Make the renaming of a checkpoint durable."""
        with contextlib.suppress(OSError):  # some file systems cannot, and rename in order anyway
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
        """Size and CRC-32 of each file by its name; nothing where a version before 0.3 wrote the checkpoint.

        Raises:
            DamagedCheckpointError: no version wrote it so.
        """
        path = self._path(step) / CHECKSUMS
        try:
            content = retry(str(path), path.read_bytes)
        except ABSENT as error:
            if self._read_json(step, METADATA) is None:
                raise DamagedCheckpointError(f"{CHECKSUMS} is missing") from error
            return {}  # a version before 0.3 wrote metadata alone
        try:
            return parse(json.loads(content)["files"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{CHECKSUMS} cannot be read") from error

    def _read_file(self, path: Path, name: str, expected: Checksum | None, copy: Path | None = None) -> None:
        try:
            found = retry(str(path), partial(_read, path, expected and expected[0], copy=copy))
        except ABSENT as error:
            raise DamagedCheckpointError(f"{name} is missing") from error
        compare(name, found, expected or found)

    def _read_json(self, step: int, name: str) -> Any:
        """What a JSON file beside the items holds; None where there is no such file, or it is no JSON."""
        path = self._path(step) / name / name
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


def write_checksums(checkpoint: Path) -> None:
    """Make a checkpoint's files durable, and note the size and checksum (CRC-32) of each in a file beside them."""
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


def _read(path: Path, expected_size: int | None = None, *, copy: Path | None = None, sync: bool = False) -> Checksum:
    """Size and CRC-32 of a file. Where the size is not the expected one, the content is not read."""
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
