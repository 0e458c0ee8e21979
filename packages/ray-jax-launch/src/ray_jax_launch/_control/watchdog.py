"""The watchdog of the control actor: notices that a group of workers computes no step for long, and says why.

It decides from what the workers send (`heartbeat.py`). Its clock adds up the times between the driver's collections,
and at most two seconds for each: the clock stops while the driver or the whole machine is suspended.

A group is watched from the first beats of all its workers, when their loops begin, until Ray Train ends it. Work that
is no step may take any time while all workers answer, unless it must end: a call of `Checkpoints`, and all that comes
after a stop request, after `mark_finished`, or after the return of a worker.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ray_jax_launch._control.turns import seconds_between

# Time between the beats of a worker. In a large group it is longer: see `turns.py`.
BEAT_EVERY_S = 1.0
# A step takes this many times the usual time before it is suspicious: a slow worker makes all others slow.
_MULTIPLE = 20
# While all workers answer, nothing has died: storage or a network may be slow. In work that is no step, only a worker
# that does not answer for as long is suspicious.
_PATIENCE = 5
# While all workers answer, a save or the end of a loop takes at most this long between two signs of life. A slow save
# to object storage takes minutes.
_LONGEST_END_S = 3600.0
_LONGEST_TICK_S = 2.0
# Workers that answer have sent their stacks within this time.
_STACKS_WITHIN_S = 10.0
# Workers in a collective have one stack.
_MOST_STACKS = 4


class Beat(NamedTuple):
    """Progress of the loop of a worker."""

    num_computed: int
    """Steps that are computed."""

    step: int
    """The newest step that is computed."""

    is_training: bool
    """True if it computes steps, and does nothing else such as a validation."""

    usual_s: float
    """Usual seconds of a step."""

    has_ended: bool = False
    """True if it has returned. The worker sends nothing after this."""

    must_end: bool = False
    """True if what it does must end: a call of `Checkpoints`, or the work after the last step."""

    num_calls: int = 0
    """Number of times that the loop has said what it does: signs of life in work that is no step."""

    @property
    def progress(self) -> tuple[int, bool, int]:
        """Values that change with each step and each sign of life."""
        return self.num_computed, self.is_training, self.num_calls


class Hang(NamedTuple):
    """A group that computes no step."""

    lines: list[str]
    """For the log: stacks, and what happened if the workers go on."""

    handles: list[Any]
    """Actors of the workers to kill."""


@dataclass
class _Worker:
    handle: Any
    """Handle of its actor; None for the process of the driver."""

    beat: Beat
    progress_s: float
    """Time of its last step or its last sign of life."""

    answered_s: float
    stack: str | None = None
    is_in_debugger: bool = False


class Watchdog:
    """Watches the newest group of workers.

    Args:
        timeout_s: seconds without a step after which a group hangs, if a worker does not answer. While all workers
            answer, and in work that is no step, it is five times as long; in any case at least 20 times the usual time
            of a step. In work that is no step, only a worker that does not answer hangs; if the work must end, an hour
            without a sign of life is a hang too, or five times this time if that is longer. In a large group it is
            longer by the time between two beats of a worker. None never.
        clock: returns seconds.
    """

    def __init__(self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_s = clock()
        self._now_s = 0.0
        self._group: str | None = None
        self._size = 0
        self._workers: dict[int, _Worker] = {}
        self._ended: set[str] = set()
        self._asked_s: float | None = None
        self._has_asked = False
        self._has_told = False
        self._cause = ""

    def beat(self, group: str, size: int, rank: int, beat: Beat, handle: Any) -> bool:
        """Note how far a worker is. Return whether it should send its stack."""
        if group in self._ended:
            return False
        if group != self._group:
            self.end_group()
            self._group, self._size = group, size
        worker = self._workers.setdefault(rank, _Worker(handle, beat, self._now_s, self._now_s))
        if beat.progress != worker.beat.progress:
            worker.progress_s = self._now_s
        worker.beat, worker.answered_s = beat, self._now_s
        return self._asked_s is not None and worker.stack is None

    def add_stack(self, group: str, rank: int, stack: str, *, is_in_debugger: bool) -> None:
        """Note the stack of a worker's loop."""
        if group == self._group and rank in self._workers:
            self._workers[rank].stack, self._workers[rank].is_in_debugger = stack, is_in_debugger

    def end_group(self) -> str:
        """Forget the group, which has ended. Return why it was killed; an empty text if it was not."""
        cause, self._cause = self._cause, ""
        if self._group is not None and self._workers:
            self._ended.add(self._group)
        self._workers = {}
        self._calm_down()
        return cause

    def look(self) -> Hang | None:
        """Return a hang, once, after the workers had time to send their stacks. Call this at each collection."""
        now_s = self._clock()
        self._now_s += min(now_s - self._looked_s, _LONGEST_TICK_S)
        self._looked_s = now_s
        workers = self._workers
        if self._timeout_s is None or not 0 < len(workers) == self._size:
            self._calm_down()
            return None
        running = {rank: one for rank, one in workers.items() if not one.beat.has_ended}
        # The beats of a large group come less often.
        late_s = seconds_between(self._size, BEAT_EVERY_S) - BEAT_EVERY_S
        answer_s = self._timeout_s + late_s
        silent = [rank for rank, one in running.items() if self._now_s - one.answered_s >= answer_s]
        # The last word of a worker may be older than its state. That of a silent one does not count beside others.
        heard = [one for rank, one in running.items() if rank not in silent] or [*running.values()]
        is_step = len(running) == self._size and all(one.beat.is_training for one in heard)
        long_s = self._timeout_s * _PATIENCE
        if is_step:
            patience_s = self._timeout_s if silent else long_s
        elif any(self._now_s - one.answered_s >= long_s + late_s for one in running.values()):
            patience_s = long_s
        elif any(one.beat.must_end or one.beat.has_ended for one in workers.values()):
            patience_s = max(_LONGEST_END_S, long_s)
        else:
            patience_s = math.inf
        stalled_s = self._now_s - max(one.progress_s for one in workers.values())
        usual_s = max(one.beat.usual_s for one in workers.values())
        if stalled_s < max(patience_s, _MULTIPLE * usual_s):
            self._calm_down()
            return None
        if self._has_told:
            return None
        if self._asked_s is None:
            self._asked_s = self._now_s
        missing = [rank for rank, one in running.items() if one.stack is None]
        if set(missing) - set(silent) and self._now_s - self._asked_s < _STACKS_WITHIN_S:
            return None
        self._has_told = True
        return self._describe(stalled_s, usual_s, sorted(missing))

    def to_ask(self) -> list[Any]:
        """Return the workers that should send their stacks. Call this after `look`: a worker is returned once."""
        if self._asked_s is None or self._has_asked:
            return []
        self._has_asked = True
        return [one.handle for one in self._workers.values() if one.handle is not None]

    def _calm_down(self) -> None:
        self._asked_s, self._has_asked, self._has_told = None, False, False
        for worker in self._workers.values():
            worker.stack, worker.is_in_debugger = None, False

    def _describe(self, stalled_s: float, usual_s: float, missing: Sequence[int]) -> Hang:
        workers = self._workers
        step = max(one.beat.step for one in workers.values())
        what = f"no step for {_seconds(stalled_s)}"
        if step >= 0:
            what += f" after step {step} (usual: {_seconds(usual_s)})"
        debugged = sorted(rank for rank, one in workers.items() if one.is_in_debugger)
        handles = [one.handle for one in workers.values() if one.handle is not None]
        lines = self._stacks()
        if debugged:
            where = f"{_names(debugged)} {'are' if len(debugged) > 1 else 'is'} in a debugger"
            return Hang([f"{what}: {where}; nothing is restarted"], [])
        if not handles:
            return Hang([f"{what}; this process cannot be restarted from outside", *lines], [])
        if missing:
            self._cause = f"{what}: {_names(missing)} {'do' if len(missing) > 1 else 'does'} not answer"
        elif ended := sorted(rank for rank, one in workers.items() if one.beat.has_ended):
            self._cause = f"{what}, although {_names(ended)} {'have' if len(ended) > 1 else 'has'} returned"
        else:
            self._cause = f"{what}, although all workers answer"
        return Hang(lines, handles)

    def _stacks(self) -> list[str]:
        """Return the different stacks, as lines for the log."""
        ranks: dict[str, list[int]] = {}
        for rank, worker in sorted(self._workers.items()):
            if worker.stack is not None:
                ranks.setdefault(worker.stack, []).append(rank)
        stacks = [f"stack of {_names(those)}:\n{stack.rstrip()}" for stack, those in ranks.items()]
        left = len(stacks) - _MOST_STACKS
        return stacks[:_MOST_STACKS] + ([f"{left} other stacks are in the logs of the workers"] if left > 0 else [])


def _seconds(number: float) -> str:
    return f"{number:.0f} s" if number >= 10 else f"{number:.2g} s"


def _names(ranks: Sequence[int]) -> str:
    """Return workers as text.

    >>> _names([1]), _names([0, 1, 5])
    ('worker 1', 'workers 0, 1, 5')
    """
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"worker{'s' if len(ranks) > 1 else ''} {shown}"
