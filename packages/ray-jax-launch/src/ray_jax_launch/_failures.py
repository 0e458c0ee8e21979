"""Failures of workers: how they are raised, and how they are read in Ray Train's controller."""

import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ray.train import Checkpoint, UserCallback

from ray_jax_launch._board import BoardHandle, Metrics

# Exceptions of jax: a collective that timed out, a device that is busy. Known by name, as jax is not imported here.
_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")


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

    Where one died, others may have raised because of it: out of a collective, for instance.
    """
    rank = min(failures, key=lambda rank: (has_raised(failures[rank]), rank))
    notes = getattr(failures[rank], "__notes__", [str(failures[rank])])
    return rank, notes[-1].strip()


def in_a_line(rank: int, failure: Exception) -> str:
    """A worker's failure as the log has it."""
    if not has_raised(failure):
        return f"worker {rank} died, or no longer answers"
    return f"worker {rank} failed: {traceback.format_exception_only(failure)[0].splitlines()[0]}"


def may_pass(failure: Exception) -> bool:
    """Whether an exception may come from the machines and not from the program: storage, memory, a network."""
    return isinstance(failure, OSError | MemoryError) or any(
        cls.__name__ in _JAX_ERRORS for cls in type(failure).__mro__
    )


class ForwardReports(UserCallback):
    """Runs in Ray Train's controller, which drops metrics without a checkpoint."""

    def __init__(self, board: BoardHandle) -> None:
        self._board = board

    def after_report(self, run_context: Any, metrics: list[Metrics], checkpoint: Checkpoint | None) -> None:
        """Pass on what rank 0 reported."""
        self._board.report.remote(metrics[0])
