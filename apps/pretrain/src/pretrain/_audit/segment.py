"""The steps of a run to compute again, and the checkpoint before them."""

from dataclasses import dataclass

from pretrain._audit.recorded_run import RecordedRun
from pretrain._errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive steps of a run."""

    start: int
    """Step of the state to start from: the steps after it are computed."""

    first: int
    """Step after which the steps are compared, at least `start`."""

    stop: int
    """The last step."""

    has_checkpoint: bool
    """True if a checkpoint holds the state of `start`; False for the random parameters of step 0."""

    checkpoint_steps: tuple[int, ...]
    """Checkpoints of the run from `first` to `stop`."""

    record_steps: tuple[int, ...]
    """Steps after `start` of which the run has a record, up to `stop`."""


def find_segment(run: RecordedRun, first: int | None, stop: int | None) -> Segment:
    """Return the steps of a run after `first`, up to `stop`.

    Args:
        run: the run.
        first: a step from 0 on; None for the oldest checkpoint before `stop`, or if there is none, for step 0.
        stop: a later step that the run has recorded; None for the newest checkpoint.

    Raises:
        UsageError: the steps are out of order or not recorded, or the run has no state before them.
    """
    saved = list(run.checkpoint_steps)
    is_random = run.description.origin is None
    if not run.last_step:
        raise UsageError(f"{run.folder} has recorded no step yet. Continue its training.")
    if stop is None:
        if not saved:
            raise UsageError(f"{run.folder} has no checkpoint yet. Continue its training, or give --to STEP.")
        stop = saved[-1]
    if not 1 <= stop <= run.last_step:
        raise UsageError(f"--to must be from 1 to {run.last_step}, the last step of the run, got {stop}.")
    if first is None:
        before = [step for step in saved if step < stop]
        first = before[0] if before else 0
        if not before and not is_random:
            raise _without_start(run, stop)
    if not 0 <= first < stop:
        raise UsageError(f"--from must be from 0 to {stop - 1}, below the last step to replay, got {first}.")
    before = [step for step in saved if step <= first]
    if not before and not is_random:
        raise _without_start(run, first + 1)
    start = before[-1] if before else 0
    return Segment(
        start=start,
        first=first,
        stop=stop,
        has_checkpoint=bool(before),
        checkpoint_steps=tuple(step for step in saved if first <= step <= stop),
        record_steps=tuple(sorted(step for step in run.records if start < step <= stop)),
    )


def _without_start(run: RecordedRun, step: int) -> UsageError:
    steps = ", ".join(map(str, run.checkpoint_steps)) or "none"
    return UsageError(
        f"{run.folder} must have a checkpoint before step {step}, got {steps}. Give a later step; a run with "
        "--train.keep-every N keeps every N-th checkpoint."
    )
