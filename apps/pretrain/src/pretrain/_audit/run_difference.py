"""The first step at which two runs differ, and the arrays of two checkpoints that differ."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pretrain._audit.recorded_run import RecordedCheckpoint, RecordedRun
from pretrain._run.description import RunDescription
from pretrain._run.differences import differing_options, option_values
from pretrain._run.files import flatten
from ray_jax_launch import DeletedCheckpointError

Kind = Literal["windows", "loss", "arrays"]
"""The kind of a difference. The windows are known at each record, the arrays at each checkpoint."""

# Options that change a result by rounding alone.
_OF_ROUNDING = ("mesh.fsdp", "mesh.tensor", "train.grad_accum_steps", "train.micro_batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayDifference:
    """The elements of an array that differ between two checkpoints."""

    num_elements: int
    """Elements whose bits differ."""

    size: int
    """Elements of the array."""

    largest: float | None
    """Largest absolute difference; None if it is infinite or not a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference:
    """The arrays of two checkpoints that differ."""

    steps: tuple[int, int]
    """Steps of the checkpoints of A and B."""

    num_arrays: int
    """Names of arrays in A, B or both."""

    differing: list[str]
    """Arrays in both that differ in a bit, their type or their shape."""

    only_in_a: list[str]
    only_in_b: list[str]

    elements: dict[str, ArrayDifference] = field(default_factory=dict)
    """The elements of the arrays that differ, if they were read. Arrays of another shape or type have none."""

    @property
    def same(self) -> bool:
        """True if all arrays are equal."""
        return not (self.differing or self.only_in_a or self.only_in_b)

    @property
    def names(self) -> list[str]:
        """All arrays that differ."""
        return [*self.differing, *self.only_in_a, *self.only_in_b]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first step of one kind of difference."""

    kind: Kind
    step: int
    of_a: float | str | None = None
    """The loss, or the digest of the windows; None for arrays."""
    of_b: float | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDifference:
    """The comparison of what two runs have recorded."""

    settings: dict[str, list[Any]]
    """Options, data, hardware and versions that differ, with the values of A and B."""

    last_steps: tuple[int, int]
    """The last step of which A and B have recorded anything."""

    num_losses: int
    """Steps of which both have the loss."""

    num_windows: int
    """Records in which both have the windows."""

    same_checkpoints: list[int]
    """Steps of the checkpoints that both have and that are equal, up to the first one that differs."""

    first: dict[Kind, FirstDifference]
    """The first difference of each kind, where there is one."""

    checkpoint: CheckpointDifference | None
    """The first checkpoint that both have and that differs."""

    through: int
    """The last step of which both have recorded something that was compared."""

    @property
    def earliest(self) -> FirstDifference | None:
        """The difference at the first step; at equal steps, the cause before the effect."""
        kinds: tuple[Kind, ...] = ("windows", "loss", "arrays")
        found = [self.first[kind] for kind in kinds if kind in self.first]
        return min(found, key=lambda difference: difference.step, default=None)


def compare_runs(a: RecordedRun, b: RecordedRun) -> RunDifference:
    """Compare the windows, the losses and the checkpoints of two runs, at each step that both have recorded.

    A step without a known loss in one of the runs, such as a step before the start of a fork, is not compared.

    Raises:
        UsageError: the description in a checkpoint that both have is damaged.
        DamagedCheckpointError: a checkpoint that both have cannot be read.
    """
    first: dict[Kind, FirstDifference] = {}
    records = sorted(step for step in a.records.keys() & b.records.keys() if _has_windows(a, b, step))
    for step in records:
        of_a, of_b = a.records[step]["windows"], b.records[step]["windows"]
        if of_a != of_b:
            first["windows"] = FirstDifference(kind="windows", step=step, of_a=of_a, of_b=of_b)
            break
    num_losses = min(len(a.losses), len(b.losses))
    losses_a, losses_b = a.losses[:num_losses], b.losses[:num_losses]
    is_known = ~(np.isnan(losses_a) | np.isnan(losses_b))
    differing = np.flatnonzero(is_known & (losses_a != losses_b))
    if len(differing):
        index = int(differing[0])
        of_a, of_b = losses_a[index].item(), losses_b[index].item()
        first["loss"] = FirstDifference(kind="loss", step=index + 1, of_a=of_a, of_b=of_b)
    same: list[int] = []
    checkpoint = None
    for step in sorted({*a.checkpoint_steps} & {*b.checkpoint_steps}):
        try:
            found = compare_checkpoints(a.read_checkpoint(step), b.read_checkpoint(step))
        except DeletedCheckpointError:  # by a run that trains
            continue
        if not found.same:
            checkpoint, first["arrays"] = found, FirstDifference(kind="arrays", step=step)
            break
        same.append(step)
    known = np.flatnonzero(is_known)
    return RunDifference(
        settings=differing_settings(a, b),
        last_steps=(a.last_step, b.last_step),
        num_losses=len(known),
        num_windows=len(records),
        same_checkpoints=same,
        first=first,
        checkpoint=checkpoint,
        through=max([0, *records[-1:], *(known[-1:] + 1).tolist(), *same[-1:]]),
    )


def _has_windows(a: RecordedRun, b: RecordedRun, step: int) -> bool:
    return "windows" in a.records[step] and "windows" in b.records[step]


def compare_checkpoints(a: RecordedCheckpoint, b: RecordedCheckpoint) -> CheckpointDifference:
    """Compare the digests of the arrays of two checkpoints."""
    return CheckpointDifference(
        steps=(a.step, b.step),
        num_arrays=len(a.tensors.keys() | b.tensors.keys()),
        differing=[name for name in a.tensors if name in b.tensors and a.tensors[name] != b.tensors[name]],
        only_in_a=[name for name in a.tensors if name not in b.tensors],
        only_in_b=[name for name in b.tensors if name not in a.tensors],
    )


def differing_settings(a: RecordedRun, b: RecordedRun) -> dict[str, list[Any]]:
    """Return what may explain a difference of two runs: options, tokens, hardware and versions, with both values."""
    found = differing_options([a.description.config, b.description.config])
    values = [_surroundings(run) for run in (a, b)]
    names = dict.fromkeys([*values[0], *values[1]])
    columns = {name: [of_run.get(name) for of_run in values] for name in names}
    return found | {name: column for name, column in columns.items() if column[0] != column[1]}


def _surroundings(run: RecordedRun) -> dict[str, Any]:
    description, start = run.description, run.starts[-1] if run.starts else {}
    options = option_values(description.config)
    return {
        **{name: options[name] for name in _OF_ROUNDING},
        **_data(description),
        "hardware": description.hardware,
        **{name: start[name] for name in ("device", "devices", "processor", "workers") if name in start},
        "commit": description.commit,
        **description.versions,
    }


def _data(description: RunDescription) -> dict[str, Any]:
    data = description.data
    found = {
        **data.fingerprint,
        "tokenizer": data.tokenizer_kind,
        "window_order_version": data.window_order_version,
    }
    return flatten({"data": found})
