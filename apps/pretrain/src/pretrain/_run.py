"""The folder of a run: what lies where, and who may write it."""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pretrain._config import PretrainConfig
from pretrain._errors import UsageError

_PACKAGES = (
    "pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ray",
    "numpy",
)  # fmt: skip

# What may change between the start of a run and its continuation: none of it changes the result.
_FREE_FIELDS = (
    "preset", "data", "hardware", "storage_path", "name", "prepare", "prompt", "train.max_failures", "mesh",
    "model.attention", "model.remat", "model.loss_chunk_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path
    """The folder."""

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
    def checkpoints(self) -> Path:
        """Folder of numbered checkpoints."""
        return self.path / "checkpoints"

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


@contextlib.contextmanager
def claim(path: Path) -> Iterator[RunFolder]:
    """Make a run's folder if need be, and hold it against a second command until the block ends.

    If the block fails before anything was recorded in a folder made here, the folder goes again.

    Raises:
        UsageError: the folder cannot be written, or another command holds it.
    """
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
            raise UsageError(f"another command is training in {path}: wait for it, or choose another --name") from error
        run = RunFolder(path)
        with contextlib.ExitStack() as undo:
            if made:
                undo.callback(_remove_unused, run, lock)
            yield run
            undo.pop_all()


def _remove_unused(run: RunFolder, lock: Path) -> None:
    if not run.config.exists():
        lock.unlink()
        run.path.rmdir()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)


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


def check_layout(stored: dict[str, Any], path: Path) -> None:
    """Refuse a run whose checkpoints have another layout.

    Args:
        stored: the run's `config.json`.
        path: the run's folder.

    Raises:
        UsageError: an older version wrote them.
    """
    wrote = stored["versions"]["nnx-gpt2"]
    if wrote.startswith("0.1."):
        raise UsageError(
            f"expected a run of nnx-gpt2 0.2 or later, got {wrote}'s in {path}, whose parameters have another layout: "
            "use pretrain 0.2 for it, or another --name for a new run"
        )


def check_same_settings(stored: dict[str, Any], config: PretrainConfig, path: Path) -> None:
    """Refuse to continue a run under other settings, which would not be the same run.

    Args:
        stored: the run's `config.json`.
        config: what is asked for now.
        path: the run's folder.

    Raises:
        UsageError: a setting that matters differs; the message names it.
    """
    before, after = _flatten(stored["config"]), _flatten(dataclasses.asdict(config))
    free = tuple(f"{name}." for name in _FREE_FIELDS)
    for name in sorted(before.keys() | after.keys()):
        if not f"{name}.".startswith(free) and before.get(name) != after.get(name):
            raise UsageError(
                f"the run in {path} was started with {name} {before.get(name)}, not {after.get(name)}: give the "
                "former settings to continue it, or another --name for a new run"
            )


def check_same_data(stored: dict[str, Any], fingerprint: dict[str, Any], path: Path) -> None:
    """Refuse to continue a run on other data.

    Args:
        stored: the run's `config.json`.
        fingerprint: of the data that is given now.
        path: the run's folder.

    Raises:
        UsageError: the data differs; the message says in what.
    """
    before = stored["data"]["fingerprint"]
    differing = [
        name for name in sorted(before.keys() | fingerprint.keys()) if before.get(name) != fingerprint.get(name)
    ]
    if differing:
        raise UsageError(
            f"the run in {path} was started on other data ({', '.join(differing)} differs): give the former --data to "
            "continue it, or another --name for a new run"
        )


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
