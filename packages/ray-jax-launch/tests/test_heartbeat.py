"""The progress that a worker tells the watchdog, with real times and with a clock of the test."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ray_jax_launch._control import heartbeat as heartbeat_module
from ray_jax_launch._control.control_actor import LocalControl
from ray_jax_launch._control.heartbeat import Heartbeat
from ray_jax_launch._control.watchdog import Beat


def test_the_time_of_other_work_is_not_that_of_a_step():
    """Each step is followed by a validation that takes thirty times as long."""
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    try:
        for step in range(1, 7):
            time.sleep(0.01)
            heartbeat.add(step)
            assert heartbeat.read()[:3] == (step, step, True)
            assert heartbeat.watch(False)
            time.sleep(0.3)
            assert not heartbeat.read().is_training
            assert not heartbeat.watch(True)
        assert heartbeat.read().num_calls == 12
        assert 0 < heartbeat.read().usual_s < 0.15
    finally:
        heartbeat.end()
    assert heartbeat.read().has_ended


def test_the_first_step_counts_as_ten_and_a_step_counts_when_it_is_computed():
    """The first step takes long to compile. Its loss is on the device before that of the second one."""
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    try:
        assert heartbeat.read()[:5] == (0, -1, False, 0.0, False)
        time.sleep(0.5)
        ready = {8}
        for step in (7, 8):
            heartbeat.add(step, SimpleNamespace(is_ready=lambda step=step: step in ready))
        assert heartbeat.read()[:3] == (0, -1, True)
        assert heartbeat.read().usual_s == pytest.approx(0.05, abs=0.03)
        ready.add(7)
        assert heartbeat.read()[:2] == (2, 8)
    finally:
        heartbeat.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that a heartbeat reads. Its thread sends nothing."""
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(heartbeat_module, "time", clock)
    monkeypatch.setattr(Heartbeat, "_send", lambda self: None)
    return clock


def compute(heartbeat: Heartbeat, clock: SimpleNamespace, num_steps: int, seconds: float) -> float:
    """Let some steps take some seconds together. Return the usual time of a step."""
    clock.now_s += seconds
    for _ in range(num_steps):
        heartbeat.add(0)
    return heartbeat.read().usual_s


def test_the_usual_time_is_the_median_of_the_newest_times_of_one_step(clock: SimpleNamespace) -> None:
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    assert compute(heartbeat, clock, 1, 50.0) == 5.0  # the first step counts as ten
    assert compute(heartbeat, clock, 4, 8.0) == 3.5  # each of the four took 2 s
    assert compute(heartbeat, clock, 3, 3.0) == 2.0
    assert compute(heartbeat, clock, 0, 7.0) == 2.0  # no step is computed: the time goes on
    assert compute(heartbeat, clock, 2, 1.0) == 3.0
    for _ in range(30):
        compute(heartbeat, clock, 1, 1.0)
    assert [compute(heartbeat, clock, 2, 18.0) for _ in range(11)] == [1.0] * 10 + [9.0]


def test_steps_before_other_work_and_the_time_of_this_work_are_not_measured(clock: SimpleNamespace) -> None:
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    compute(heartbeat, clock, 1, 20.0)
    clock.now_s += 4.0
    heartbeat.add(1)
    assert heartbeat.watch(False)
    clock.now_s += 1000.0
    assert heartbeat.read().usual_s == 2.0
    heartbeat.watch(True)
    assert compute(heartbeat, clock, 1, 4.0) == 3.0


def test_a_step_that_ends_during_a_save_is_not_measured_with_the_next_one(clock: SimpleNamespace) -> None:
    """No beat comes during a short save."""
    heartbeat, is_ready = Heartbeat(LocalControl(), "group", 1, 0), False
    compute(heartbeat, clock, 1, 20.0)
    heartbeat.add(1, SimpleNamespace(is_ready=lambda: is_ready))
    with heartbeat.saving():
        is_ready = True
        clock.now_s += 1000.0
    assert compute(heartbeat, clock, 1, 4.0) == 3.0  # the median of 2 and 4: the first step counts as ten


@pytest.mark.parametrize("error", [None, KeyError])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_save_must_end_and_leaves_the_work_as_it_was(
    clock: SimpleNamespace, is_training: bool, error: type[Exception] | None
) -> None:
    heartbeat = Heartbeat(LocalControl(), "group", 1, 0)
    heartbeat.add(1)
    heartbeat.watch(is_training)
    for _ in range(2):
        try:
            with heartbeat.saving():
                with heartbeat.saving():
                    assert (heartbeat.read().is_training, heartbeat.read().must_end) == (False, True)
                assert (heartbeat.read().is_training, heartbeat.read().must_end) == (False, True)
                if error is not None:
                    raise error
        except KeyError:
            assert error is not None
        assert (heartbeat.read().is_training, heartbeat.read().must_end) == (is_training, False)


def test_the_first_step_and_the_end_are_told_at_once_and_other_work_soon(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = LocalControl()
    heartbeat = Heartbeat(control, "group", 1, 0, "an actor")
    calls: list[str] = []
    turns: Any = SimpleNamespace(call_now=lambda: calls.append("now"), call_soon=lambda: calls.append("soon"))
    monkeypatch.setattr(heartbeat, "turns", turns)
    heartbeat.watch(True)
    for step in (1, 2):
        heartbeat.add(step)
    assert calls == ["now"]
    for is_training in (True, False, False, True):
        heartbeat.watch(is_training)
    assert calls == ["now", "soon", "soon"]
    assert control._actor._watchdog._workers == {}  # the thread tells it
    heartbeat.end()
    assert calls[-1] == "now"
    beat = control._actor._watchdog._workers[0].beat
    assert (beat.has_ended, beat.step, beat.num_computed) == (True, 2, 2)


def test_no_earlier_beat_arrives_after_that_of_the_end(clock: SimpleNamespace) -> None:
    sent: list[bool] = []
    is_read, may_send = threading.Event(), threading.Event()

    def beat(group: str, size: int, rank: int, beat: Beat, handle: Any) -> None:
        if not beat.has_ended:
            is_read.set()
            assert may_send.wait(60)
        sent.append(beat.has_ended)

    control: Any = SimpleNamespace(beat=SimpleNamespace(remote=beat))
    heartbeat = Heartbeat(control, "group", 1, 0)
    sender = threading.Thread(target=heartbeat._beat)
    sender.start()
    assert is_read.wait(60)
    end = threading.Thread(target=heartbeat.end)
    end.start()
    end.join(0.1)  # it waits for the beat that is being sent
    may_send.set()
    for thread in (sender, end):
        thread.join(60)
    assert sent == [False, True]


def test_a_worker_of_a_large_group_has_its_own_turns_and_tells_who_it_is(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    turns: Any = SimpleNamespace(call_now=lambda: None, call_soon=lambda: None)
    monkeypatch.setattr(heartbeat_module, "turns_of_process", lambda *args: given.append(args) or turns)
    control = LocalControl()
    Heartbeat(control, "group", 1000, 7, "an actor").end()
    assert given == [("heartbeat", 7, 1000, 1.0)]
    watchdog = control._actor._watchdog
    assert (watchdog._group, watchdog._size) == ("group", 1000)
    assert {rank: worker.handle for rank, worker in watchdog._workers.items()} == {7: "an actor"}
