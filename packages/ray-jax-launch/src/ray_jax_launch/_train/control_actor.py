"""The actor between the driver and the workers of a launch, which nobody waits for. Its process imports little."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Metrics = dict[str, Any]
BoardHandle = Any
"""Handle of a `Board` actor, whose `.remote` methods Ray adds where type checkers do not see them."""

StopReason = Literal["interrupt", "preemption"]

# Metrics that a driver has not fetched yet. Where none fetches, the oldest go.
_MAX_UNREAD = 10_000


@dataclass
class _Group:
    """The workers of one start."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reason: StopReason | None = None
    listening: set[int] = field(default_factory=set)
    answers: dict[int, int] = field(default_factory=dict)
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)
    left: set[int] = field(default_factory=set)
    all_left: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _InOrder:
    """What a worker posts, in its order: calls of an actor that can wait in one overtake each other."""

    num_taken: int = 0
    early: dict[int, Metrics] = field(default_factory=dict)

    def take(self, number: int, metrics: Metrics) -> Iterator[Metrics]:
        """Note the metrics, and yield all that are next in the order."""
        self.early[number] = metrics
        while self.num_taken in self.early:
            yield self.early.pop(self.num_taken)
            self.num_taken += 1


class Board:
    """Metrics on their way to the driver, and the wish to stop on its way to the workers."""

    def __init__(self) -> None:
        self._unread: deque[tuple[int, Metrics]] = deque(maxlen=_MAX_UNREAD)
        self._posts: dict[str, _InOrder] = {}
        self._lines: list[str] = []
        self._latest: Metrics = {}
        self._groups: dict[str, _Group] = {}
        self._interrupted = False
        self._obeyed = False
        self._finished: tuple[Any] | None = None

    async def post(self, worker: str, number: int, rank: int, metrics: Metrics) -> None:
        """Take in what a worker logged as its `number`-th metrics, from 0."""
        for logged in self._posts.setdefault(worker, _InOrder()).take(number, metrics):
            self._unread.append((rank, logged))
            if rank == 0:
                self._latest |= logged

    async def report(self, metrics: Metrics) -> None:
        """Take in what rank 0 reported to Ray Train."""
        self._latest |= metrics

    async def tell(self, line: str) -> None:
        """Take in a line for the user: why the group failed, and what happens next."""
        self._lines.append(line)

    async def collect(self) -> tuple[list[tuple[int, Metrics]], list[str]]:
        """What was logged since this was last called, with the ranks, and the lines for the user meanwhile."""
        collected = list(self._unread), list(self._lines)
        self._unread.clear()
        self._lines.clear()
        return collected

    async def latest(self) -> Metrics:
        """Of each metric, the last value that rank 0 reported or logged."""
        return self._latest

    async def interrupt(self) -> bool:
        """Ask the workers to stop. Returns whether they listen."""
        self._interrupted = True
        for group in self._groups.values():
            _ask(group, "interrupt")
        return any(group.listening for group in self._groups.values())

    async def preempt(self, group: str) -> None:
        """Ask the workers of a group to stop, as a node of theirs will be taken away."""
        _ask(self._groups[group], "preemption")

    async def wait_for_stop(self, group: str, rank: int) -> StopReason:
        """Return once this group is asked to stop."""
        if group not in self._groups:
            self._groups = {group: _Group()}  # earlier ones are gone
        entry = self._groups[group]
        entry.listening.add(rank)
        if self._interrupted:
            _ask(entry, "interrupt")
        await entry.stop.wait()
        assert entry.reason is not None, "set with the event"
        return entry.reason

    async def agree(self, group: str, size: int, rank: int, step: int) -> int:
        """Return the latest of the steps that all workers of the group name."""
        entry = self._groups[group]
        entry.answers[rank] = step
        if len(entry.answers) == size:
            entry.all_answered.set()
        await entry.all_answered.wait()
        return max(entry.answers.values())

    async def leave(self, group: str, size: int, rank: int) -> None:
        """Return once all workers of the group have called this: until then one may still be saving."""
        entry = self._groups[group]
        entry.left.add(rank)
        if len(entry.left) == size:
            entry.all_left.set()
        await entry.all_left.wait()

    async def obey(self) -> None:
        """Note that the loop ended because of an interrupt."""
        self._obeyed = True

    async def finish(self, return_value: Any) -> None:
        """Note that the loop has done all that matters, and what it returns if it fails from here on."""
        self._finished = (return_value,)

    async def is_finished(self) -> bool:
        """Whether the loop has done all that matters."""
        return self._finished is not None

    async def finished(self) -> tuple[Any] | None:
        """What the loop returns if it failed after it had done all that matters; None if it has not."""
        return self._finished

    async def obeyed(self) -> bool:
        """Whether the loop ended because of an interrupt."""
        return self._obeyed


def _ask(group: _Group, reason: StopReason) -> None:
    if group.reason is None:
        group.reason = reason
        group.stop.set()


def start_board() -> BoardHandle:
    """Start the actor on this node. It lives as long as its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here).remote()
