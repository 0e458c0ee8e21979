"""Failures of workers: how they are raised, and how they are read in Ray Train's controller."""

import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.exceptions import RayActorError
from ray.train import Checkpoint, UserCallback

from ray_jax_launch._errors import (
    DamagedCheckpointError,
    LaunchError,
    OutOfMemoryError,
    PermanentError,
    TrainingFailed,
)
from ray_jax_launch._train.control_actor import BoardHandle, Metrics

# Exceptions of jax: a collective that timed out, a device that is busy. Known by name, as jax is not imported here.
_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
# The status of jax's errors for memory, of a device or of the host, that cannot be allocated.
_NO_MEMORY = "RESOURCE_EXHAUSTED"


class Preempted(Exception):
    """Raised in a worker whose loop has saved and returned because a node is preempted."""


def note_traceback(
    exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
) -> None:
    """Have an exception that leaves a worker take its traceback along, which is lost on the way otherwise."""
    if exc is not None:
        exc.add_note("".join(traceback.format_exception(exc)))


def has_raised(failure: Exception) -> bool:
    """Whether a worker's failure is an exception of its loop, and not the death of its process."""
    return hasattr(failure, "__notes__")


def first_failure(failures: Mapping[int, Exception]) -> tuple[int, str]:
    """The rank to blame for a failure of the group, and its traceback; of a worker that died, what Ray knows of it.

    Where one had no memory left, or died, others may have failed because of it: in a collective, for instance.
    """
    rank = min(failures, key=lambda rank: (_shortage(failures[rank]) is None, has_raised(failures[rank]), rank))
    notes = getattr(failures[rank], "__notes__", [str(failures[rank])])
    return rank, notes[-1].strip()


def in_a_line(rank: int, failure: Exception) -> str:
    """A worker's failure as the log has it."""
    if not has_raised(failure):
        return f"worker {rank} died, or no longer answers"
    return f"worker {rank} failed: {traceback.format_exception_only(failure)[0].splitlines()[0]}"


def is_permanent(failure: Exception) -> bool:
    """Whether the same failure would follow a restart: an error of that kind, or memory that cannot be allocated.

    Ray's memory monitor kills a worker for what others on its node take, too. That may pass.
    """
    return isinstance(failure, LaunchError | DamagedCheckpointError | PermanentError) or (
        has_raised(failure) and _shortage(failure) is not None
    )


def is_preemption(failure: Exception) -> bool:
    """Return whether a worker stopped, or died, because its node was preempted."""
    cause = _cause(failure)
    return isinstance(cause, Preempted) or (isinstance(cause, RayActorError) and cause.preempted)


def identity(failure: Exception, details: str) -> str | None:
    """What a failure has in common with another that has the same cause; None if the machines may be its cause.

    Args:
        failure: of a worker.
        details: see `first_failure`.
    """
    if _shortage(failure) is not None:
        return RayOutOfMemoryError.__name__
    from_machines = not has_raised(failure) or isinstance(failure, OSError) or _is_of_jax(failure)
    return None if from_machines else details


def to_raise(failures: Mapping[int, Exception], hardware: object, log_folder: str) -> Exception:
    """What `launch` raises for the failure of a group that does not start again.

    Args:
        failures: by rank.
        hardware: what the group ran on, for the message.
        log_folder: where Ray's logs are.
    """
    rank, details = first_failure(failures)
    failure = failures[rank]
    if isinstance(failure, LaunchError | DamagedCheckpointError):
        # Its traceback, in the worker, says nothing to the user.
        return (LaunchError if isinstance(failure, LaunchError) else DamagedCheckpointError)(str(failure))
    shortage = _shortage(failure)
    if shortage is not None:
        error: Exception = OutOfMemoryError(
            f"the training loop must fit in the memory of worker {rank}, got {shortage}. Use a smaller batch or model, "
            "more gradient accumulation parts, or more devices to share it"
        )
    else:
        error = TrainingFailed(f"worker {rank} of {hardware} failed", rank, details, log_folder)
    error.add_note(details)
    return error


def _shortage(failure: Exception) -> str | None:
    """What could not be allocated, in a line, if a worker failed for want of memory; else None."""
    cause = _cause(failure)
    if isinstance(cause, MemoryError | RayOutOfMemoryError) or (_is_of_jax(cause) and _NO_MEMORY in str(cause)):
        return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
    return None


def _cause(failure: Exception) -> Exception:
    """Return the error of Ray that Ray Train wraps when a worker dies; else the failure itself."""
    return getattr(failure, "health_check_failure", failure)


def _is_of_jax(failure: Exception) -> bool:
    return any(cls.__name__ in _JAX_ERRORS for cls in type(failure).__mro__)


class ForwardReports(UserCallback):
    """Runs in Ray Train's controller, which drops metrics without a checkpoint."""

    def __init__(self, board: BoardHandle) -> None:
        self._board = board

    def after_report(self, run_context: Any, metrics: list[Metrics], checkpoint: Checkpoint | None) -> None:
        """Pass on what rank 0 reported."""
        self._board.report.remote(metrics[0])
