"""Failures of workers: raised in a worker, classified in Ray Train's controller, raised again by `launch`."""

import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.exceptions import RayActorError
from ray.train import Checkpoint, TrainingFailedError, UserCallback

from ray_jax_launch._control.control_actor import ControlHandle, Metrics
from ray_jax_launch._errors import (
    DamagedCheckpointError,
    LaunchError,
    MismatchedCheckpointError,
    OutOfMemoryError,
    PermanentError,
    StopRequestedError,
    StorageFullError,
    TrainingFailed,
)

# Exceptions of jax, such as a collective that timed out. Compared by name, as this file does not import jax.
_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
# Status of jax's errors when memory of a device or of the host cannot be allocated.
_NO_MEMORY = "RESOURCE_EXHAUSTED"
# Errors whose message tells everything, a class after those that are derived from it.
_SENTENCES = (
    OutOfMemoryError,
    MismatchedCheckpointError,
    LaunchError,
    DamagedCheckpointError,
    StorageFullError,
    StopRequestedError,
)


class WorkersFailed(TrainingFailed, TrainingFailedError):
    """`TrainingFailed`, which is also Ray's `TrainingFailedError`: a script may catch either."""


class Preempted(Exception):
    """Raised in a worker after its loop has saved and returned because a node is preempted."""


class Resized(Exception):
    """Raised in a worker after its loop has saved and returned because the group gets another number of workers."""


def note_traceback(
    exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
) -> None:
    """Add its traceback to an exception that leaves a worker. Pickling would lose it."""
    if exc is not None:
        exc.add_note("".join(traceback.format_exception(exc)))


def has_raised(failure: Exception) -> bool:
    """Return whether a worker's failure is an exception of its loop. If not, its process died."""
    return hasattr(failure, "__notes__")


def first_failure(failures: Mapping[int, Exception]) -> tuple[int, str]:
    """Return the rank that caused the failure of a group, and its traceback (Ray's message if the worker died).

    A worker that had no memory left comes first, then a worker that died: their collectives make other workers fail.
    """
    rank = min(failures, key=lambda rank: (_shortage(failures[rank]) is None, has_raised(failures[rank]), rank))
    notes = getattr(failures[rank], "__notes__", [str(failures[rank])])
    return rank, notes[-1].strip()


def in_a_line(rank: int, failure: Exception) -> str:
    """Return a worker's failure as one line for the log."""
    if not has_raised(failure):
        return f"worker {rank} died, or no longer answers"
    return f"worker {rank} failed: {traceback.format_exception_only(failure)[0].splitlines()[0]}"


def is_permanent(failure: Exception) -> bool:
    """Return whether a restart would end in the same failure: a permanent error, or memory that cannot be allocated.

    A kill by Ray's memory monitor is not permanent: other processes on the node may have used the memory.
    """
    return isinstance(failure, LaunchError | DamagedCheckpointError | PermanentError) or (
        has_raised(failure) and _shortage(failure) is not None
    )


def is_preemption(failure: Exception) -> bool:
    """Return whether a worker stopped, or died, because its node was preempted."""
    cause = _cause(failure)
    return isinstance(cause, Preempted) or (isinstance(cause, RayActorError) and cause.preempted)


def is_resize(failure: Exception) -> bool:
    """Return whether a worker has stopped for another number of workers."""
    return isinstance(_cause(failure), Resized)


def fingerprint(failure: Exception, details: str) -> str | None:
    """Return a text that is equal for failures of the same cause; None if a machine may be the cause.

    Args:
        failure: a worker's.
        details: see `first_failure`.
    """
    if _shortage(failure) is not None:
        return RayOutOfMemoryError.__name__
    from_machines = not has_raised(failure) or isinstance(failure, OSError) or _is_of_jax(failure)
    return None if from_machines else details


def to_raise(failures: Mapping[int, Exception], hardware: object, log_folder: str) -> Exception:
    """Return the exception that `launch` raises when a group failed and does not start again.

    Args:
        failures: by rank.
        hardware: the group's, for the message.
        log_folder: the folder of Ray's logs.
    """
    rank, details = first_failure(failures)
    failure = failures[rank]
    for cls in _SENTENCES:
        if isinstance(failure, cls):
            return cls(str(failure))  # its traceback in the worker does not help the user
    shortage = _shortage(failure)
    if shortage is not None:
        error: Exception = OutOfMemoryError(
            f"worker {rank} has too little memory for the training loop: {shortage}. Use a smaller batch or model, "
            "more gradient accumulation steps, or more devices to shard it."
        )
    else:
        error = WorkersFailed(f"worker {rank} of {hardware} failed", rank, details, log_folder)
    error.add_note(details)
    return error


def _shortage(failure: Exception) -> str | None:
    """Return one line on the memory that could not be allocated; None for other failures."""
    cause = _cause(failure)
    if isinstance(cause, MemoryError | RayOutOfMemoryError) or (_is_of_jax(cause) and _NO_MEMORY in str(cause)):
        return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
    return None


def _cause(failure: Exception) -> Exception:
    """Return Ray's error if Ray Train has wrapped it, as it does when a worker dies; else the failure."""
    return getattr(failure, "health_check_failure", failure)


def _is_of_jax(failure: Exception) -> bool:
    return any(cls.__name__ in _JAX_ERRORS for cls in type(failure).__mro__)


class ForwardReports(UserCallback):
    """Forwards reported metrics from Ray Train's controller, which drops metrics without a checkpoint."""

    def __init__(self, control: ControlHandle) -> None:
        self._control = control

    def after_report(self, run_context: Any, metrics: list[Metrics], checkpoint: Checkpoint | None) -> None:
        """Forward the metrics that rank 0 reported."""
        self._control.report.remote(metrics[0], has_checkpoint=checkpoint is not None)
