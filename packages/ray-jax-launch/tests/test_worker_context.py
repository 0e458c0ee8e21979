"""A loop in a worker of a group, without a cluster: the worker is this process."""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.experimental.tqdm_ray import RAY_TQDM_MAGIC
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from ray_jax_launch import (
    LaunchError,
    log_metrics,
    log_to_driver,
    mark_finished,
    stop_pending,
    stop_requested,
    watch_steps,
)
from ray_jax_launch._control.control_actor import LocalControl, StopRequest
from ray_jax_launch._control.session import Session, current_session
from ray_jax_launch._train import worker_context
from ray_jax_launch._train.failures import Preempted, Resized, fingerprint, first_failure
from ray_jax_launch._train.worker_context import run_loop


@pytest.fixture
def rank_2_of_3() -> Iterator[None]:
    """Let this process be a worker, which is the first one on its node."""
    set_train_fn_utils(LocalTrainFnUtils("run", {}, world_size=3, world_rank=2, local_rank=0, node_rank=1))
    handlers = {name: [*logging.getLogger(name).handlers] for name in ("ray_jax_launch", "a_package")}
    yield
    set_train_fn_utils(None)
    for name, before in handlers.items():
        logging.getLogger(name).handlers[:] = before


@pytest.fixture
def session(rank_2_of_3: None) -> Session:
    return Session(LocalControl(), None, "a run", None, is_local=True)


def lines_of(session: Session) -> list[tuple[int, str]]:
    """Return what was sent to the driver's log, without the line on the devices."""
    return [one for one in session.control.collect.remote().lines if not one[1].startswith("worker 2 of 3")]


def fail_at(session: Session, step: int | None) -> Exception:
    """Return the error of a loop that fails after it has passed a step, as the driver gets it."""

    def loop() -> None:
        for number in range(0 if step is None else step + 1):
            assert not stop_requested(number)
        raise KeyError("no such thing")

    with pytest.raises(KeyError) as failed:
        run_loop(loop, session)
    return failed.value


@pytest.mark.parametrize(("step", "others"), [(3, [5, None]), (None, [3])])
def test_only_the_same_failure_at_the_same_step_has_the_same_fingerprint(
    rank_2_of_3: None, step: int | None, others: list[int | None]
) -> None:
    found = []
    for one in (step, step, *others):
        failure = fail_at(Session(LocalControl(), None, "a run", None, is_local=True), one)
        rank, details = first_failure({7: failure})
        assert rank == 7
        assert "in loop" in details
        assert "KeyError: 'no such thing'" in details
        assert details.endswith("'" if one is None else f"at step {one}")
        found.append(fingerprint(failure, details))
    assert found[0] == found[1]
    assert found[0] not in found[2:]


@pytest.mark.parametrize("prints", [True, False])
def test_complete_lines_reach_the_driver_with_the_rank(
    session: Session, prints: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    session.prints = prints
    texts = ["one", "\ntwo\nthr", "ee\n", "10%\r20%\r", "\n", f"{RAY_TQDM_MAGIC}{{}}\n", "\n", "no end"]

    def loop() -> list[int]:
        return [sys.stdout.write(text) for text in texts]

    assert run_loop(loop, session) == [len(text) for text in texts]
    sent = [(logging.INFO, f"worker 2: {line}") for line in ("one", "two", "three", "20%", "")]
    assert lines_of(session) == (sent if prints else [])
    assert capsys.readouterr().out == "".join(texts)


def test_a_long_line_without_its_end_reaches_the_driver_after_the_lines_before_it(session: Session) -> None:
    session.prints = True
    texts = ["a", f"b\nc\n{'x' * 10_000}", "y\n"]
    run_loop(lambda: [sys.stdout.write(text) for text in texts], session)
    expected = ["ab", "c", "x" * 10_000, "y"]
    assert lines_of(session) == [(logging.INFO, f"worker 2: {line}") for line in expected]


def test_a_flush_of_the_output_reaches_the_stream(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session.prints, flushed = True, []
    stream = SimpleNamespace(write=len, flush=lambda: flushed.append(1))
    monkeypatch.setattr(sys, "stdout", stream)

    def loop() -> list[int]:
        print("a line", flush=True)  # noqa: T201
        return [*flushed]

    assert run_loop(loop, session) == [1]
    assert sys.stdout is stream


def test_warnings_of_a_worker_reach_the_driver_and_nothing_less(rank_2_of_3: None) -> None:
    session = Session(LocalControl(), None, "a run", None)

    def loop() -> None:
        log_to_driver("a_package")
        log_to_driver("a_package")  # as a loop that is called twice
        for name in ("ray_jax_launch", "a_package.a_module", "another"):
            logger = logging.getLogger(name)
            logger.info("an info of %s", name)
            logger.warning("a warning of %s", name)
            logger.error("an error of %s", name)

    run_loop(loop, session)
    names = ("ray_jax_launch", "a_package.a_module")
    assert lines_of(session) == [
        (level, f"{what} of {name}")
        for name in names
        for level, what in ((logging.WARNING, "a warning"), (logging.ERROR, "an error"))
    ]


class Poller:
    """A poller in a state that it may have when the loop returns."""

    def __init__(self, reason: Any, *, acknowledged: bool) -> None:
        self.request = None if reason is None else StopRequest(reason)
        self.acknowledged, self.step = acknowledged, 9


@pytest.fixture
def barriers(monkeypatch: pytest.MonkeyPatch, session: Session) -> list[bool]:
    """For each wait for the other ranks, whether the driver knows that the loop has returned."""
    found: list[bool] = []
    state = session.control.state.remote
    monkeypatch.setattr("ray.train.collective.barrier", lambda: found.append(state().is_acknowledged))
    return found


@pytest.mark.parametrize(
    ("reason", "acknowledged", "error"),
    [
        (None, False, None),
        ("interrupt", True, None),
        ("interrupt", False, None),
        ("preemption", True, Preempted),
        ("preemption", False, None),
        ("resize", True, Resized),
        ("resize", False, None),
    ],
)
def test_only_a_loop_that_has_seen_the_request_ends_by_it_once_all_ranks_have_saved(
    session: Session, barriers: list[bool], reason: str | None, acknowledged: bool, error: type[Exception] | None
) -> None:
    def loop() -> int:
        current_session().poller = Poller(reason, acknowledged=acknowledged)  # pyright: ignore[reportAttributeAccessIssue]
        return 7

    if error is None:
        assert run_loop(loop, session) == 7
    else:
        with pytest.raises(error, match="saved at step 9"):
            run_loop(loop, session)
    assert session.control.state.remote().is_acknowledged == (acknowledged and reason == "interrupt")
    assert barriers == ([] if error is None else [False])


def test_a_failed_save_is_raised_once_and_the_next_one_later(session: Session) -> None:
    session.failed_saves += [OSError("the first"), OSError("the second")]

    raised: list[str] = []

    def loop() -> int:
        for _ in range(2):
            with pytest.raises(OSError, match="the ") as failed:
                stop_requested(1)
            raised.append(str(failed.value))
        return stop_requested(1)

    assert run_loop(loop, session) is False
    assert sorted(raised) == ["the first", "the second"]


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (2**53 + 1, 2**53 + 1),
        (np.int64(2**53 + 1), 2**53 + 1),
        (np.float32(0.5), 0.5),
        (np.ones(()), 1.0),
        (True, True),
        ("saving", "saving"),
    ],
    ids=str,
)
def test_metrics_are_plain_numbers_of_the_rank(session: Session, value: Any, sent: Any) -> None:
    given = {"a": value, "step": 3}
    run_loop(lambda: log_metrics(given), session)
    collected = session.control.collect.remote()
    assert collected.metrics == [(2, {"a": sent, "step": 3})]
    assert [type(one) for one in collected.metrics[0][1].values()] == [type(sent), int]
    assert given["a"] is value


def test_each_metric_has_one_gauge_with_the_tags_of_run_and_rank(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, values = [], []

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name
            made.append((name, tag_keys))

        def set(self, value: float, tags: dict[str, str]) -> None:
            values.append((self.name, value, tags))

    monkeypatch.setattr(worker_context, "Gauge", Gauge)
    monkeypatch.setattr("ray.is_initialized", lambda: True)

    def loop() -> None:
        log_metrics({"tokens/s": 3.5, "loss": 7})
        log_metrics({"tokens/s": 9.5})
        log_metrics({"loss": 1.0, "phase": "saving"})  # a message

    run_loop(loop, session)
    assert made == [("jax_tokens_s", ("run", "rank")), ("jax_loss", ("run", "rank"))]
    tags = {"run": "a run", "rank": "2"}
    assert values == [("jax_tokens_s", 3.5, tags), ("jax_loss", 7, tags), ("jax_tokens_s", 9.5, tags)]


def test_a_mark_without_a_value_is_a_mark_too(session: Session) -> None:
    run_loop(mark_finished, session)
    assert session.control.state.remote().finished == (None,)


@pytest.mark.parametrize("num_looks", [0, 3, None])
def test_a_shared_folder_may_show_its_marker_late(
    rank_2_of_3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_looks: int | None
) -> None:
    marker, waited = tmp_path / "run" / ".launch-1", []
    marker.parent.mkdir()

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        waited.append(seconds)
        if len(waited) == num_looks:
            marker.touch()

    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s, sleep=sleep)
    monkeypatch.setattr(worker_context, "time", clock)
    session = Session(LocalControl(), marker.parent, "run", marker, is_local=True)
    if num_looks == 0:
        marker.touch()
    if num_looks is None:
        with pytest.raises(LaunchError, match=rf"^storage_path must be a folder .*, got {tmp_path}, which is another"):
            run_loop(lambda: 7, session)
        assert 10 <= clock.now_s - 1000 < 11
    else:
        assert run_loop(lambda: 7, session) == 7
        assert len(waited) == num_looks


@pytest.mark.parametrize("module", [None, SimpleNamespace(backends_are_initialized=lambda: False), SimpleNamespace()])
def test_a_loop_that_did_not_use_jax_is_not_made_to_use_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    name, ended = "jax._src.xla_bridge", threading.Event()
    if module is None:
        monkeypatch.delitem(sys.modules, name, raising=False)
    else:
        monkeypatch.setitem(sys.modules, name, module)
    ended.set()
    worker_context._log_devices(session.control, "worker 7", ended)
    assert session.control.collect.remote().lines == [(logging.INFO, "worker 7, no device (the loop did not use jax)")]


def test_the_session_of_a_loop_is_its_own(session: Session) -> None:
    find: Callable[[], Session] = current_session
    assert run_loop(find, session) is session
    assert not session.gauges


def test_the_executors_of_ray_data_call_as_seldom_as_the_group_is_large(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(worker_context, "limit_data_calls", sizes.append)
    run_loop(lambda: None, session)
    assert sizes == [3]


@pytest.mark.parametrize("fails", [False, True])
def test_the_watchdog_hears_of_computed_steps_of_other_work_and_of_the_end(session: Session, fails: bool) -> None:
    session.is_watched, ready = True, set[int]()
    told: list[Any] = []

    def loop() -> None:
        heartbeat: Any = current_session().heartbeat
        for step in (7, 9):
            array: Any = SimpleNamespace(is_ready=lambda step=step: step in ready)
            assert not stop_requested(step, array)
        for changes in (ready.clear, lambda: ready.add(7), lambda: watch_steps(False), lambda: watch_steps(True)):
            changes()
            told.append(heartbeat.read()[:3])
        assert not stop_requested(11)  # without an array, the step counts as computed
        ready.add(9)
        told.append(heartbeat.read()[:3])
        if fails:
            raise KeyError("no such thing")

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        run_loop(loop, session)
    assert told == [(0, -1, True), (1, 7, True), (1, 7, False), (1, 7, True), (3, 11, True)]
    (worker,) = session.control._actor._watchdog._workers.values()
    assert (worker.beat.has_ended, worker.beat.num_computed) == (True, 3)


def test_without_a_watchdog_there_is_no_heartbeat(session: Session) -> None:
    run_loop(lambda: watch_steps(False), session)
    assert session.heartbeat is None


def test_a_pending_stop_is_known_without_an_answer_to_it(session: Session) -> None:
    request = session.control.request_stop.remote
    found: list[bool] = []

    def loop() -> None:
        found.append(stop_pending())  # before the first step
        assert not stop_requested(3)
        found.append(stop_pending())
        request("failure", "the disk is full")
        found.extend(stop_pending() for _ in range(2))

    run_loop(loop, session)
    assert found == [False, False, True, True]
    assert not session.control.state.remote().is_acknowledged
