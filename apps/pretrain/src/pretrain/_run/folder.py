"""The folder of a run: its paths, and its copy in object storage."""

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pyarrow.fs import FileInfo, FileSelector, LocalFileSystem, copy_files

from pretrain._errors import UsageError
from pretrain._run.files import check_kind, load_json, read_text
from pretrain._run.log_parts import LOG, METRICS, PHASES, SAMPLES, SCORES, STARTS, TEXTS, LogWriter, pull_log
from pretrain._run.step_losses import STEP_LOSSES, VAL_LOSSES
from pretrain._surroundings.private_cache import private_cache
from ray_jax_launch import LaunchError, StoragePath, as_storage_path, join_path, open_uri

# Names of a run in object storage that have no copy on this machine, or a copy of their own.
_APART = ("checkpoints/", f"{LOG}/", ".", *TEXTS, STEP_LOSSES)
# The files in folders that a worker continues from: the number of steps that TensorBoard's files have.
_PULLED = ("tensorboard/recorded_steps",)

# Characters of a run's name in that of its local copy. A file system has names of at most 255 bytes.
_MOST_OF_A_NAME = 50


class MovedFolderError(LaunchError):
    """The folder of a run was renamed, deleted or replaced while its command runs."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run.

    A run in object storage has a local copy of its files, but not of its checkpoints: `pull` downloads the files, and
    `push` uploads them.
    """

    path: Path
    """The folder on this machine."""

    uri: str | None = None
    """The run's place in object storage, or None for a run in a folder."""

    owner: str | None = None
    """The id of the command that has locked the run, in the driver and in its workers; None in other commands."""

    _pushed: dict[Path, tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Time of the last change, and size, of each uploaded file."""

    def __str__(self) -> str:
        """Return the run's URI or folder."""
        return self.uri or str(self.path)

    @property
    def name(self) -> str:
        """The run's name, the last part of the URI or folder."""
        return self.path.name if self.uri is None else _last_part(self.uri)

    @property
    def lock(self) -> Path:
        """The file that a command locks. It holds the command as JSON: see `pretrain._run.lease.Owner`."""
        return self.path / ".lock"

    @property
    def config(self) -> Path:
        """The resolved configuration, the fingerprint of the data, and the versions of the packages."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per recorded step: see `pretrain._run.metrics`."""
        return self.path / METRICS

    @property
    def starts(self) -> Path:
        """One JSON object per start of the workers: see `RunHistory.starts`."""
        return self.path / STARTS

    @property
    def phases(self) -> Path:
        """One JSON object per phase: see `pretrain._run.history.Phase`."""
        return self.path / PHASES

    @property
    def samples(self) -> Path:
        """One JSON object per sample of a validation: see `pretrain._run.history.Sample`."""
        return self.path / SAMPLES

    @property
    def scores(self) -> Path:
        """One JSON object per checkpoint that was scored on tasks: see `pretrain._run.history.read_scores`."""
        return self.path / SCORES

    @property
    def step_losses(self) -> Path:
        """The loss of each step: see `pretrain._run.step_losses`."""
        return self.path / STEP_LOSSES

    @property
    def val_losses(self) -> Path:
        """The loss of each validation window after the last step: see `pretrain._run.step_losses`."""
        return self.path / VAL_LOSSES

    @property
    def profiles(self) -> Path:
        """The folder of traces, in the layout of TensorBoard's profiler."""
        return self.tensorboard

    @property
    def checkpoints(self) -> StoragePath:
        """The folder or URI of the checkpoints."""
        return join_path(self.uri or self.path, "checkpoints")

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def result(self) -> Path:
        """The result: final metrics, wall time, steps, restarts."""
        return self.path / "result.json"

    @property
    def loss_picture(self) -> Path:
        """The loss curves."""
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        """Text that the trained model generated."""
        return self.path / "sample.txt"

    def for_worker(self) -> "RunFolder":
        """Return the same run for a worker that writes: a run in object storage gets a local copy of its own."""
        if self.uri is None:
            return self
        # The driver may be on the same machine. A copy that a killed worker has left is used again.
        folder = RunFolder(private_cache() / "workers" / self.path.name, self.uri, self.owner)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.pull()
        return folder

    def log_writer(self) -> LogWriter:
        """Return a writer of the run's logs."""
        return LogWriter(self.path, self.uri)

    def check_place(self) -> None:
        """Check that this is still the folder that the command has locked. Call this before a file is written.

        Nothing may be written into a new folder of the former name: it is another run, or none.

        Raises:
            MovedFolderError: it is another folder, or there is none.
        """
        if self.uri is not None or self.owner is None:
            return
        content: Any = None
        try:
            content = load_json(read_text(self.lock))
            is_here = True
        except (FileNotFoundError, NotADirectoryError):
            is_here = False
        except ValueError:  # another command writes it
            is_here = True
        if not is_here or (isinstance(content, dict) and content.get("owner") != self.owner):
            raise MovedFolderError(
                f"{self.path} was moved, deleted or replaced while its command ran. Move it back, or give its new "
                "--storage-path and --name"
            )

    def pull(self) -> None:
        """Replace the local copy of a run by its files in object storage, without those in folders.

        The files in folders, such as TensorBoard's events, grow with the run, and no command reads them.

        Raises:
            LaunchError: the storage cannot be reached.
            OSError: a file cannot be read or written.
        """
        if self.uri is None:
            return
        filesystem, root = open_uri(self.uri)
        root = root.rstrip("/")
        for path in self._files():
            path.unlink()
        found = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
        for info in [*found, *filesystem.get_file_info([f"{root}/{name}" for name in _PULLED])]:
            name = info.path[len(root) + 1 :]
            if info.is_file and not name.startswith(_APART):
                target = self.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                copy_files(info.path, str(target), filesystem, LocalFileSystem())
        pull_log(filesystem, root, self.path)

    def push(self, *, with_logs: bool = False) -> None:
        """Upload the local files of a run to object storage, less those that this object has uploaded already.

        Args:
            with_logs: upload the logs too, for programs that read object storage themselves. This package reads the
                parts: see `pretrain._run.log_parts`.

        Raises:
            LaunchError: the storage cannot be reached.
            OSError: a file cannot be read or written.
        """
        if self.uri is None:
            return
        filesystem, root = open_uri(self.uri)
        logs = [path for path in map(self.path.joinpath, (*TEXTS, STEP_LOSSES)) if with_logs and path.exists()]
        for path in [*logs, *self._files()]:
            stat = path.stat()
            state = (stat.st_mtime_ns, stat.st_size)
            if self._pushed.get(path) != state:
                copy_files(str(path), f"{root}/{path.relative_to(self.path)}", LocalFileSystem(), filesystem)
                self._pushed[path] = state

    def delete_result(self) -> None:
        """Delete `result.json`, here and in object storage: the run is not finished any more."""
        if self.result.exists():
            self.result.unlink()
            if self.uri is not None:
                filesystem, root = open_uri(self.uri)
                filesystem.delete_file(f"{root}/{self.result.name}")

    def delete_copy(self) -> None:
        """Delete the local copy of a run in object storage."""
        if self.uri is not None:
            shutil.rmtree(self.path)

    def is_empty(self) -> bool:
        """Return whether the run has no description, or in object storage no objects."""
        return not self._objects() if self.uri is not None else not self.config.exists()

    def check(self) -> None:
        """Check that the run's files are readable and writable files, and its folders are folders.

        Raises:
            UsageError: a file has a folder's name or the reverse, or the run's folder cannot be written.
            OSError: a file cannot be read or written.
        """
        if not os.access(self.path, os.W_OK):
            raise UsageError(f"{self.path} must be writable, got a read-only folder. Choose another --name.")
        logs = (self.metrics, self.starts, self.phases, self.samples, self.scores, self.step_losses, self.val_losses)
        for path in (self.config, *logs, self.result):
            check_kind(path)
            if path.is_dir():
                raise UsageError(f"{path} must be a file, got something else. Move it away, or choose another --name.")
            if path.exists():
                path.open("r+b").close()
        path = self.path / "checkpoints"
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} must be a folder, got a file. Move it away, or choose another --name.")

    def delete(self) -> None:
        """Delete the run, and its local copy. The lease of a run in object storage stays."""
        shutil.rmtree(self.path)
        if self.uri is not None:
            filesystem, _ = open_uri(self.uri)
            for info in self._objects():
                (filesystem.delete_file if info.is_file else filesystem.delete_dir)(info.path)

    def _objects(self) -> list[FileInfo]:
        """Return the objects and folders of a run, except those whose names begin with a dot."""
        assert self.uri is not None, "a folder has no objects"
        filesystem, root = open_uri(self.uri)
        infos = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
        return [info for info in infos if not info.base_name.startswith(".")]

    def _files(self) -> list[Path]:
        """Return the local files, without the logs of a run in object storage, hidden files, and what is no file."""
        found = (path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith("."))
        return [path for path in found if not f"{path.relative_to(self.path)}".startswith(_APART)]


def locate(place: str | Path) -> RunFolder:
    """Return the run in a folder or at a URI, without reading it.

    The local copy of a run in object storage is in the user's cache. Its name contains a hash of the URI.
    """
    place = as_storage_path(place)
    if isinstance(place, Path):
        return RunFolder(place.absolute())
    name = f"{hashlib.sha256(place.encode()).hexdigest()[:16]}-{_last_part(place)[:_MOST_OF_A_NAME]}"
    return RunFolder(private_cache() / "runs" / name, place)


def _last_part(uri: str) -> str:
    return PurePosixPath(uri.partition("?")[0]).name
