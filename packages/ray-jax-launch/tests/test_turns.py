"""Turns of the ranks to call the control actor. The clock of the test moves when a rank waits."""

import itertools
import threading
import time
from typing import Any

import pytest

from ray_jax_launch._control import turns
from ray_jax_launch._control.turns import Turns, call_process, seconds_between, turns_of_process


class Clock:
    """A clock that moves only in waits, by the time that they wait."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Waits:
    """A condition whose waits move a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify(self) -> None: ...

    def wait(self, timeout: float) -> None:
        self._clock.now_s += timeout + 1e-6


def calls_of_group(
    monkeypatch: pytest.MonkeyPatch, size: int, least_s: float, *, until_s: float, changes_every_s: float = 1e9
) -> list[float]:
    """Return the times of the calls of all ranks, after the first one of each, which comes at once."""
    times: list[float] = []
    for rank in range(size):
        clock: Any = Clock()
        monkeypatch.setattr(turns, "time", clock)
        one, change_s = Turns(rank, size, least_s), changes_every_s
        monkeypatch.setattr(one, "_changed", Waits(clock))
        while clock.now_s < until_s:
            if clock.now_s >= change_s:
                one.call_soon()
                change_s += changes_every_s
            one.wait()
            times.append(clock.now_s)
    return sorted(one for one in times if one < until_s)


def most_in_a_second(times: list[float]) -> int:
    return max(sum(start <= one < start + 1 for one in times) for start in times)


@pytest.mark.parametrize(("size", "least_s"), [(1, 0.5), (3, 1.0), (10, 0.5), (11, 0.5), (64, 1.0), (1000, 0.5)])
def test_a_group_of_any_size_makes_at_most_20_calls_a_second_without_a_gap(
    monkeypatch: pytest.MonkeyPatch, size: int, least_s: float
) -> None:
    times = calls_of_group(monkeypatch, size, least_s, until_s=120)
    assert most_in_a_second(times) <= 21  # both ends of the second
    # The driver takes 15 s without a call for the end of all workers.
    assert max(after - before for before, after in itertools.pairwise([0.0, *times])) < 1.1
    assert len(times) == pytest.approx(120 * size / seconds_between(size, least_s), rel=0.1)


@pytest.mark.parametrize("size", [2, 20, 100])
def test_frequent_changes_make_no_burst(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    times = calls_of_group(monkeypatch, size, 1.0, until_s=60, changes_every_s=0.01)
    assert most_in_a_second(times) <= 21


def test_a_change_is_sent_sooner_than_the_next_regular_call(monkeypatch: pytest.MonkeyPatch) -> None:
    regular = calls_of_group(monkeypatch, 2, 1.0, until_s=10)
    assert most_in_a_second(regular) == 2
    changed = calls_of_group(monkeypatch, 2, 1.0, until_s=10, changes_every_s=0.3)
    assert most_in_a_second(changed) > 4


def test_a_small_group_calls_as_often_as_before() -> None:
    assert [seconds_between(size, 1.0) for size in (1, 20, 40, 1000)] == [1.0, 1.0, 2.0, 50.0]


def wait_in_thread(one: Turns, until: Any = None) -> threading.Thread:
    thread = threading.Thread(target=one.wait, args=(until,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread


def test_a_wait_of_a_large_group_ends_when_the_rank_is_called() -> None:
    one = Turns(999, 1000, 0.5)
    thread = wait_in_thread(one)
    one.call_now()
    thread.join(20)
    assert not thread.is_alive()
    one.call_now()  # before the wait, as in the middle of a call
    one.wait()
    wait_in_thread(one)  # a call ends one wait


def test_a_frequent_change_does_not_delay_a_call_that_is_asked_for() -> None:
    one = Turns(999, 1000, 0.5)
    one.call_now()
    one.call_soon()  # its place is after 50 s
    thread = threading.Thread(target=one.wait, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_wait_ends_once_its_condition_holds() -> None:
    one, is_noticed = Turns(999, 1000, 0.5), threading.Event()
    thread = wait_in_thread(one, is_noticed.is_set)
    is_noticed.set()
    began_s = time.monotonic()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - began_s < 20


def test_the_control_actor_ends_the_wait_for_the_purpose_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_of_process", {})
    call_process(None, "poller")  # before the loop's first step: it calls at once then
    poller, heartbeat = (wait_in_thread(turns_of_process(purpose, 9, 1000, 1.0)) for purpose in ("poller", "heartbeat"))
    call_process(None, "heartbeat")
    heartbeat.join(20)
    poller.join(0.05)
    assert (poller.is_alive(), heartbeat.is_alive()) == (True, False)
