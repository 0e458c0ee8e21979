"""The thread of a worker that polls for stop requests. Its two other ranks are calls of the test."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ray_jax_launch import StopRequestedError
from ray_jax_launch._control import stop_poller
from ray_jax_launch._control.control_actor import ControlActor, LocalControl, StopRequest
from ray_jax_launch._control.stop_poller import StopPoller
from ray_jax_launch._control.turns import turns_of_process

GROUP = "ab" * 16
MEMBER = GROUP, 3, 2
INTERRUPT, PREEMPTION = StopRequest("interrupt"), StopRequest("preemption")


class Control(LocalControl):
    """A control that holds the threads that call it after the test: they poll until the process ends."""

    has_ended = False
    num_calls = 0

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.has_ended:
            threading.Event().wait()
        return super()._call(name, *args, **kwargs)


@pytest.fixture
def noticed() -> threading.Event:
    """Set once the node of this worker is about to be preempted."""
    return threading.Event()


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch, noticed: threading.Event) -> Iterator[Control]:
    """The control of a group of three, in which this process has the rank 2."""
    monkeypatch.setattr(stop_poller, "preemption_noticed", lambda: noticed.is_set)
    monkeypatch.setattr(stop_poller, "_POLL_EVERY_S", 0.01)
    control = Control()
    yield control
    control.has_ended = True


def wait_until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def poll(control: Control, rank: int, next_step: int | None = None) -> Any:
    return control.poll.remote(GROUP, 3, rank, request=None, next_step=next_step)


def test_a_rank_asks_in_its_own_turns_and_names_its_actor(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(stop_poller, "turns_of_process", lambda *args: given.append(args) or turns_of_process(*args))
    StopPoller(control, *MEMBER, "an actor")
    assert given == [("poller", 2, 3, 0.01)]
    wait_until(lambda: control._actor._groups[GROUP].handles == {2: "an actor"})


def test_a_noticed_preemption_stops_all_ranks_at_the_step_that_no_rank_has_passed(
    control: Control, noticed: threading.Event
) -> None:
    poller = StopPoller(control, *MEMBER)
    assert [poller.stop_requested(step) for step in (0, 3)] == [False, False]
    assert poll(control, 0) == (None, None)
    noticed.set()
    wait_until(lambda: poll(control, 0) == (PREEMPTION, None))
    wait_until(lambda: poller.request is not None)
    assert poll(control, 1, 9) == (PREEMPTION, None)
    wait_until(lambda: poll(control, 0, 7) == (PREEMPTION, 9))
    assert [poller.stop_requested(step) for step in range(4, 9)] == [False] * 5
    assert not poller.acknowledged
    assert poller.stop_requested(9)
    assert (poller.acknowledged, poller.step, poller.request) == (True, 9, PREEMPTION)


def test_a_noticed_preemption_that_is_told_does_not_let_the_thread_poll_without_a_wait(
    control: Control, noticed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_poller, "_POLL_EVERY_S", 3600.0)
    noticed.set()
    poller = StopPoller(control, *MEMBER)
    wait_until(lambda: poller.request is not None)
    time.sleep(0.2)
    assert control.num_calls <= 3  # two of them tell the request and the step, and one is the first turn


def test_the_others_wait_for_a_rank_that_is_ahead(control: Control) -> None:
    poller = StopPoller(control, *MEMBER)
    assert not poller.stop_requested(30)
    control.request_stop.remote("interrupt")
    poll(control, 0, 7)
    poll(control, 1, 9)
    wait_until(lambda: poll(control, 0, 7) == (INTERRUPT, 31))
    assert poller.stop_requested(40)  # a loop may ask at every tenth step


def test_an_actor_that_has_died_learns_from_the_thread_what_was_agreed_on(control: Control) -> None:
    poller = StopPoller(control, *MEMBER)
    assert not poller.stop_requested(4)
    control.request_stop.remote("interrupt")
    wait_until(lambda: poller.request is not None)
    for rank in (0, 1):
        poll(control, rank, 3)
    assert poller.stop_requested(5)
    control._actor = ControlActor()
    wait_until(lambda: poll(control, 0) == (INTERRUPT, None))
    poll(control, 0, 3)
    wait_until(lambda: poll(control, 1, 3) == (INTERRUPT, 5))


def test_a_failure_that_is_requested_is_raised_without_a_wait_for_the_others(control: Control) -> None:
    poller = StopPoller(control, *MEMBER)
    control.request_stop.remote("failure", "the tokens are damaged")
    wait_until(lambda: poller.request is not None)
    for step in (1, 2):
        with pytest.raises(StopRequestedError, match="the tokens are damaged"):
            poller.stop_requested(step)
        assert (poller.step, poller.acknowledged) == (step, False)


def test_a_loop_that_comes_to_its_next_step_waits_for_the_agreement(control: Control) -> None:
    poller, returned = StopPoller(control, *MEMBER), []
    assert not poller.stop_requested(4)
    control.request_stop.remote("interrupt")
    wait_until(lambda: poller.request is not None)
    loop = threading.Thread(target=lambda: returned.append(poller.stop_requested(5)), daemon=True)
    loop.start()
    poll(control, 0, 5)
    wait_until(lambda: poller.step == 5)
    loop.join(0.1)
    assert loop.is_alive()  # a rank has not answered
    poll(control, 1, 3)
    loop.join(60)
    assert returned == [True]


def test_a_request_that_comes_while_a_step_begins_is_not_missed(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread promises to stop at the step after the one that it knows, just before the loop tells its own."""
    monkeypatch.setattr(StopPoller, "_poll", lambda *args: None)
    poller = StopPoller(control, *MEMBER)

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        poller.request, poller._stop_step = INTERRUPT, poller.step + 1
        poller._agreed.set()
        yield

    monkeypatch.setattr(poller, "_lock", lock())
    assert poller.stop_requested(0)
