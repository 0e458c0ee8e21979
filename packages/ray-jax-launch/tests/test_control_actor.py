"""The control actor: stop requests on their way to the workers, metrics on their way to the driver."""

import contextlib
import copy
import logging
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_jax_launch._control import control_actor
from ray_jax_launch._control.control_actor import (
    ControlActor,
    LocalControl,
    StopRequest,
    count_failure,
)
from ray_jax_launch._control.events import Restarting, WaitingForNodes
from ray_jax_launch._control.forwarding import forwarding, showing_info
from ray_jax_launch._control.watchdog import Beat, Watchdog

INTERRUPT, PREEMPTION, RESIZE = StopRequest("interrupt"), StopRequest("preemption"), StopRequest("resize")


class CopyingControl(LocalControl):
    """A control whose answers are copies, as those of an actor are. The actor can be replaced, as after a death."""

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(super()._call(name, *args, **kwargs))

    def die(self) -> None:
        """Replace the actor by one that knows nothing."""
        self._actor = ControlActor()


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each new actor be one that has started again after a death."""
    monkeypatch.setattr(control_actor, "_is_restarted", lambda: True)


def test_all_ranks_stop_at_the_latest_step_that_no_rank_has_passed():
    control = ControlActor()
    poll = partial(control.poll, "group", 3, request=None)
    assert [poll(rank, next_step=None) for rank in range(3)] == [(None, None)] * 3
    assert control.request_stop("interrupt")
    assert [poll(rank, next_step=None) for rank in range(3)] == [(INTERRUPT, None)] * 3
    assert poll(0, next_step=7) == (INTERRUPT, None)
    assert poll(1, next_step=9) == (INTERRUPT, None)
    assert poll(2, next_step=8) == (INTERRUPT, 9)
    assert poll(0, next_step=7) == (INTERRUPT, 9)


def test_a_rank_that_dies_before_it_answers_leaves_the_step_open():
    control = ControlActor()
    control.request_stop("interrupt")
    for _ in range(3):
        assert control.poll("group", 2, 0, request=None, next_step=4) == (INTERRUPT, None)


def test_an_interrupt_reaches_a_group_that_starts_later():
    control = ControlActor()
    assert not control.request_stop("interrupt")  # no worker polls yet
    assert control.poll("group", 1, 0, request=None, next_step=None) == (INTERRUPT, None)


def test_a_preemption_stops_every_rank_of_its_own_group():
    control = ControlActor()
    assert control.poll("first", 2, 0, request=PREEMPTION, next_step=None) == (PREEMPTION, None)
    assert control.poll("first", 2, 1, request=None, next_step=None) == (PREEMPTION, None)
    assert control.poll("second", 2, 0, request=None, next_step=None) == (None, None)


def test_an_interrupt_after_a_preemption_does_not_change_the_reason():
    control = ControlActor()
    control.poll("group", 2, 0, request=PREEMPTION, next_step=None)
    assert control.request_stop("interrupt")
    assert control.poll("group", 2, 1, request=None, next_step=None) == (PREEMPTION, None)


class Worker:
    """Handle of a worker that notes what the control actor asks it for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.__ray_call__ = SimpleNamespace(remote=lambda function, purpose: self.asked.append(purpose))

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def test_the_workers_of_a_large_group_are_asked_to_poll_only_when_there_is_an_answer() -> None:
    control, workers = ControlActor(), [Worker() for _ in range(1000)]
    poll = partial(control.poll, "group", 1000, request=None)
    for _ in range(3):
        for rank, worker in enumerate(workers):
            poll(rank, worker, next_step=None)
    assert not any(worker.asked for worker in workers)
    control.request_stop("interrupt")
    control.request_stop("failure", "a second request changes nothing for this group")
    assert [worker.asked for worker in workers] == [["poller"]] * 1000
    for rank, worker in enumerate(workers):
        assert poll(rank, worker, next_step=rank) == (INTERRUPT, 999 if rank == 999 else None)
    for rank, worker in enumerate(workers):
        assert poll(rank, worker, next_step=rank) == (INTERRUPT, 999)
    # The last one has the answer already, and the others have it now.
    assert [worker.asked for worker in workers] == [["poller"] * 2] * 999 + [["poller"]]


def test_workers_that_hang_are_asked_for_their_stacks_and_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, killed, lines, workers = 1000.0, list[Any](), list[tuple[int, str]](), [Worker() for _ in range(2)]
    monkeypatch.setattr("ray.kill", killed.append)
    control = ControlActor(hang_timeout_s=60.0)
    control._watchdog = Watchdog(60.0, lambda: now_s)
    beat = partial(control.beat, "group", 2, beat=Beat(3, 7, True, 0.4))
    assert not beat(rank=1, handle=workers[1])  # it is stopped after this
    for second in range(90):
        if beat(rank=0, handle=workers[0]):
            control.add_stack("group", 0, "loop of 0\n", is_in_debugger=False)
        now_s += 1.0
        lines += control.collect().lines
        assert (killed != []) == (second >= 60)
    assert (len(killed), {*killed}) == (2, {*workers})
    assert [worker.asked for worker in workers] == [["heartbeat"]] * 2
    assert lines == [(logging.WARNING, "stack of worker 0:\nloop of 0")]
    assert control.end_group().endswith(" after step 7 (usual: 0.4 s): worker 1 does not answer")
    assert control.end_group() == ""


def test_the_others_are_asked_to_poll_when_one_rank_notices_a_preemption() -> None:
    control, workers = ControlActor(), [Worker() for _ in range(3)]
    for rank, worker in enumerate(workers):
        control.poll("group", 3, rank, worker, request=PREEMPTION if rank == 2 else None, next_step=None)
    assert [worker.asked for worker in workers] == [["poller"], ["poller"], []]


def test_a_resize_asks_the_workers_of_the_newest_group() -> None:
    control, old, new = ControlActor(), Worker(), Worker()
    control.poll("first", 1, 0, old, request=None, next_step=None)
    control.poll("second", 1, 0, new, request=None, next_step=None)
    for _ in range(2):
        control.request_resize()
    assert (old.asked, new.asked) == ([], ["poller"])


def test_metrics_of_all_ranks_are_collected_once():
    control = ControlActor()
    control.record(0, {"step": 1})
    control.record(1, {"step": 1})
    control.log("a warning")
    control.log("a line", logging.INFO)
    lines = [(logging.WARNING, "a warning"), (logging.INFO, "a line")]
    first, second = control.collect(), control.collect()
    assert (first.metrics, first.lines) == ([(0, {"step": 1}), (1, {"step": 1})], lines)
    assert (second.metrics, second.lines) == ([], [])


def test_events_are_forwarded_once_and_an_error_of_the_function_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    control, seen = LocalControl(), []
    events = [Restarting("failure", "worker 0 died", 1), WaitingForNodes(240.0), Restarting("preemption", "a node")]

    def see(event: Any) -> None:
        seen.append(event)
        raise KeyError("no such event")

    for _ in range(2):
        with forwarding(control, None, see):
            for event in events if not seen else ():
                control.note.remote(event)
    assert seen == events
    assert caplog.text.count("on_event failed") == 3


def test_of_metrics_that_nobody_collects_the_newest_10_000_are_kept():
    control = ControlActor()
    for step in range(10_003):
        control.record(0, {"step": step})
    assert control.collect().metrics == [(0, {"step": step}) for step in range(3, 10_003)]


def test_the_latest_metrics_are_those_of_rank_0():
    control = ControlActor()
    control.record(0, {"step": 1, "loss": 2.0})
    control.report({"val_loss": 3.0}, has_checkpoint=False)
    control.record(0, {"step": 2})
    control.record(1, {"step": 100, "rank": 1})
    assert control.state().latest == {"step": 2, "loss": 2.0, "val_loss": 3.0}


def test_a_resize_stops_the_newest_group_and_not_the_next_one():
    control = ControlActor()
    control.request_resize()  # no worker polls yet
    for group in ("first", "second"):
        assert control.poll(group, 1, 0, request=None, next_step=None) == (None, None)
    control.request_resize()
    assert control.poll("first", 1, 0, request=None, next_step=None) == (None, None)
    assert control.poll("second", 1, 0, request=None, next_step=None) == (RESIZE, None)
    assert control.poll("third", 1, 0, request=None, next_step=None) == (None, None)


def test_ranks_agree_through_an_actor_that_has_died_between_their_polls():
    before, after = ControlActor(), ControlActor()
    before.poll("group", 2, 0, request=None, next_step=None)
    before.request_resize()
    assert before.poll("group", 2, 0, request=None, next_step=None) == (RESIZE, None)
    assert after.poll("group", 2, 0, request=RESIZE, next_step=4) == (RESIZE, None)
    assert after.poll("group", 2, 1, request=None, next_step=None) == (RESIZE, None)
    assert after.poll("group", 2, 1, request=RESIZE, next_step=5) == (RESIZE, 5)
    # The rank that knows the step polls on, for a rank that does not know it yet.
    third = ControlActor()
    assert third.poll("group", 2, 0, request=RESIZE, next_step=4) == (RESIZE, None)
    assert third.poll("group", 2, 1, request=RESIZE, next_step=5) == (RESIZE, 5)


def test_an_actor_that_has_died_gets_back_what_it_knew():
    before, after = ControlActor(), ControlActor()
    before.save("/run", 10)
    before.finish("done")
    before.request_stop("interrupt")
    before.record(0, {"step": 10, "loss": 2.0})
    after.save("/run", 20)
    after.record(0, {"step": 20})
    after.resume(before.state())
    state = after.state()
    assert state.saved == ("/run", 20)
    assert state.finished == ("done",)
    assert state.request == INTERRUPT
    assert state.latest == {"step": 20, "loss": 2.0}
    assert after.collect().actor != before.collect().actor


def test_failures_are_counted_from_the_newest_checkpoint_on():
    control = ControlActor()
    assert [control.count_failure() for _ in range(2)] == [1, 2]
    control.save("/run", 10)
    assert [control.count_failure() for _ in range(3)] == [1, 2, 3]
    control.save("/run", 10)  # the checkpoint that the workers continue from
    assert control.count_failure() == 4
    control.report({"loss": 1.0}, has_checkpoint=False)
    assert control.count_failure() == 5
    control.report({"loss": 1.0}, has_checkpoint=True)
    assert [control.count_failure() for _ in range(3)] == [1, 2, 3]


def test_a_resize_does_not_replace_the_reason_of_a_stop() -> None:
    control = ControlActor()
    control.request_stop("interrupt")
    assert control.poll("group", 1, 0, request=None, next_step=None) == (INTERRUPT, None)
    control.request_resize()
    assert control.poll("group", 1, 0, request=None, next_step=3) == (INTERRUPT, 3)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_first_request_of_a_group_stays(is_interrupted: bool) -> None:
    """After the death of the actor, the ranks know what they have agreed on, and the driver's request came later."""
    control = ControlActor()
    if is_interrupted:
        control.request_stop("interrupt")
    assert control.poll("group", 3, 2, request=PREEMPTION, next_step=None) == (PREEMPTION, None)
    assert control.poll("group", 3, 1, request=RESIZE, next_step=None) == (PREEMPTION, None)


@pytest.mark.parametrize(("control", "limit_s"), [(ControlActor, 15), (LocalControl, None)])
def test_workers_that_have_polled_count_as_running_until_the_limit(
    monkeypatch: pytest.MonkeyPatch, control: Any, limit_s: float | None
) -> None:
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(control_actor, "time", clock)
    actor = control()._actor if control is LocalControl else control()
    assert not actor.request_stop("interrupt")
    assert actor.collect().is_silent
    actor.poll("group", 1, 0, request=None, next_step=None)
    clock.now_s += 9 if limit_s is None else limit_s - 1
    actor.poll("group", 1, 0, request=None, next_step=None)
    clock.now_s += 9999 if limit_s is None else limit_s - 0.1
    assert actor.request_stop("interrupt")
    assert not actor.collect().is_silent
    clock.now_s += 0.1
    assert actor.request_stop("interrupt") == (limit_s is None)


@pytest.mark.usefixtures("restarted")
def test_an_actor_that_has_started_again_waits_for_polls_and_for_what_it_knew() -> None:
    control = ControlActor()
    assert control.count_failure() is None
    assert control.request_stop("interrupt")  # the workers are still there
    assert not control.collect().is_silent
    before = ControlActor()
    before.resume(before.state())
    assert [before.count_failure() for _ in range(3)] == [1, 2, 3]
    control.resume(before.state())
    assert control.count_failure() == 4


@pytest.mark.usefixtures("restarted")
def test_an_actor_that_dies_before_the_first_look_counts_failures_too() -> None:
    control = LocalControl()
    with forwarding(control, None):
        pass
    assert control.count_failure.remote() == 1


def test_two_deaths_of_the_actor_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_jax_launch._control.forwarding.COLLECT_EVERY_S", 0.01)
    control, num_deaths = CopyingControl(), threading.Semaphore(0)

    def die(rank: int, metrics: dict[str, Any]) -> None:
        if metrics["step"] < 3:
            control.die()
            control.record.remote(0, {"step": metrics["step"] + 1})
        num_deaths.release()

    control.save.remote("/run", 7)
    assert [count_failure(control) for _ in range(3)] == [1, 2, 3]
    with forwarding(control, die):
        control.record.remote(0, {"step": 1, "loss": 2.0})
        for _ in range(3):
            assert num_deaths.acquire(timeout=60)
    assert count_failure(control) == 4
    assert control.state.remote().saved == ("/run", 7)
    assert control.state.remote().latest == {"step": 3, "loss": 2.0}


def test_the_driver_renews_and_hears_of_silence_until_a_worker_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_jax_launch._control.forwarding.COLLECT_EVERY_S", 0.01)
    control, has_renewed, is_silent = LocalControl(), threading.Semaphore(0), threading.Event()
    with forwarding(control, None, renew=has_renewed.release, on_silence=is_silent.set):
        for _ in range(3):
            assert has_renewed.acquire(timeout=60)
        assert is_silent.wait(60)
        control.poll.remote("group", 1, 0, request=None, next_step=None)
        assert has_renewed.acquire(timeout=60)
        assert has_renewed.acquire(timeout=60)
        is_silent.clear()
        assert has_renewed.acquire(timeout=60)
        assert has_renewed.acquire(timeout=60)
    assert not is_silent.is_set()


def test_the_actor_of_a_lost_cluster_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ray_jax_launch._lost_cluster.ClusterWatch.loss", lambda watch, **_: "its raylet on this node has ended"
    )
    control, seen = LocalControl(), []
    with forwarding(control, lambda rank, metrics: seen.append(metrics)):
        control.record.remote(0, {"step": 7})
    assert seen == []


@pytest.mark.parametrize(
    ("loss", "errors"), [("its raylet on this node has ended", []), (None, [ActorDiedError])], ids=["ends", "stays"]
)
def test_an_actor_that_dies_is_an_error_unless_its_cluster_ends(
    monkeypatch: pytest.MonkeyPatch, loss: str | None, errors: list[type]
) -> None:
    """A raylet whose agent has died still answers: only the control store knows of its end."""

    class DeadControl(LocalControl):
        def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
            raise ActorDiedError

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: raised.append(hooked.exc_type))
    monkeypatch.setattr(
        "ray_jax_launch._lost_cluster.ClusterWatch.loss",
        lambda watch, *, is_suspected=False: loss if is_suspected else None,
    )
    with forwarding(DeadControl(), None):
        pass
    assert raised == errors


def test_what_a_loop_sends_last_is_forwarded_before_the_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    control, seen = LocalControl(), []
    caplog.set_level(logging.DEBUG, "ray_jax_launch")
    with forwarding(control, lambda rank, metrics: seen.append((rank, metrics))):
        control.record.remote(2, {"step": 7})
        control.log.remote("a line", logging.INFO)
        control.log.remote("a warning")
    assert seen == [(2, {"step": 7})]
    lines = [(record.levelno, record.message) for record in caplog.records]
    assert lines == [(logging.INFO, "a line"), (logging.WARNING, "a warning")]
    assert "collect-metrics" not in [thread.name for thread in threading.enumerate()]


def test_a_handler_of_a_signal_may_call_in_the_middle_of_a_call() -> None:
    control = LocalControl()

    class Metrics(dict[str, Any]):
        def values(self) -> Any:
            control.request_stop.remote("interrupt")
            return super().values()

    thread = threading.Thread(target=control.record.remote, args=(0, Metrics(step=1)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert control.state.remote().request == INTERRUPT


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_info_is_shown_only_while_a_launch_runs(capsys: pytest.CaptureFixture[str], level: int) -> None:
    logger = logging.getLogger("ray_jax_launch")
    before, logger.propagate = logger.level, False
    logger.setLevel(level)
    try:
        for number in range(3):
            with contextlib.suppress(KeyError), showing_info():
                logger.info("line %d", number)
                raise KeyError
            assert (logger.level, logger.handlers) == (level, [])
    finally:
        logger.propagate = True
        logger.setLevel(before)
    assert capsys.readouterr().err == "line 0\nline 1\nline 2\n"


def test_the_logging_of_a_program_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler = logging.getLogger("ray_jax_launch"), logging.NullHandler()
    before, logger.propagate = logger.level, False
    logger.addHandler(handler)
    try:
        with showing_info():
            assert (logger.level, logger.handlers) == (before, [handler])
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
    assert capsys.readouterr().err == ""


def test_the_actor_takes_nothing_from_the_workers_and_lives_on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def remote(actor: type) -> Any:
        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda **passed: (actor, given, passed)))

    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "ab" * 28))
    actor, options, passed = control_actor.start_control_actor(60.0)
    where = options.pop("scheduling_strategy")
    assert (actor, passed) == (ControlActor, {"hang_timeout_s": 60.0})
    assert (where.node_id, where.soft) == ("ab" * 28, False)
    assert options == {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
