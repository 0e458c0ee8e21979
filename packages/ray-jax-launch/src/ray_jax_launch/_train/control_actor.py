"""The control actor: carries stop requests to the workers of a launch, and their metrics and log lines to the driver.

Workers and driver poll it, and no call waits in it. Ray runs the calls of one process in their order, as the actor has
one thread: each rank's metrics stay in order. Its process imports little.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Metrics = dict[str, Any]
ControlHandle = Any
"""Handle of a `ControlActor`. Ray adds its `.remote` methods where type checkers do not see them."""

StopReason = Literal["interrupt", "preemption"]

# Metrics that the driver has not collected yet. If it never collects, the oldest are dropped.
_MAX_UNREAD = 10_000


@dataclass
class _Group:
    """The workers of one start, and how far they have agreed to stop."""

    reason: StopReason | None = None
    next_steps: dict[int, int] = field(default_factory=dict)
    """By rank, the first step that it has not passed."""


class ControlActor:
    """Actor of a launch, on the driver's node: carries stop requests, metrics and log lines."""

    def __init__(self) -> None:
        self._unread: deque[tuple[int, Metrics]] = deque(maxlen=_MAX_UNREAD)
        self._lines: list[str] = []
        self._latest: Metrics = {}
        self._groups: dict[str, _Group] = {}
        self._interrupted = False
        self._acknowledged = False
        self._finished: tuple[Any] | None = None

    def record(self, rank: int, metrics: Metrics) -> None:
        """Add metrics that a worker logged."""
        self._unread.append((rank, metrics))
        if rank == 0:
            self._latest |= metrics

    def report(self, metrics: Metrics) -> None:
        """Add metrics that rank 0 reported to Ray Train."""
        self._latest |= metrics

    def log(self, line: str) -> None:
        """Add a line that the driver logs as a warning."""
        self._lines.append(line)

    def collect(self) -> tuple[list[tuple[int, Metrics]], list[str]]:
        """Return, and forget, the metrics by rank and the lines that have come since the last call."""
        collected = list(self._unread), list(self._lines)
        self._unread.clear()
        self._lines.clear()
        return collected

    def latest(self) -> Metrics:
        """Return the last value of each metric that rank 0 logged or reported."""
        return self._latest

    def interrupt(self) -> bool:
        """Request a stop of this group of workers and of later ones. Return whether any worker polls."""
        self._interrupted = True
        return bool(self._groups)

    def poll(
        self, group: str, size: int, rank: int, *, is_preempted: bool, next_step: int | None
    ) -> tuple[StopReason | None, int | None]:
        """Return the reason of a stop request, and the step to stop at; None for what is not known yet.

        Args:
            group: the start of the workers that the caller belongs to.
            size: the number of workers in the group.
            rank: the caller's.
            is_preempted: a node of the group is about to be preempted.
            next_step: the first step that the caller has not passed and will not pass until it knows the step to stop
                at; None before it knows of a stop request. All ranks stop at the latest of these steps.
        """
        entry = self._groups.setdefault(group, _Group())
        if entry.reason is None and (self._interrupted or is_preempted):
            entry.reason = "interrupt" if self._interrupted else "preemption"
        if next_step is not None:
            entry.next_steps[rank] = next_step
        return entry.reason, max(entry.next_steps.values()) if len(entry.next_steps) == size else None

    def acknowledge(self) -> None:
        """Note that the loop returned because of an interrupt."""
        self._acknowledged = True

    def acknowledged(self) -> bool:
        """Return whether the loop returned because of an interrupt."""
        return self._acknowledged

    def finish(self, return_value: Any) -> None:
        """Note that the work is done and saved, and the result of the launch if the loop fails after this."""
        self._finished = (return_value,)

    def finished(self) -> tuple[Any] | None:
        """Return the value that `finish` was given, or None before that."""
        return self._finished


def start_control_actor() -> ControlHandle:
    """Start the actor on this node. It lives as long as its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(ControlActor).options(num_cpus=0, scheduling_strategy=here).remote()
