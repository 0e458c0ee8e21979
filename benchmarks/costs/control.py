"""Calls between the workers and the control actor, Ray Train's controller and the actors of Ray Data.

Simulated ranks run the threads of a worker: its poller of stop requests and its heartbeat. They call the methods of the
control actor in this process.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.data
from ray.actor import ActorHandle

from costs.measurement import Measurement
from ray_jax_launch import connect, cpu
from ray_jax_launch._control import stop_poller
from ray_jax_launch._control.control_actor import ControlActor, LocalControl
from ray_jax_launch._control.heartbeat import Heartbeat
from ray_jax_launch._control.stop_poller import StopPoller
from ray_jax_launch._control.turns import seconds_between
from ray_jax_launch._control.watchdog import BEAT_EVERY_S, Beat, Watchdog
from ray_jax_launch._ray_internals.ray_train import limit_data_calls
from ray_jax_launch._train.backend import train_settings

WINDOW_S = 12.0
SETTLED_AFTER_S = 3.0
VALIDATION_EVERY_S = 4.0
HANG_TIMEOUT_S = 60.0
STARTED_AFTER_S = 5.0


class CountingControl(LocalControl):
    """The control actor in this process, which notes the time of each call of a worker."""

    def __init__(self) -> None:
        super().__init__(HANG_TIMEOUT_S)
        self._actor = ControlActor(hang_timeout_s=HANG_TIMEOUT_S)
        self.calls_s: list[float] = []
        self.has_ended = False

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.has_ended:
            threading.Event().wait()  # pollers run until their process ends
        if name in ("poll", "beat"):
            self.calls_s.append(time.monotonic())
        return super()._call(name, *args, **kwargs)


class Rank:
    """A simulated worker. It is the handle of its own actor too."""

    def __init__(self, control: CountingControl, size: int, rank: int) -> None:
        self.__ray_call__ = self
        self.heartbeat = Heartbeat(control, "group", size, rank, self)
        self.poller = StopPoller(control, "group", size, rank, self)

    def remote(self, function: Any, purpose: str) -> None:
        """Do what the function of the control actor does in the process of the worker."""
        getattr(self, purpose).turns.call_now()

    def step(self, step: int) -> bool:
        """Do a step. Return whether the loop stops at it."""
        self.heartbeat.add(step)
        return self.poller.stop_requested(step)


class Group:
    """Simulated workers that do a step, and later perhaps a validation."""

    def __init__(self, size: int) -> None:
        # It asks Ray Train, which runs in workers alone.
        setattr(stop_poller, "preemption_noticed", lambda: lambda: False)  # noqa: B010
        self.control = CountingControl()
        self.ranks = [Rank(self.control, size, rank) for rank in range(size)]
        for rank in self.ranks:
            rank.step(1)
        time.sleep(SETTLED_AFTER_S)
        self.control.calls_s.clear()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *error: object) -> None:
        self.control.has_ended = True
        for rank in self.ranks:
            rank.poller.turns.call_now()
            rank.heartbeat.turns.call_now()

    def validate(self) -> None:
        """Begin a validation in all ranks, and end it after half a second."""
        for is_training in (False, True):
            for rank in self.ranks:
                rank.heartbeat.watch(is_training)
            time.sleep(0.5)


def calls_per_s(size: int, folder: Path) -> float:
    """Return the calls per second while the group trains, with validations."""
    with Group(size) as group:
        began_s = time.monotonic()
        while time.monotonic() < began_s + WINDOW_S:
            group.validate()
            time.sleep(VALIDATION_EVERY_S - 1)
        return len(group.control.calls_s) / (time.monotonic() - began_s)


def _stop(size: int) -> tuple[float, float]:
    """Stop a group. Return the seconds until all ranks know at which step, and the calls of a rank."""
    with Group(size) as group:
        began_s = time.monotonic()
        group.control.request_stop.remote("interrupt")
        for rank in group.ranks:
            rank.poller._agreed.wait()
        seconds, num_calls = time.monotonic() - began_s, len(group.control.calls_s)
        assert all(rank.step(2) for rank in group.ranks)
        return seconds, num_calls / size


def hang_noticed_s(size: int, folder: Path) -> float:
    """Return the seconds from a hang of a worker until the watchdog kills the group, in simulated time."""
    now_s, every_s, asked = 0.0, seconds_between(size, BEAT_EVERY_S), set[Any]()
    watchdog = Watchdog(HANG_TIMEOUT_S, lambda: now_s)
    due_s = [every_s * rank / size for rank in range(size)]
    hangs_s = 3 * every_s
    while True:
        for rank in range(size):
            is_silent = rank == size // 2 and now_s >= hangs_s
            if (due_s[rank] <= now_s or rank in asked) and not is_silent:
                beat = Beat(int(min(now_s, hangs_s)), 0, True, 1.0)
                if watchdog.beat("group", size, rank, beat, rank):
                    watchdog.add_stack("group", rank, "stack", is_in_debugger=False)
                due_s[rank] += every_s if due_s[rank] <= now_s else 0
        if watchdog.look() is not None:
            return now_s - hangs_s
        asked = set(watchdog.to_ask())
        now_s += 0.5


def health_checks_per_s(size: int, folder: Path) -> float:
    """Return the calls of Ray Train's controller, which asks each worker in each interval."""
    with train_settings(cpu(size)):
        return size / float(os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"])


def data_calls_per_s(size: int, folder: Path) -> float:
    """Return the calls of the actors of Ray Data, from one executor times the number of workers.

    The start of the executor does not count. A call per minute must fall into the time.
    """
    num_calls, call = 0, ActorHandle._actor_method_call

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return call(*args, **kwargs)

    connect(cpu(1))
    limit_data_calls(size)
    # One task for reading and waiting, as for the windows of tokens.
    rows = ray.data.range(10_000, override_num_blocks=10_000).map_batches(_read_slowly, batch_size=None)
    batches = iter(rows.iter_batches(batch_size=1))
    next(batches)
    ends_s = time.monotonic() + STARTED_AFTER_S
    while time.monotonic() < ends_s:
        next(batches)
    ActorHandle._actor_method_call, seconds = count, max(WINDOW_S, size / 10)
    began_s = time.monotonic()
    while time.monotonic() < began_s + seconds:
        next(batches)
    ActorHandle._actor_method_call = call
    return size * num_calls / seconds


def _read_slowly(batch: Any) -> Any:
    time.sleep(0.3)
    return batch


def _measurement(name: str, what: str, unit: str, cost: Callable[[int, Path], float], goal: float) -> Measurement:
    sizes, short = (10, 100, 1000), (10, 40)
    return Measurement(name=name, what=what, unit=unit, size="workers", sizes=sizes, short=short, cost=cost, goal=goal)


MEASUREMENTS = [
    _measurement(
        "control-calls", "calls of the control actor while a group trains and validates", "calls/s", calls_per_s, 0.1
    ),
    _measurement("stop-calls", "calls of each worker for a stop", "calls", lambda size, folder: _stop(size)[1], 0.1),
    _measurement(
        "stop-delay",
        "a stop request until all ranks know the step at which they stop",
        "s",
        lambda size, folder: _stop(size)[0],
        1.1,
    ),
    _measurement(
        "hang-delay",
        "the hang of a worker until the group is killed, with a timeout of 60 s",
        "s",
        hang_noticed_s,
        1.1,
    ),
    _measurement("health-checks", "calls of Ray Train's controller", "calls/s", health_checks_per_s, 0.1),
    _measurement("data-calls", "calls of the actors of Ray Data", "calls/s", data_calls_per_s, 0.1),
]
