"""The folder of a run: its paths, its lock, and its copy in object storage."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import platformdirs
from pyarrow.fs import FileSelector, LocalFileSystem, copy_files

from pretrain._errors import RunFailedError, UsageError
from ray_jax_launch import StoragePath, as_storage_path, join_path, latest_step, open_uri


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
    def config(self) -> Path:
        """The resolved configuration, the fingerprint of the data, and the versions of the packages."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per recorded step: see `pretrain._run.metrics`."""
        return self.path / "metrics.jsonl"

    @property
    def starts(self) -> Path:
        """One JSON object per start of the workers: `step`, `time_s`, `workers`, `devices`, `device`."""
        return self.path / "starts.jsonl"

    @property
    def phases(self) -> Path:
        """One JSON object per phase: see `pretrain._run.history.Phase`."""
        return self.path / "phases.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object per sample of a validation: see `pretrain._run.history.Sample`."""
        return self.path / "samples.jsonl"

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
        """Return the same run for rank 0: a run in object storage gets a local copy of its own."""
        if self.uri is None:
            return self
        # The driver may be on the same machine. A copy that a killed worker has left is used again.
        folder = RunFolder(_cache() / "workers" / self.path.name, self.uri)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.pull()
        return folder

    def pull(self) -> None:
        """Replace the local copy of a run by its files in object storage."""
        if self.uri is None:
            return
        filesystem, root = open_uri(self.uri)
        for path in self._files():
            path.unlink()
        for info in filesystem.get_file_info(FileSelector(root, recursive=True, allow_not_found=True)):
            name = info.path[len(root.rstrip("/")) + 1 :]
            if info.is_file and not name.startswith(("checkpoints/", ".")):
                target = self.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                copy_files(info.path, str(target), filesystem, LocalFileSystem())

    def push(self) -> None:
        """Upload the local files of a run to object storage, less those that this object has uploaded already."""
        if self.uri is None:
            return
        filesystem, root = open_uri(self.uri)
        for path in self._files():
            stat = path.stat()
            state = (stat.st_mtime_ns, stat.st_size)
            if self._pushed.get(path) != state:
                copy_files(str(path), f"{root}/{path.relative_to(self.path)}", LocalFileSystem(), filesystem)
                self._pushed[path] = state

    def delete_copy(self) -> None:
        """Delete the local copy of a run in object storage."""
        if self.uri is not None:
            shutil.rmtree(self.path)

    def is_new(self) -> bool:
        """Return whether the run has neither a folder nor objects."""
        if self.path.exists() or self.uri is None:
            return not self.path.exists()
        filesystem, root = open_uri(self.uri)
        return not filesystem.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))

    def check(self) -> None:
        """Check that the run's files are readable and writable files, and its folders are folders.

        Raises:
            UsageError: a file has a folder's name or the reverse, or the run's folder cannot be written.
            OSError: a file cannot be read or written.
        """
        if not os.access(self.path, os.W_OK):
            raise UsageError(f"{self.path} must be writable, got a read-only folder. Choose another --name.")
        for path in (self.config, self.metrics, self.starts, self.result):
            if path.exists() and not path.is_file():
                raise UsageError(f"{path} must be a file, got something else. Move it away, or choose another --name.")
            if path.exists():
                path.open("r+b").close()
        path = self.path / "checkpoints"
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} must be a folder, got a file. Move it away, or choose another --name.")

    def delete(self) -> None:
        """Delete the run, and its local copy."""
        shutil.rmtree(self.path)
        if self.uri is not None:
            filesystem, root = open_uri(self.uri)
            filesystem.delete_dir_contents(root, missing_dir_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith(".")]


def locate(place: str | Path) -> RunFolder:
    """Return the run in a folder or at a URI, without reading it.

    The local copy of a run in object storage is in the user's cache. Its name contains a hash of the URI.
    """
    place = as_storage_path(place)
    if isinstance(place, Path):
        return RunFolder(place.absolute())
    name = f"{hashlib.sha256(place.encode()).hexdigest()[:16]}-{_last_part(place)}"
    return RunFolder(_cache() / "runs" / name, place)


@contextlib.contextmanager
def lock_run(place: StoragePath) -> Iterator[RunFolder]:
    """Lock a run against a second command on this machine until the block ends. Create its folder if necessary.

    If the block rejects its input, or fails before it has written `config.json`, a folder that this function has
    created is deleted, unless it holds a checkpoint.

    Args:
        place: the run's folder, or its URI in object storage.

    Raises:
        UsageError: another command has locked the run, or `RunFolder.check` has rejected the folder.
        OSError: the folder cannot be written.
        LaunchError: the object storage cannot be reached.
    """
    run = locate(place)
    is_new = run.is_new()
    made = [parent for parent in run.path.parents if not parent.exists()]
    run.path.mkdir(parents=True, exist_ok=True)
    with (run.path / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{run} must be locked by one command at a time, got a second one. Wait for the first to end, or "
                "choose another --name."
            ) from error
        try:
            run.pull()
            run.check()
            yield run
        except BaseException as error:
            has_begun = isinstance(error, RunFailedError)  # its files may be out of reach, and come back
            is_rejected = not has_begun and (isinstance(error, ValueError) or not run.config.exists())
            if is_new and is_rejected and latest_step(run.checkpoints) is None:
                run.delete()
                with contextlib.suppress(OSError):  # another program has written to one
                    for parent in made:
                        parent.rmdir()
            raise


def _last_part(uri: str) -> str:
    return PurePosixPath(uri.partition("?")[0]).name


def _cache() -> Path:
    return platformdirs.user_cache_path("pretrain")
