"""Turns of the workers to call the control actor, which serves a group of any size. Imports nothing of Ray."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

Purpose = Literal["poller", "heartbeat"]

# All ranks together call this often for stop requests, and as often for the watchdog.
_CALLS_PER_S = 20
# `wait` looks at what this process alone knows.
_LOOK_EVERY_S = 0.5


def seconds_between(size: int, least_s: float) -> float:
    """Return the seconds between the regular calls of one rank, at least `least_s`, in a group of `size` ranks."""
    return max(least_s, size / _CALLS_PER_S)


class Turns:
    """The times at which a rank calls, spread so that the ranks of a group call one after another.

    Args:
        rank: the rank, from 0.
        size: the number of ranks.
        least_s: least seconds between regular calls. A group of more than `20 * least_s` ranks calls less often.
    """

    def __init__(self, rank: int, size: int, least_s: float) -> None:
        self._every_s = seconds_between(size, least_s)
        self._round_s = size / _CALLS_PER_S
        # The place of this rank in a round in which each rank has one.
        self._first_s = time.monotonic() + self._round_s * (rank + 1) / size
        self._due_s = self._first_s
        self._changed = threading.Condition()
        self._early_s = math.inf

    def call_now(self) -> None:
        """End `wait` now."""
        self._call_at(-math.inf)

    def call_soon(self) -> None:
        """End `wait` at this rank's next place among the others: for changes that may be frequent."""
        self._call_at(self._place(time.monotonic(), self._round_s))

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Wait for the next call.

        Args:
            until: ends the wait within half a second once it returns True.
        """
        with self._changed:
            while until is None or not until():
                left_s = min(self._due_s, self._early_s) - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s if until is None else min(left_s, _LOOK_EVERY_S))
            self._early_s = math.inf
            if self._due_s <= time.monotonic():
                self._due_s = self._place(time.monotonic(), self._every_s)

    def _call_at(self, time_s: float) -> None:
        with self._changed:
            self._early_s = min(self._early_s, time_s)
            self._changed.notify()

    def _place(self, after_s: float, every_s: float) -> float:
        """Return this rank's first place after a time."""
        return self._first_s + every_s * (math.floor((after_s - self._first_s) / every_s) + 1)


_of_process: dict[Purpose, Turns] = {}


def turns_of_process(purpose: Purpose, rank: int, size: int, least_s: float) -> Turns:
    """Return new turns of this process, which `call_process` reaches.

    Args:
        purpose: what calls: the poller of stop requests, or the heartbeat.
        rank: see `Turns`.
        size: see `Turns`.
        least_s: see `Turns`.
    """
    _of_process[purpose] = turns = Turns(rank, size, least_s)
    return turns


def call_process(_worker: Any, purpose: Purpose) -> None:
    """Let this process call now. The control actor runs this in the process of a worker, to ask for an answer."""
    if purpose in _of_process:
        _of_process[purpose].call_now()
