"""The folder of a run: what lies where, and who may write it."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector

from pretrain._config import PretrainConfig
from pretrain._errors import UsageError
from pretrain._files import read_object, write_durably
from ray_jax_launch import StoragePath, is_uri, join_path, open_uri

_PACKAGES = (
    "pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ray",
    "numpy",
)  # fmt: skip

# What may change between the start of a run and its continuation: none of it changes the result.
_FREE_FIELDS = (
    "preset", "data", "hardware", "storage_path", "name", "prepare", "prompt", "train.max_failures", "mesh",
    "model.attention", "model.remat", "model.loss_chunk_tokens", "wait_for_resources_s",
)  # fmt: skip


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
        """See `pretrain._metrics`."""
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

    def _files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith(".")]


def locate(place: str) -> RunFolder:
    """A run by its folder or URI. Nothing is made or fetched.

    The copy of a run in object storage is in the user's cache, found by the URI.
    """
    if not is_uri(place):
        return RunFolder(Path(place).expanduser().absolute())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{hashlib.sha256(place.encode()).hexdigest()[:16]}-{place.partition('?')[0].rpartition('/')[2]}"
    return RunFolder(cache / "pretrain" / "runs" / name, place)


@contextlib.contextmanager
def claim(place: str) -> Iterator[RunFolder]:
    """Make a run's folder if need be, and hold it against a second command of this machine until the block ends.

    If the block fails before anything was recorded in a folder made here, the folder goes again.

    Args:
        place: the run's folder, or its URI in object storage.

    Raises:
        UsageError: the folder cannot be written, or another command holds it.
        LaunchError: the object storage cannot be reached.
    """
    run = locate(place)
    path = run.path
    made = not path.exists()
    lock = path / ".lock"
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise UsageError(
            f"expected a storage path that can be written, but {path} cannot be made: {error.strerror}: "
            "choose another with --storage-path"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another command is training in {run}: wait for it, or choose another --name") from error
        with contextlib.ExitStack() as undo:
            if made:
                undo.callback(_remove_unused, run, lock)
            run.pull()
            yield run
            undo.pop_all()


def _remove_unused(run: RunFolder, lock: Path) -> None:
    if not run.config.exists():
        lock.unlink()
        run.path.rmdir()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there complete or not at all, also after a power cut."""
    write_durably(path, json.dumps(value, indent=2) + "\n")


def read_description(folder: RunFolder) -> dict[str, Any]:
    """The description of a run, as `describe` gave it when the run was started.

    Raises:
        UsageError: `config.json` is damaged, as a power cut left it under older versions.
    """
    remedy = "Restore it from a copy, or choose another --name for a new run."
    description = read_object(folder.config, remedy)
    missing = [name for name in ("config", "data", "versions") if not isinstance(description.get(name), dict)]
    if missing:
        raise UsageError(
            f"{folder.config} must have the objects config, data and versions, got none as {missing[0]}. {remedy}"
        )
    return description


def describe(config: PretrainConfig, data: dict[str, Any], hardware: str) -> dict[str, Any]:
    """The contents of `config.json`.

    Args:
        config: the resolved configuration.
        data: where the tokens are, and their fingerprint.
        hardware: what `auto` came to.
    """
    return {
        "config": dataclasses.asdict(config),
        "data": data,
        "hardware": hardware,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    }


def check_layout(stored: dict[str, Any], folder: RunFolder) -> None:
    """Refuse a run whose checkpoints have another layout.

    Args:
        stored: the run's `config.json`.
        folder: the run's.

    Raises:
        UsageError: an older version wrote them.
    """
    wrote = stored["versions"]["nnx-gpt2"]
    if wrote.startswith("0.1."):
        raise UsageError(
            f"expected a run of nnx-gpt2 0.2 or later, got {wrote}'s in {folder}, whose parameters have another "
            "layout: use pretrain 0.2 for it, or another --name for a new run"
        )


def check_same_settings(stored: dict[str, Any], config: PretrainConfig, folder: RunFolder) -> None:
    """Refuse to continue a run under other settings, which would not be the same run.

    Args:
        stored: the run's `config.json`.
        config: what is asked for now.
        folder: the run's.

    Raises:
        UsageError: a setting that matters differs; the message names it.
    """
    before, after = _flatten(stored["config"]), _flatten(dataclasses.asdict(config))
    free = tuple(f"{name}." for name in _FREE_FIELDS)
    for name in sorted(before.keys() | after.keys()):
        if not f"{name}.".startswith(free) and before.get(name) != after.get(name):
            raise UsageError(
                f"the run in {folder} was started with {name} {before.get(name)}, not {after.get(name)}: give the "
                "former settings to continue it, or another --name for a new run"
            )


def check_same_data(stored: dict[str, Any], fingerprint: dict[str, Any], folder: RunFolder) -> None:
    """Refuse to continue a run on other data.

    Args:
        stored: the run's `config.json`.
        fingerprint: of the data that is given now.
        folder: the run's.

    Raises:
        UsageError: the data differs; the message says in what.
    """
    before = stored["data"]["fingerprint"]
    differing = [
        name for name in sorted(before.keys() | fingerprint.keys()) if before.get(name) != fingerprint.get(name)
    ]
    if differing:
        raise UsageError(
            f"the run in {folder} was started on other data ({', '.join(differing)} differs): give the former --data "
            "to continue it, or another --name for a new run"
        )


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
