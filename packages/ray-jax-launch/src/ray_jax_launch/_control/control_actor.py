"""The control actor: carries stop requests to the workers, and metrics, events and log lines to the driver.

Workers and driver call it, and no call waits in it. It calls the workers once it has an answer for them, so that they
need not poll often (`turns.py`). Ray runs the calls of one process in their order, as the actor has one thread: each
rank's metrics stay in order. Its process imports little. If it dies, Ray starts it again: the workers' next polls, and
the driver's copy of `ControlState`, tell it what it has forgotten.
"""

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_jax_launch._control.events import Event
from ray_jax_launch._control.turns import call_process
from ray_jax_launch._control.watchdog import Beat, Watchdog

Metrics = dict[str, Any]
ControlHandle = Any
"""Handle of a `ControlActor`, or a `LocalControl`. Ray adds `.remote` methods where type checkers do not see them."""

OnMetrics = Callable[[int, Metrics], None]
"""Function of a rank and its metrics."""

StopReason = Literal["interrupt", "preemption", "resize", "failure"]


class StopRequest(NamedTuple):
    """A request to stop, with its reason.

    After an `interrupt` the launch ends. After a `preemption` or a `resize` of an elastic group, the workers start
    again. Before these three, the loop saves. A `failure` ends the launch, and nothing is saved.
    """

    reason: StopReason
    text: str = ""
    """The error of a failure."""


@dataclass
class ControlState:
    """State of a launch, which the control actor must still know after it has died."""

    request: StopRequest | None = None
    """A stop request for all groups of workers."""

    is_acknowledged: bool = False
    """True once the loop has returned because of an interrupt."""

    finished: tuple[Any] | None = None
    """The value that `mark_finished` was given, which is the launch's result if the loop fails later."""

    saved: tuple[Any, int] | None = None
    """The place of the loop's `Checkpoints`, and the newest complete step."""

    num_reported: int = 0
    """Number of checkpoints that were reported to Ray Train."""

    num_failures: int = 0
    """Number of failures since the last progress."""

    progress: tuple[Any, int] = (None, 0)
    """`saved` and `num_reported` at the last failure."""

    latest: Metrics = field(default_factory=dict)
    """The last value of each metric that rank 0 logged or reported."""


# Metrics that the driver has not collected yet. If it never collects, the oldest are dropped.
_MAX_UNREAD = 10_000
COLLECT_EVERY_S = 0.5
# A thread of each worker polls twice a second; in a large group, 20 workers poll in a second. If none has polled for
# this time, all have ended.
_SILENT_AFTER_S = 15.0


@dataclass
class _Group:
    """The workers of one start, and how far they have agreed to stop."""

    request: StopRequest | None = None
    next_steps: dict[int, int] = field(default_factory=dict)
    """By rank, the first step that it has not passed."""
    handles: dict[int, Any] = field(default_factory=dict)
    """By rank, the actor of the worker."""

    def ask_for_polls(self, but: int | None = None) -> None:
        """Let the other ranks poll now. If such a call is lost, they still poll in their turns."""
        for rank, handle in self.handles.items():
            if rank != but:
                handle.__ray_call__.remote(call_process, "poller")


class Collected(NamedTuple):
    """Metrics, events, lines and state that the driver collects."""

    actor: str
    """Differs after each start of the actor."""

    metrics: list[tuple[int, Metrics]]
    """New metrics, by rank."""

    events: list[Event]
    """New events."""

    lines: list[tuple[int, str]]
    """New log lines, by level."""

    is_silent: bool
    """No worker polls."""

    state: ControlState


class ControlActor:
    """Actor of a launch, on the driver's node: carries stop requests, metrics, events and log lines.

    Args:
        silent_after_s: seconds after the last poll when the workers count as ended.
        hang_timeout_s: see `Watchdog`.
    """

    def __init__(self, silent_after_s: float = _SILENT_AFTER_S, hang_timeout_s: float | None = None) -> None:
        self._silent_after_s = silent_after_s
        self._id = uuid.uuid4().hex
        self._unread: deque[tuple[int, Metrics]] = deque(maxlen=_MAX_UNREAD)
        self._events: list[Event] = []
        self._lines: list[tuple[int, str]] = []
        self._groups: dict[str, _Group] = {}
        self._watchdog = Watchdog(hang_timeout_s)
        self._state = ControlState()
        self._is_resumed = not _is_restarted()
        self._polled_s = -math.inf if self._is_resumed else time.monotonic()

    def state(self) -> ControlState:
        """Return what the actor knows of the launch."""
        return self._state

    def resume(self, before: ControlState) -> None:
        """Add what the actor knew before it died, unless it has learned something newer since."""
        self._is_resumed = True
        latest = before.latest | self._state.latest
        for item in fields(ControlState):
            if getattr(self._state, item.name) == getattr(ControlState(), item.name):
                setattr(self._state, item.name, getattr(before, item.name))
        self._state.latest = latest

    def record(self, rank: int, metrics: Metrics) -> None:
        """Add metrics that a worker logged. With a text among them, they are a message, and not the latest metrics."""
        self._unread.append((rank, metrics))
        if rank == 0 and not any(isinstance(value, str) for value in metrics.values()):
            self._state.latest |= metrics

    def report(self, metrics: Metrics, *, has_checkpoint: bool) -> None:
        """Add metrics that rank 0 reported to Ray Train."""
        self._state.latest |= metrics
        self._state.num_reported += has_checkpoint

    def log(self, line: str, level: int = logging.WARNING) -> None:
        """Add a line that the driver logs."""
        self._lines.append((level, line))

    def note(self, event: Event) -> None:
        """Add an event, which the driver gives to `on_event`."""
        self._events.append(event)

    def save(self, place: Any, step: int) -> None:
        """Note the newest complete step of the loop's `Checkpoints`, and their folder or URI."""
        self._state.saved = (place, step)

    def finish(self, return_value: Any) -> None:
        """Note that the work is done and saved, and the result of the launch if the loop fails after this."""
        self._state.finished = (return_value,)

    def collect(self) -> Collected:
        """Return the state, and what has come since the last call. Kill workers that hang."""
        self._look_for_hangs()
        new = list(self._unread), list(self._events), list(self._lines)
        for queue in (self._unread, self._events, self._lines):
            queue.clear()
        return Collected(self._id, *new, self._is_silent(), self._state)

    def _look_for_hangs(self) -> None:
        if (hang := self._watchdog.look()) is not None:
            for line in hang.lines:
                self.log(line)
            for worker in hang.handles:
                ray.kill(worker)  # SIGKILL after five seconds, which a stopped process gets too
        for worker in self._watchdog.to_ask():
            worker.__ray_call__.remote(call_process, "heartbeat")

    def count_failure(self) -> int | None:
        """Count a failure, unless the actor has died and does not know yet what it knew before: then None."""
        if not self._is_resumed:
            return None
        progress = (self._state.saved, self._state.num_reported)
        self._state.num_failures = 1 if progress != self._state.progress else self._state.num_failures + 1
        self._state.progress = progress
        return self._state.num_failures

    def request_stop(self, reason: StopReason, text: str = "") -> bool:
        """Request a stop of this group of workers and of later ones. Return whether any worker polls."""
        self._state.request = StopRequest(reason, text)
        self._request_of_newest(self._state.request)
        return not self._is_silent()

    def request_resize(self) -> None:
        """Request a stop of the newest group that polls, which then starts again with another number of workers."""
        self._request_of_newest(StopRequest("resize"))

    def _request_of_newest(self, request: StopRequest) -> None:
        for group in list(self._groups.values())[-1:]:
            if group.request is None:
                group.request = request
                group.ask_for_polls()

    def poll(
        self,
        group: str,
        size: int,
        rank: int,
        handle: Any = None,
        *,
        request: StopRequest | None,
        next_step: int | None,
    ) -> tuple[StopRequest | None, int | None]:
        """Return the stop request, and the step to stop at; None for what is not known yet.

        Args:
            group: the start of the workers that the caller belongs to.
            size: the number of workers in the group.
            rank: the caller's.
            handle: the caller's actor, which is called once there is an answer. None if it polls often.
            request: a stop request that the caller knows; the first one of a group stays.
            next_step: the first step that the caller has not passed and will not pass until it knows the step to stop
                at; None before it knows of a stop request. All ranks stop at the latest of these steps.
        """
        entry = self._groups.setdefault(group, _Group())
        before = entry.request, len(entry.next_steps)
        entry.request = entry.request or request or self._state.request
        self._polled_s = time.monotonic()
        if handle is not None:
            entry.handles[rank] = handle
        if next_step is not None:
            entry.next_steps[rank] = next_step
        is_agreed = len(entry.next_steps) == size
        if (entry.request, is_agreed) != (before[0], before[1] == size):
            entry.ask_for_polls(but=rank)
        return entry.request, max(entry.next_steps.values()) if is_agreed else None

    def beat(self, group: str, size: int, rank: int, beat: Beat, handle: Any) -> bool:
        """Note how far a worker is. Return whether it should send its stack (`add_stack`)."""
        return self._watchdog.beat(group, size, rank, beat, handle)

    def add_stack(self, group: str, rank: int, stack: str, *, is_in_debugger: bool) -> None:
        """Note the stack of a worker's loop."""
        self._watchdog.add_stack(group, rank, stack, is_in_debugger=is_in_debugger)

    def end_group(self) -> str:
        """Note that the newest group has ended. Return why it was killed; an empty text if it was not."""
        return self._watchdog.end_group()

    def acknowledge(self) -> None:
        """Note that the loop returned because of an interrupt."""
        self._state.is_acknowledged = True

    def _is_silent(self) -> bool:
        return time.monotonic() - self._polled_s >= self._silent_after_s


def _is_restarted() -> bool:
    """Return whether this process replaces an actor's that died."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    return bool(context and context.get_actor_id() and context.was_current_actor_reconstructed)


def start_control_actor(hang_timeout_s: float | None = None) -> ControlHandle:
    """Start the actor on this node. It lives as long as its handle, in a new process if its process dies.

    Args:
        hang_timeout_s: see `Watchdog`.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(ControlActor).options(**options).remote(hang_timeout_s=hang_timeout_s)


class LocalControl:
    """Stand-in for the actor's handle where the loop runs in the driver's process: calls the methods at once."""

    def __init__(self, hang_timeout_s: float | None = None) -> None:
        self._actor = ControlActor(math.inf, hang_timeout_s)  # the loop polls once a step
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


def count_failure(control: ControlHandle) -> int:
    """Count a failure of the workers.

    The memory monitor of Ray may kill the actor and a worker at once. The driver then tells the actor, within half a
    second, what it knew.

    Returns:
        The number of failures since a checkpoint became complete, or from the beginning.
    """
    while (number := answer(control.count_failure.remote())) is None:
        time.sleep(COLLECT_EVERY_S)
    return number
