"""How the failure of a worker becomes something to read."""

import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ray.train import Checkpoint, UserCallback

from ray_jax_launch._board import BoardHandle, Metrics


def note_traceback(
    exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
) -> None:
    """Have an exception that leaves a worker take its traceback along, which is lost on the way otherwise."""
    if exc is not None:
        exc.add_note("".join(traceback.format_exception(exc)))


def first_failure(failures: Mapping[int, Exception]) -> tuple[int, str]:
    """The rank to blame for a failure of the group, and its traceback; of a worker that died, what Ray knows of it.

    Where one died, others may have raised because of it: out of a collective, for instance.
    """
    rank = min(failures, key=lambda rank: (_has_raised(failures[rank]), rank))
    return rank, ("".join(getattr(failures[rank], "__notes__", [])) or str(failures[rank])).strip()


def _has_raised(failure: Exception) -> bool:
    return hasattr(failure, "__notes__")


class TellBoard(UserCallback):
    """Runs in Ray Train's controller, which keeps failures to itself, and drops metrics without a checkpoint."""

    def __init__(self, board: BoardHandle) -> None:
        self._board = board

    def after_report(self, run_context: Any, metrics: list[Metrics], checkpoint: Checkpoint | None) -> None:
        """Pass on what rank 0 reported."""
        self._board.report.remote(metrics[0])

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Pass on who failed, and why in a line."""
        rank, details = first_failure(worker_exceptions)
        raised = _has_raised(worker_exceptions[rank])
        why = f"failed: {details.splitlines()[-1]}" if raised else "died, or no longer answers"
        self._board.fail.remote(f"worker {rank} {why}")
