"""The control actor: carries stop requests to the workers of a launch, and their metrics and log lines to the driver.

Workers and driver poll it, and no call waits in it. Ray runs the calls of one process in their order, as the actor has
one thread: each rank's metrics stay in order. Its process imports little.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Metrics = dict[str, Any]
ControlHandle = Any
"""Handle of a `ControlActor`, or a `LocalControl`. Ray adds `.remote` methods where type checkers do not see them."""

OnMetrics = Callable[[int, Metrics], None]
"""Function of a rank and its metrics."""

StopReason = Literal["interrupt", "preemption"]

# Metrics that the driver has not collected yet. If it never collects, the oldest are dropped.
_MAX_UNREAD = 10_000
_COLLECT_EVERY_S = 0.5

_logger = logging.getLogger("ray_jax_launch")


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
        self._lines: list[tuple[int, str]] = []
        self._latest: Metrics = {}
        self._groups: dict[str, _Group] = {}
        self._interrupted = False
        self._acknowledged = False
        self._finished: tuple[Any] | None = None
        self._saved: tuple[Any, int] | None = None

    def record(self, rank: int, metrics: Metrics) -> None:
        """Add metrics that a worker logged. With a text among them, they are a message, and not the latest metrics."""
        self._unread.append((rank, metrics))
        if rank == 0 and not any(isinstance(value, str) for value in metrics.values()):
            self._latest |= metrics

    def report(self, metrics: Metrics) -> None:
        """Add metrics that rank 0 reported to Ray Train."""
        self._latest |= metrics

    def log(self, line: str, level: int = logging.WARNING) -> None:
        """Add a line that the driver logs."""
        self._lines.append((level, line))

    def save(self, folder: Any, step: int) -> None:
        """Note the newest complete step of the loop's `Checkpoints`, and their folder or URI."""
        self._saved = (folder, step)

    def saved(self) -> tuple[Any, int] | None:
        """Return what `save` was given last."""
        return self._saved

    def collect(self) -> tuple[list[tuple[int, Metrics]], list[tuple[int, str]]]:
        """Return, and forget, the metrics by rank and the lines by level that have come since the last call."""
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


class LocalControl:
    """Stand-in for the actor's handle where the loop runs in the driver's process: calls the methods at once."""

    def __init__(self) -> None:
        self._actor = ControlActor()
        # The handler of a signal may call while the thread that it interrupts calls.
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return getattr(self._actor, name)(*args, **kwargs)


def answer(called: Any) -> Any:
    """Return the result of a call of a control handle."""
    return ray.get(called) if isinstance(called, ray.ObjectRef) else called


@contextlib.contextmanager
def forwarding(control: ControlHandle, on_metrics: OnMetrics | None, renew: Callable[[], None]) -> Iterator[None]:
    """Forward metrics to `on_metrics` and lines to the log, and call `renew`, every half second of the block."""
    stop = threading.Event()
    forward = on_metrics or _do_nothing

    def collect() -> None:
        stopping = False
        while not stopping:
            stopping = stop.wait(_COLLECT_EVERY_S)
            renew()
            logged, lines = answer(control.collect.remote())
            for rank, metrics in logged:
                try:
                    forward(rank, metrics)
                except Exception:  # the user's function may raise anything, and the run must not end by it
                    _logger.exception("on_metrics failed; it gets the next metrics all the same")
            for level, line in lines:
                _logger.log(level, line)

    thread = threading.Thread(target=collect, name="collect-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _do_nothing(rank: int, metrics: Metrics) -> None:
    pass
