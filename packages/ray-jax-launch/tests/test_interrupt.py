"""Signals and stop requests of the driver, with the control of a loop in this process."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from ray_jax_launch import StopRequestedError, launch, request_stop, stop_requested
from ray_jax_launch._control import interrupt as interrupt_module
from ray_jax_launch._control.control_actor import LocalControl, StopRequest
from ray_jax_launch._control.interrupt import Interrupt

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore what a launch that does not end would leave to the next test."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    interrupt_module._running.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the handler reads, and its waits."""
    clock = SimpleNamespace(
        now_s=1000.0, waits=[], monotonic=lambda: clock.now_s, sleep=lambda s: clock.waits.append(s)
    )
    monkeypatch.setattr(interrupt_module, "time", clock)
    return clock


@pytest.fixture
def control() -> LocalControl:
    """The control of a loop that has asked for a stop request."""
    control = LocalControl()
    control.poll.remote("", 1, 0, request=None, next_step=None)
    return control


@pytest.mark.parametrize(("passed_s", "waits"), [(0.25, [0.75]), (7, [0.0])])
@pytest.mark.parametrize("number", NUMBERS)
def test_signals_of_the_same_stop_are_caught_until_a_second_has_passed(
    control: LocalControl,
    clock: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
    passed_s: float,
    waits: list[float],
) -> None:
    before = [signal.getsignal(one) for one in NUMBERS]
    interrupt = Interrupt(control)
    interrupt.install()
    try:
        assert not interrupt.is_requested
        signal.raise_signal(number)
        assert interrupt.is_requested
        assert control.state.remote().request == StopRequest("interrupt")
        clock.now_s += passed_s
    finally:
        clock.sleep = lambda s: clock.waits.append(s) or signal.raise_signal(signal.SIGTERM)
        interrupt.restore()
    assert clock.waits == waits
    assert [signal.getsignal(one) for one in NUMBERS] == before
    remedy = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
    assert caplog.messages == [f"interrupted: the workers save what they have{remedy}"]


def test_a_launch_without_a_signal_ends_without_a_wait(control: LocalControl, clock: SimpleNamespace) -> None:
    interrupt = Interrupt(control)
    interrupt.install()
    interrupt.restore()
    assert clock.waits == []


def test_a_loop_in_this_process_that_never_asks_is_stopped_by_the_first_signal(clock: SimpleNamespace) -> None:
    control = LocalControl()
    interrupt = Interrupt(control)
    interrupt.install()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        interrupt.restore()


@pytest.mark.parametrize("error", [ActorDiedError(), GetTimeoutError()], ids=["ends", "does not answer"])
def test_a_launch_that_has_lost_its_workers_ends_after_a_signal_only(
    control: LocalControl, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    done: list[Any] = []

    def wait(called: Any, timeout: float) -> None:
        done.append((called, timeout))
        raise error

    monkeypatch.setattr("ray.get", wait)
    monkeypatch.setattr("ray.kill", done.append)
    controller: Any = SimpleNamespace(abort=SimpleNamespace(remote=lambda: "aborted"))
    interrupt = Interrupt(control)
    interrupt.install()
    interrupt.attach(controller)
    interrupt.on_silence()
    assert done == []
    signal.raise_signal(signal.SIGTERM)
    for _ in range(2):
        interrupt.on_silence()
        assert done == [("aborted", 10), controller]
    interrupt.restore()


def test_the_handlers_of_a_launch_in_another_thread_are_those_of_the_program(control: LocalControl) -> None:
    before = [signal.getsignal(one) for one in NUMBERS]
    found: list[Any] = []

    def run() -> None:
        interrupt = Interrupt(control)
        interrupt.install()
        found.extend(signal.getsignal(one) for one in NUMBERS)
        found.append(request_stop("the disk is full"))
        interrupt.restore()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found == [*before, True]
    assert control.state.remote().request == StopRequest("failure", "the disk is full")


def test_a_stop_is_requested_of_every_launch_that_runs_and_of_no_other(control: LocalControl) -> None:
    def texts() -> list[str | None]:
        requests = [one.state.remote().request for one in controls]
        return [None if request is None else request.text for request in requests]

    controls = [control, LocalControl(), LocalControl()]
    first, second = (Interrupt(one) for one in controls[:2])
    assert not request_stop("nothing runs")
    first.install()
    second.install()
    assert request_stop("one")
    assert texts() == ["one", "one", None]
    second.restore()
    assert request_stop("two")
    assert texts() == ["two", "one", None]
    first.restore()
    assert not request_stop("three")
    assert texts() == ["two", "one", None]


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_after_a_launch_has_ended_changes_nothing(tmp_path: Any, fails: bool) -> None:
    def loop() -> bool:
        if fails:
            raise KeyError
        return stop_requested(1)

    with contextlib.suppress(KeyError):
        launch(loop, hardware="local", storage_path=tmp_path, name="run")
    assert not request_stop("too late")
    if not fails:
        assert launch(loop, hardware="local", storage_path=tmp_path, name="run").return_value is False


def test_a_requested_stop_of_a_loop_in_this_process_is_its_error(tmp_path: Any) -> None:
    def loop() -> None:
        assert not stop_requested(1)
        assert request_stop(" a \n reason ")
        stop_requested(2)

    with pytest.raises(StopRequestedError, match=r"^a reason$"):
        launch(loop, hardware="local", storage_path=tmp_path, name="run")
