"""Steps of a run, computed again from one of its checkpoints. No file is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from nnx_gpt2 import TrainState, put_batch
from pretrain._audit.segment import Segment
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._run.metrics import Record
from pretrain._surroundings.processor import processor_name
from pretrain._training.load_state import digests_of, items, restore, start_state
from pretrain._training.setup import Setup, set_up
from pretrain._training.step_meter import StepMeter
from pretrain._training.train_batches import train_batches
from ray_jax_launch import Checkpoints, log_metrics, stop_requested

# Steps between two reports of the progress.
_REPORT_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedSteps:
    """Steps computed again: the values that the run should have recorded."""

    losses: list[float]
    """The loss of each step after the start, nats per token; NaN for a step that made no update."""

    records: Mapping[int, Record]
    """Metrics of the steps that the run has recorded."""

    digests: Mapping[int, Mapping[str, Any]]
    """Digests of the state by the step of a checkpoint: see `pretrain._run.checkpoint_digests.DIGESTS`."""

    workers: int
    devices: int
    device: str
    """Processes, devices of all of them, and the name of a device."""

    processor: str | None
    """Name of the processor of rank 0."""


def recompute(resolved: ResolvedRun, segment: Segment) -> RecomputedSteps | None:
    """Compute the steps of a segment again. A collective: every worker of a launch must call it.

    Args:
        resolved: the run.
        segment: the steps.

    Returns:
        The steps; None after a stop request.

    Raises:
        DeletedCheckpointError: the run deleted the checkpoint at the start of the segment.
        DamagedCheckpointError: it is damaged.
        LaunchError: the model does not fit the devices, or the tokens or the storage cannot be read.
    """
    config = resolved.config
    setup = set_up(config, resolved.data)
    meter = StepMeter(config, resolved.data.train, setup.device, setup.mesh.size)
    state, metadata = _load(resolved, segment, setup)
    meter.restore(metadata["unrecorded"])
    losses: list[float] = []
    records: dict[int, Record] = {}
    digests = {segment.start: digests_of(items(state))} if segment.has_checkpoint else {}
    batches = train_batches(config, resolved.data, segment.start, uses_ray_data=False)
    for step in range(segment.start + 1, segment.stop + 1):
        state, metrics = setup.train_step(state, put_batch(next(batches), setup.mesh), setup.key)
        meter.add(metrics)
        if step in segment.record_steps:
            records[step] = meter.wait_for_record(step)
        if step in segment.checkpoint_steps:
            digests[step] = digests_of(items(state))
        if step % _REPORT_EVERY == 0 or step == segment.stop:
            meter.wait_for_unrecorded()
            losses += meter.take_losses()
            log_metrics({"step": step})
        if stop_requested(step):
            return None
    return RecomputedSteps(
        losses=losses,
        records=records,
        digests=digests,
        workers=jax.process_count(),
        devices=setup.mesh.size,
        device=setup.device.device_kind,
        processor=processor_name(),
    )


def _load(resolved: ResolvedRun, segment: Segment, setup: Setup) -> tuple[TrainState, dict[str, Any]]:
    """Return the state at the start of a segment, and its metadata."""
    if not segment.has_checkpoint:
        return start_state(resolved.description.origin, setup)
    with Checkpoints(resolved.folder.checkpoints, read_only=True) as checkpoints:
        return restore(checkpoints, segment.start, setup.like)
