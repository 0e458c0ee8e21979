"""The folder of a run: what lies where, and who may write it."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector

from pretrain._errors import UsageError
from pretrain._run.files import write_durably
from ray_jax_launch import StoragePath, as_storage_path, join_path, latest_step, open_uri


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run's folder.

    Of a run in object storage the files are kept in a folder of this machine as well, which `pull` and `push` make
    the same as those there; the checkpoints are there alone.
    """

    path: Path
    """The folder, on this machine."""

    uri: str | None = None
    """Where the run is kept, if that is object storage."""

    def __str__(self) -> str:
        """The run's place, for people."""
        return self.uri or str(self.path)

    @property
    def config(self) -> Path:
        """The resolved configuration, the data's identity, and the versions of everything."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """See `pretrain._run.metrics`."""
        return self.path / "metrics.jsonl"

    @property
    def starts(self) -> Path:
        """One line per start of the workers: the step it began at."""
        return self.path / "starts.jsonl"

    @property
    def checkpoints(self) -> StoragePath:
        """Place of numbered checkpoints."""
        return join_path(self.uri or self.path, "checkpoints")

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def result(self) -> Path:
        """The end: final metrics, wall time, steps, restarts."""
        return self.path / "result.json"

    @property
    def loss_picture(self) -> Path:
        """The loss curves."""
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        """Text that the trained model generated."""
        return self.path / "sample.txt"

    def elsewhere(self) -> "RunFolder":
        """The same run on another machine: where it is in object storage, with a folder of that machine."""
        if self.uri is None:
            return self
        folder = RunFolder(Path(tempfile.mkdtemp(prefix="pretrain-run-")), self.uri)
        folder.pull()
        return folder

    def pull(self) -> None:
        """Fetch the files of a run in object storage; those of an earlier copy go."""
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
                with filesystem.open_input_stream(info.path) as source:
                    target.write_bytes(source.read())

    def push(self) -> None:
        """Send the files of a run in object storage, each as a whole."""
        if self.uri is None:
            return
        filesystem, root = open_uri(self.uri)
        for path in self._files():
            with filesystem.open_output_stream(f"{root}/{path.relative_to(self.path)}") as target:
                target.write(path.read_bytes())

    def forget_copy(self) -> None:
        """Delete this machine's copy of a run in object storage."""
        if self.uri is not None:
            shutil.rmtree(self.path)

    def is_new(self) -> bool:
        """Tell whether the run has no folder and no objects yet."""
        if self.path.exists() or self.uri is None:
            return not self.path.exists()
        filesystem, root = open_uri(self.uri)
        return not filesystem.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))

    def check(self) -> None:
        """Check that the run's files are files that can be read and written, and its folders are folders.

        Raises:
            UsageError: something else has one of their names, or the run's folder cannot be written.
            OSError: a file cannot be read or written.
        """
        if not os.access(self.path, os.W_OK):
            raise UsageError(
                f"{self.path} must be writable, got a folder that you may only read. Choose another --name."
            )
        for path in (self.config, self.metrics, self.starts, self.result):
            if path.exists() and not path.is_file():
                raise UsageError(f"{path} must be a file, got something else. Move it away, or choose another --name.")
            if path.exists():
                path.open("r+b").close()
        for path in (self.path / "checkpoints", self.path / ".ray"):
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path} must be a folder, got a file. Move it away, or choose another --name.")

    def delete(self) -> None:
        """Delete all of the run."""
        shutil.rmtree(self.path)
        if self.uri is not None:
            filesystem, root = open_uri(self.uri)
            filesystem.delete_dir_contents(root, missing_dir_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith(".")]


def locate(place: str | Path) -> RunFolder:
    """A run by its folder or URI. Nothing is made or fetched.

    The copy of a run in object storage is in the user's cache, found by the URI.
    """
    place = as_storage_path(place)
    if isinstance(place, Path):
        return RunFolder(place.absolute())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{hashlib.sha256(place.encode()).hexdigest()[:16]}-{place.partition('?')[0].rpartition('/')[2]}"
    return RunFolder(cache / "pretrain" / "runs" / name, place)


@contextlib.contextmanager
def claim(place: StoragePath) -> Iterator[RunFolder]:
    """Make a run's folder if need be, and lock it against a second command of this machine until the block ends.

    If the block rejects its input, or fails before it has written anything, a folder that was made here is deleted,
    unless there is a checkpoint in it.

    Args:
        place: the run's folder, or its URI in object storage.

    Raises:
        UsageError: another command has locked the folder, or something in it is not what a run writes.
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
            raise UsageError(f"another command is training in {run}: wait for it, or choose another --name") from error
        try:
            run.pull()
            run.check()
            yield run
        except BaseException as error:
            is_rejected = isinstance(error, ValueError) or not run.config.exists()
            if is_new and is_rejected and latest_step(run.checkpoints) is None:
                run.delete()
                with contextlib.suppress(OSError):  # where another has put something into one
                    for parent in made:
                        parent.rmdir()
            raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there complete or not at all, also after a power cut."""
    write_durably(path, json.dumps(value, indent=2) + "\n")
