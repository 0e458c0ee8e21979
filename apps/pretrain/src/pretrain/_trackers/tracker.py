"""The trackers of a run, each behind one protocol."""

import heapq
import importlib.util
import secrets
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol, runtime_checkable

from pretrain._best_effort import best_effort
from pretrain._config import PretrainConfig, TrackerName
from pretrain._errors import UsageError
from pretrain._run.description import RunDescription
from pretrain._run.files import read_lines, read_text, write_durably
from pretrain._run.folder import RunFolder
from pretrain._run.history import Sample, as_samples
from pretrain._run.log_parts import SAMPLES, SCORES, TEXTS
from pretrain._run.metrics import TEXT_METRICS, Record
from pretrain._run.partial_reads import lines_from
from pretrain._trackers.shown_values import hyperparameters, settings
from pretrain._trackers.trackio_tracker import TrackioTracker
from pretrain._trackers.wandb_tracker import WandbTracker

_LABELS: dict[TrackerName, str] = {"tensorboard": "TensorBoard's events", "wandb": "wandb", "trackio": "trackio"}
_EXTRAS = ("wandb", "trackio")


@runtime_checkable  # beartype checks it in tests
class Tracker(Protocol):
    """A program that gets the records and the samples of a run, in the order of steps, each once."""

    first_step: int
    """First step to write. The program has the earlier ones."""

    def write(self, record: Record) -> None:
        """Write a record."""
        ...

    def write_sample(self, sample: Sample) -> None:
        """Write a sample."""
        ...

    def flush(self) -> None:
        """Make durable what the program would not get again after a kill."""
        ...

    def close(self) -> None:
        """Write the rest, and end."""
        ...


class Trackers:
    """The trackers of one start of a run, used as one. A tracker that fails is dropped with a warning."""

    def __init__(self) -> None:
        self._open: dict[TrackerName, Tracker] = {}

    def add(self, name: TrackerName, opened: Callable[[], Tracker]) -> None:
        """Open a tracker."""
        with best_effort(_LABELS[name]):
            self._open[name] = opened()

    def first_step(self, start: int) -> int:
        """Return the first step before a start that a tracker lacks; the start if no tracker lacks a step."""
        return min([start, *(tracker.first_step for tracker in self._open.values())])

    def write(self, record: Record) -> None:
        """Write a record to the trackers that lack it."""
        self._each(lambda tracker: tracker.write(record) if record["step"] >= tracker.first_step else None)

    def write_sample(self, sample: Sample) -> None:
        """Write a sample to the trackers that lack it."""
        self._each(lambda tracker: tracker.write_sample(sample) if sample.step >= tracker.first_step else None)

    def flush(self) -> None:
        """Call this before a checkpoint is saved."""
        self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Close every tracker."""
        self._each(lambda tracker: tracker.close())

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in [*self._open.items()]:
            del self._open[name]
            with best_effort(_LABELS[name]):
                action(tracker)
                self._open[name] = tracker


def check_trackers(config: PretrainConfig) -> None:
    """Check that the packages of the trackers are installed, without importing them: wandb takes seconds.

    Raises:
        UsageError: a package is missing.
    """
    for name in config.trackers:
        spec = importlib.util.find_spec(name) if name in _EXTRAS else None
        # wandb makes a folder `wandb` in the working folder. Python takes a folder for a package without a file.
        if name in _EXTRAS and (spec is None or spec.origin is None):
            raise UsageError(
                f"trackers must have their packages, got {name}, which is not installed. Install it with `--extra "
                f"{name}`."
            )


def open_trackers(config: PretrainConfig, description: RunDescription, folder: RunFolder, start: int) -> Trackers:
    """Open the trackers of a run on rank 0, and write what they lack of the records before this start.

    A program that knows its last step gets no step twice. The records before this start come from the run's files: a
    tracker that a kill has cut off, or that is new in a continued run, gets the whole curve.

    Args:
        config: the configuration of this start, which names the trackers.
        description: the description of the run.
        folder: the run's folder.
        start: the first step that this start records. It may write the records of this step and of later ones again,
            with the same values.
    """
    trackers = Trackers()
    for name in dict.fromkeys(config.trackers):
        trackers.add(name, lambda name=name: _open(name, config, description, folder, start))
    missing = trackers.first_step(start)
    samples = lines_from(folder.samples, missing, TEXTS[SAMPLES])
    records = lines_from(folder.metrics, missing, TEXT_METRICS)
    scores = sorted(read_lines(folder.scores, TEXTS[SCORES]), key=itemgetter("step"))
    # All samples of a step, before its record, and then the scores on tasks.
    for line in heapq.merge(samples, records, [x for x in scores if x["step"] >= missing], key=itemgetter("step")):
        if line["step"] >= start:
            break
        if "prompt" not in line:
            trackers.write(line)
        for sample in as_samples([line]):
            trackers.write_sample(sample)
    trackers.flush()
    return trackers


def _open(
    name: TrackerName, config: PretrainConfig, description: RunDescription, folder: RunFolder, start: int
) -> Tracker:
    if name == "tensorboard":
        from pretrain._trackers.tensorboard import TensorBoard  # takes half a second, which the driver does not need

        return TensorBoard(
            folder.tensorboard, start, settings(description), hyperparameters(description), config.prompts
        )
    if name == "wandb":
        return WandbTracker(folder.path, folder.name, _run_id(folder), settings(description))
    return TrackioTracker(folder.name, _run_id(folder), settings(description))


def _run_id(folder: RunFolder) -> str:
    """Return the id of the run. It is random: a new run in place of a deleted one is another run."""
    path = folder.path / "tracker_id"
    if not path.exists():
        write_durably(path, secrets.token_hex(4))
        folder.push()
    return read_text(path)
