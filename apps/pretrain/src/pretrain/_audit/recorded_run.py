"""A run as its files record it: options, losses, windows, and the digests of its checkpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain._errors import rejecting
from pretrain._run.checkpoint_digests import DIGESTS, TENSORS, roots
from pretrain._run.description import RUN, RunDescription, parse_description
from pretrain._run.find import find_run
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_starts
from pretrain._run.metrics import Record, read_records
from pretrain._run.step_losses import read_step_losses
from ray_jax_launch import checkpoint_metadata, checkpoint_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCheckpoint:
    """A checkpoint without its arrays."""

    step: int
    """Its step."""

    description: RunDescription
    """The run at that time."""

    roots: Mapping[str, str]
    """The digest of all arrays of each item, `params` and `opt_state`."""

    tensors: Mapping[str, str]
    """The SHA-256 of each array by its name, such as `params.wte.embedding`: see `nnx_gpt2.tensor_digests`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as its files record it. Its checkpoints are read on demand."""

    folder: RunFolder
    """The run's folder."""

    description: RunDescription
    """Options, data, hardware and versions."""

    records: Mapping[int, Record]
    """Metrics by their step."""

    losses: NDArray[np.float32]
    """The loss of each step, `float32[N]`; NaN where it is unknown or the step made no update."""

    starts: Sequence[dict[str, Any]]
    """Starts of the workers: see `pretrain._run.history.RunHistory.starts`."""

    checkpoint_steps: Sequence[int]
    """Steps of the checkpoints that exist, in ascending order."""

    @property
    def last_step(self) -> int:
        """The last step of which anything is recorded."""
        return max(len(self.losses), *self.records, *self.checkpoint_steps, 0)

    def read_checkpoint(self, step: int) -> RecordedCheckpoint:
        """Read what a checkpoint tells without its arrays.

        Raises:
            UsageError: its description is damaged.
            DeletedCheckpointError: there is no checkpoint of this step, or it was deleted since the run was read.
            DamagedCheckpointError: it cannot be read.
        """
        return read_checkpoint(self.folder, step)


def read_run(name: str) -> RecordedRun:
    """Read a run from its files.

    Args:
        name: the run's folder or URI, or its name in `runs`.

    Raises:
        UsageError: there is no such run, or a file of it cannot be read.
        LaunchError: the object storage cannot be reached.
    """
    with rejecting():
        folder, description = find_run(name)
        return RecordedRun(
            folder=folder,
            description=description,
            records={record["step"]: record for record in read_records(folder.metrics)},
            losses=read_step_losses(folder.step_losses),
            starts=read_starts(folder),
            checkpoint_steps=checkpoint_steps(folder.checkpoints),
        )


def read_checkpoint(folder: RunFolder, step: int) -> RecordedCheckpoint:
    """Read what a checkpoint of a run tells without its arrays: see `RecordedRun.read_checkpoint`."""
    metadata = checkpoint_metadata(folder.checkpoints, step)
    place = f"the description in checkpoint {step} of {folder}"
    return RecordedCheckpoint(
        step=step,
        description=parse_description(json.dumps(metadata.get(RUN)), place),
        roots=roots(metadata),
        tensors={
            f"{item}.{name}": digest
            for item, tensors in metadata[DIGESTS][TENSORS].items()
            for name, digest in tensors.items()
        },
    )
