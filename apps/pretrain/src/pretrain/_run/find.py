"""Runs and their checkpoints by their names: RUN, RUN@STEP, RUN@best."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pretrain._errors import UsageError, short
from pretrain._run.description import RunDescription, read_description
from pretrain._run.folder import RunFolder, locate
from pretrain._run.metrics import TEXT_METRICS, Record, finite
from pretrain._run.partial_reads import lines_from
from pretrain._run.remote_copy import pull_changed, reader_copy
from pretrain._suggestions import nearest
from ray_jax_launch import checkpoint_steps, is_uri

BEST = "best"
"""The checkpoint with the lowest validation loss."""

DEFAULT_STORAGE = Path("runs")
_PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
_CONFIG = "config.json"
_MOST_NAMES = 8
_MOST_STEPS = 12
_CHECKPOINT = re.compile(rf"(?P<run>.+)@(?P<step>[0-9]+|{BEST})")

T = TypeVar("T")


class NoRunError(UsageError):
    """No run has a name."""

    def __init__(self, name: str, remedy: str, *, or_weights: bool = False) -> None:
        kinds = f"the folder or URI of a run, or its name in {DEFAULT_STORAGE}"
        if or_weights:
            kinds = kinds.replace(", or", ",") + ", a folder of `export`, or published weights such as gpt2"
        super().__init__(f"run must be {kinds}, got {short(name)}. {remedy}")
        self.name, self.remedy = name, remedy


class FoundCheckpoint(NamedTuple):
    """A checkpoint of a run."""

    folder: RunFolder
    """The run's folder."""

    description: RunDescription
    """The run's description."""

    step: int
    """The step of the checkpoint."""


def names_a_checkpoint(name: str) -> bool:
    """Return whether a name is RUN@STEP or RUN@best, and not that of a run alone."""
    return _CHECKPOINT.fullmatch(name) is not None


def find_run_of(name: str) -> tuple[RunFolder, RunDescription]:
    """Find the run of a checkpoint, which may be deleted since: see `find_checkpoint` and `find_run`."""
    found = _CHECKPOINT.fullmatch(name)
    return find_run(found["run"] if found else name)


def find_checkpoint(name: str) -> FoundCheckpoint:
    """Find a checkpoint of a run, by its number. Its files are not read.

    Args:
        name: the run as for `find_run`, for its newest checkpoint; or `RUN@STEP`, or `RUN@best` for the lowest
            validation loss.

    Raises:
        UsageError: the run or the checkpoint does not exist.
        OSError: the folder cannot be read.
    """
    found = _CHECKPOINT.fullmatch(name)
    run, wanted = (found["run"], found["step"]) if found else (name, None)
    try:
        folder, description = find_run(run)
    except NoRunError:
        if wanted is not None and "@" in run and not is_uri(run):
            constraint = f"have at most one @, as RUN@STEP and RUN@{BEST} have"
            raise UsageError(f"the name of a checkpoint must {constraint}, got {short(name)}.") from None
        raise
    steps = checkpoint_steps(folder.checkpoints)
    if not steps:
        raise UsageError(f"{folder} has no checkpoint yet. Continue its training.")
    if wanted is None:
        return FoundCheckpoint(folder, description, steps[-1])
    if wanted == BEST:
        records = (next(lines_from(folder.metrics, step, TEXT_METRICS), {"step": step}) for step in steps)
        step = best_step(records, steps)
        if step is None:
            raise UsageError(f"{folder} has no validation loss of a checkpoint. Give {short(run)}@STEP.")
        return FoundCheckpoint(folder, description, step)
    if int(wanted) not in steps:
        raise UsageError(
            f"{folder} has no checkpoint of step {short(wanted)}; it has {', '.join(map(str, steps[-_MOST_STEPS:]))}."
        )
    return FoundCheckpoint(folder, description, int(wanted))


def find_unless_published(name: str, find: Callable[[str], T]) -> T | None:
    """Return the run of a name; None for weights in Hugging Face's format, in a folder or on the hub.

    A name of the hub is OWNER/NAME, or one of the first four models. A run of that name comes first, and one in `runs`
    before a folder of the same name.

    Args:
        name: the run, the folder or the name.
        find: returns the run, or raises UsageError.

    Raises:
        UsageError: there is no such run, and the name is none of weights; or it names a checkpoint of weights.
    """
    if _is_weights_first(name):
        return None
    checkpoint = _CHECKPOINT.fullmatch(name)
    run = checkpoint["run"] if checkpoint else name
    if checkpoint and _is_weights_first(run):
        raise _of_weights(name, run, "a folder of `export`")
    try:
        return find(name)
    except NoRunError as error:
        if not Path(run).exists():
            if checkpoint and run in _PUBLISHED:  # any other OWNER/NAME@STEP may be meant as the path of a run
                raise _of_weights(name, run, "a published name") from None
            if not checkpoint and _is_hub_name(name):
                return None
        raise NoRunError(error.name, error.remedy, or_weights=True) from None


def _is_hub_name(name: str) -> bool:
    return name in _PUBLISHED or (name.count("/") == 1 and not name.startswith((".", "/", "runs/")))


def _is_weights_first(name: str) -> bool:
    """Return whether a name is that of a folder of weights, and no run in `runs` has it."""
    is_run = "/" not in name and (DEFAULT_STORAGE / name / _CONFIG).is_file()
    return not is_run and _has_weights(Path(name))


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has the config of weights in Hugging Face's format."""
    config = folder / _CONFIG
    return config.is_file() and "model_type" in _object(config)


def _of_weights(name: str, run: str, kind: str) -> UsageError:
    return UsageError(
        f"{short(name)} must be a checkpoint of a run, got {kind}, which has one set of weights. "
        f"Leave out {name.removeprefix(run)}."
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def best_step(records: Iterable[Record], steps: list[int]) -> int | None:
    """Return the step with the lowest validation loss, among some steps; None if none has a loss."""
    losses = [(record["val_loss"], record["step"]) for record in map(finite, records) if "val_loss" in record]
    return min((found for found in losses if found[1] in steps), default=(None, None))[1]


def find_run(name: str) -> tuple[RunFolder, RunDescription]:
    """Find a run, and copy its texts from object storage if it is there.

    Args:
        name: the run's folder or URI, or its name in `runs`.

    Returns:
        The run's folder, and its description.

    Raises:
        NoRunError: the run does not exist.
        UsageError: its description is damaged, or the folder has weights alone.
        OSError: the folder cannot be read.
    """
    if not name:
        folders = []
    elif is_uri(name):
        folders = [reader_copy(name)]
        pull_changed(folders[0])
    elif "/" in name:
        folders = [locate(name), locate(DEFAULT_STORAGE / name)]
    else:  # `export first first` writes a folder of the same name
        folders = [locate(DEFAULT_STORAGE / name), locate(name)]
    for folder in folders:
        if folder.uri is None and _has_weights(folder.path):
            raise UsageError(
                f"{folder} must be a run, got a folder of weights alone, as `export` writes it. Name a run."
            )
        if (description := read_description(folder)) is not None:
            return folder, description
    raise NoRunError(name, _remedy(name))


def _remedy(name: str) -> str:
    """Return the names of the runs beside a path, or in the default storage, the newest first."""
    if _CHECKPOINT.fullmatch(name) is not None:
        return "This command takes a run: leave out what follows the @."
    if "@" in name and not is_uri(name):
        return f"A checkpoint of a run is RUN@STEP, with a number, or RUN@{BEST}."
    storage = DEFAULT_STORAGE
    if "/" in name and not is_uri(name) and (beside := locate(name).path.parent) != storage.absolute():
        storage = beside
    files = sorted(storage.glob("*/config.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [file.parent.name for file in files]
    if not names:
        return f"There are no runs in {storage.absolute()}: train one, or give a folder."
    wanted = Path(name).name
    known = wanted and (next((known for known in names if known.startswith(wanted)), None) or nearest(wanted, names))
    place = Path() if storage == DEFAULT_STORAGE else storage
    question = f"Did you mean {place / known}? " if known else ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{question}{storage} has {', '.join(names[:_MOST_NAMES])}{more}."
