"""The comparison of what a run has recorded with the same steps, computed again."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from pretrain._audit.recompute import RecomputedSteps
from pretrain._audit.recorded_run import RecordedCheckpoint, RecordedRun
from pretrain._audit.run_difference import RunDifference, compare_runs
from pretrain._audit.segment import Segment
from pretrain._run.checkpoint_digests import TENSORS, roots

# Numbers of a record that follow from the steps alone.
_COMPARED = ("loss", "grad_norm_max", "num_skipped", "learning_rate")
# Packages that decide the numbers of a step.
_OF_NUMBERS = ("nnx-gpt2", "owt-data", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDifference:
    """The first recorded metric that is another one when it is computed again."""

    step: int
    name: str
    recorded: float | None
    recomputed: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayDifference:
    """Differences between a run and its steps computed again."""

    run: RunDifference
    """Windows, losses and arrays: A is the run, B the replay."""

    record: RecordDifference | None
    """The first metric of a record that differs."""

    causes: list[str]
    """Hardware and versions that differ, as sentences: with others, the last digits may differ."""

    @property
    def first_step(self) -> int | None:
        """The first step at which anything differs."""
        found = [difference.step for difference in self.run.first.values()]
        return min([*found, *([] if self.record is None else [self.record.step])], default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ComputedRun(RecordedRun):
    """A run as its steps, computed again, would have recorded it."""

    checkpoints: Mapping[int, RecordedCheckpoint]

    def read_checkpoint(self, step: int) -> RecordedCheckpoint:
        """Return what was computed."""
        return self.checkpoints[step]


def compare_replay(run: RecordedRun, segment: Segment, found: RecomputedSteps) -> ReplayDifference:
    """Compare the steps of a segment with what the run has recorded.

    Raises:
        UsageError: the description in a checkpoint of the run is damaged.
        DamagedCheckpointError: a checkpoint of the run cannot be read.
    """
    is_compared = (np.arange(segment.stop) >= segment.first) & (np.arange(segment.stop) < segment.stop)
    recorded, recomputed = np.full((2, segment.stop), np.nan, np.float32)
    num_recorded = min(segment.stop, len(run.losses))
    recorded[:num_recorded] = run.losses[:num_recorded]
    recomputed[segment.start :] = found.losses
    steps = [step for step in segment.record_steps if step > segment.first]
    part = dataclasses.replace(
        run,
        losses=np.where(is_compared, recorded, np.float32(np.nan)),
        records={step: run.records[step] for step in steps},
        checkpoint_steps=segment.checkpoint_steps,
    )
    again = _ComputedRun(
        folder=run.folder,
        description=run.description,
        losses=np.where(is_compared, recomputed, np.float32(np.nan)),
        records={step: found.records[step] for step in steps},
        starts=run.starts,
        checkpoint_steps=segment.checkpoint_steps,
        checkpoints={step: _checkpoint(run, step, digests) for step, digests in found.digests.items()},
    )
    records = (
        RecordDifference(step=step, name=name, recorded=old.get(name), recomputed=new.get(name))
        for step, old, new in ((step, part.records[step], again.records[step]) for step in steps)
        for name in _COMPARED
        if old.get(name) != new.get(name)
    )
    return ReplayDifference(
        run=compare_runs(part, again), record=next(records, None), causes=_causes(run, segment, found)
    )


def _checkpoint(run: RecordedRun, step: int, digests: Mapping[str, Any]) -> RecordedCheckpoint:
    tensors = {f"{item}.{name}": digest for item, of in digests[TENSORS].items() for name, digest in of.items()}
    return RecordedCheckpoint(
        step=step, description=run.description, roots=roots({"digests": digests}), tensors=tensors
    )


def _causes(run: RecordedRun, segment: Segment, found: RecomputedSteps) -> list[str]:
    """Return what may change the last digits: other devices than those of the run, and other versions."""
    causes = []
    here = (found.workers, found.devices, found.device)
    for start in _starts(run, segment):
        there = tuple(start.get(name) for name in ("workers", "devices", "device"))
        # With shards of a batch, the number of CPU workers changes no bit.
        is_same = run.description.config.train.num_shards is not None and there[2] == here[2] == "cpu"
        if there != here and None not in there and not is_same:
            text = f"The run was computed on {_layout(*there)}, this replay on {_layout(*here)}"
            causes.append(f"{text}: the last digits may differ.")
        if start.get("processor") not in (None, found.processor):
            text = f"The processor of the run was {start['processor']}, that of this replay is {found.processor}"
            causes.append(f"{text}: the last digits may differ.")
    versions = run.description.versions
    changed = [name for name in _OF_NUMBERS if name in versions and versions[name] != version(name)]
    if changed:
        old, new = (", ".join(f"{name} {of(name)}" for name in changed) for of in (versions.__getitem__, version))
        causes.append(f"The run was computed by {old}, this replay by {new}: the last digits may differ.")
    return list(dict.fromkeys(causes))


def _starts(run: RecordedRun, segment: Segment) -> list[dict[str, Any]]:
    """Return the starts of the run's workers that computed steps of a segment."""
    ends = [*(start.get("step", 0) for start in run.starts[1:]), run.last_step]
    return [
        start
        for start, end in zip(run.starts, ends, strict=True)
        if start.get("step", 0) < segment.stop and end > segment.start
    ]


def _layout(workers: Any, devices: Any, device: Any) -> str:
    of_workers, of_devices = ("" if number == 1 else "s" for number in (workers, devices))
    return f"{workers} worker{of_workers} with {devices} device{of_devices} ({device})"
