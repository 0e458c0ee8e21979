"""Loops that hang: stopped workers, data that never comes, long work that is no hang. Real launches."""

import io
import logging
import os
import pdb
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ray.cloudpickle

from ray_jax_launch import (
    Checkpoints,
    LaunchError,
    Restarting,
    TrainingFailed,
    cpu,
    launch,
    log_metrics,
    mark_finished,
    stop_requested,
    watch_steps,
)
from ray_jax_launch._control.control_actor import ControlActor
from ray_jax_launch._control.session import current_session

# Workers cannot import this file: their functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

HANG_AT, LAST = 45, 60


def wait_for_data(how: str) -> None:
    """Hang this process, or only its loop."""
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(1e6)


def train(config: dict[str, Any]) -> Any:
    """Add ones on all workers. Rank 1 hangs at a step of the first start, or of each start."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rank, how = jax.process_index(), config["how"]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    ones = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), np.ones(1, np.float32))
    step_of = jax.jit(lambda total, ones: total + ones.sum())
    pids = Path(config["pids"])
    (pids / f"{rank}-{len([*pids.glob(f'{rank}-*')])}").write_text(str(os.getpid()))
    total = jax.device_put(jnp.zeros(()), NamedSharding(mesh, PartitionSpec()))
    with Checkpoints() as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:
            total = checkpoints.restore(start, {"state": {"total": total}})["state"]["total"]
        for step in range(start + 1, LAST + 1):
            if step == HANG_AT and rank == 1 and (config["always"] or not start) and how != "after the last step":
                wait_for_data(how)
            total = step_of(total, ones)
            time.sleep(0.1)
            if stop_requested(step, total):
                break
            if step % 20 == 0:
                checkpoints.save(step, {"state": {"total": total}}, metadata={})
            log_metrics({"step": step})
    if how == "after the last step" and rank == 1 and not start:
        time.sleep(5)  # the other has returned
        wait_for_data("stopped")
    return float(total)


@pytest.fixture
def run(cluster, tmp_path, caplog):
    """Return a function that launches the loop on two workers, and returns its result, the log and the events."""

    def run(how: str, *, always: bool = False, **options: Any) -> tuple[Any, list[str], list[Any]]:
        events: list[Any] = []
        (tmp_path / "pids").mkdir()
        config = {"how": how, "always": always, "pids": str(tmp_path / "pids")}
        with caplog.at_level(logging.WARNING, "ray_jax_launch"):
            result = launch(
                train,
                config,
                hardware=cpu(2),
                storage_path=tmp_path,
                name="run",
                on_event=events.append,
                hang_timeout_s=5,
                **options,
            )
        return result, [record.message for record in caplog.records], events

    return run


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.fault
def test_a_stopped_worker_is_killed_and_the_group_starts_again_from_its_checkpoint(run, tmp_path, record_property):
    record_property("fault", "SIGSTOP of a worker")
    record_property("lost", "steps since the last checkpoint")
    result, messages, events = run("stopped", max_failures=1)
    assert result.return_value == 2 * LAST
    stack, line = messages
    # The other worker waits for the step, or for the result of an earlier one.
    assert stack.startswith("stack of worker 0:\n  File ")
    assert ", in train\n" in stack
    assert "_with_save_events" not in stack
    what, _, consequence = line.partition("; ")
    assert what.startswith("no step for ")
    assert what.endswith("): worker 1 does not answer")
    # The other worker may have computed its part of the step before it waits.
    assert re.search(rf" after step ({HANG_AT - 1}|{HANG_AT}) \(usual: 0\.", what)
    assert consequence == "the workers start again (failure 1 of at most 1 without a new checkpoint)"
    assert events == [Restarting("failure", what, 1)]
    assert sorted(path.name for path in (tmp_path / "pids").iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    assert is_gone(int((tmp_path / "pids" / "1-0").read_text()))


@pytest.mark.slow
@pytest.mark.fault
def test_data_that_never_comes_restarts_the_group_with_the_stack_that_says_where(run, record_property):
    record_property("fault", "the data of a worker never come")
    record_property("lost", "steps since the last checkpoint")
    result, messages, events = run("data")
    assert result.return_value == 2 * LAST
    assert len(events) == 1
    stacks, line = [message for message in messages if message.startswith("stack of")], messages[-1]
    assert [stack.partition(":")[0] for stack in stacks] == ["stack of worker 0", "stack of worker 1"]
    assert ", in wait_for_data\n" in stacks[1]
    assert " (usual: 0." in line
    assert "), although all workers answer; the workers start again (failure 1 of at most 3 " in line


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_that_is_stopped_when_the_other_has_returned_starts_the_group_again(run, record_property):
    record_property("fault", "SIGSTOP of a worker after the last step, when the other has returned")
    record_property("lost", "steps since the last checkpoint")
    result, messages, events = run("after the last step", max_failures=1)
    assert result.return_value == 2 * LAST
    assert len(events) == 1
    (line,) = messages  # none of the workers can send a stack
    assert f" after step {LAST} (usual: 0." in line
    assert "): worker 1 does not answer; the workers start again (failure 1 of at most 1 " in line


@pytest.mark.slow
@pytest.mark.fault
def test_a_worker_that_is_stopped_in_each_start_ends_the_launch_after_max_failures(run, caplog, record_property):
    record_property("fault", "SIGSTOP of a worker at the same step of each start")
    record_property("lost", "steps since the last checkpoint; the launch fails")
    with pytest.raises(TrainingFailed):
        run("stopped", always=True, max_failures=1)
    lines = [record.message for record in caplog.records if record.getMessage().startswith("no step for ")]
    assert lines[0].endswith("; the workers start again (failure 1 of at most 1 without a new checkpoint)")
    assert lines[1].endswith("): worker 1 does not answer; the workers do not start again")


def train_with_long_work(config: dict[str, Any]) -> int:
    """One worker validates, and saves, for longer than any limit. The others wait for it."""
    import jax
    from jax.experimental import multihost_utils

    num_starts = 0
    with Checkpoints() as checkpoints, Path(config["starts"]).open("a") as file:
        file.write("start\n")
        for step in range(1, 60):
            time.sleep(0.1)
            assert not stop_requested(step)
            if step == 40:
                watch_steps(False)
                if jax.process_index() == 1:
                    time.sleep(35)
                multihost_utils.sync_global_devices("validated")
                watch_steps(True)
            if step == 50:
                items = {"state": {"step": np.array([step])}}
                checkpoints.save(step, items, metadata={})
                checkpoints.wait()
        num_starts += 1
        time.sleep(30 if jax.process_index() == 0 else 0)  # after the last step, while the other has returned
    return num_starts


@pytest.mark.slow
def test_a_validation_and_work_after_the_last_step_are_no_hang(cluster, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ray_jax_launch"):
        result = launch(
            train_with_long_work, {"starts": str(tmp_path / "starts")}, hardware=cpu(2), storage_path=tmp_path,
            name="run", hang_timeout_s=5, max_failures=0,
        )  # fmt: skip
    assert result.return_value == 1
    assert caplog.messages == []


class ImpatientActor(ControlActor):
    """The control actor of workers whose end takes five seconds at most, and not an hour."""

    def __init__(self, **options: Any) -> None:
        from ray_jax_launch._control import watchdog  # of its own process

        watchdog._PATIENCE, watchdog._LONGEST_END_S = 1, 5.0
        super().__init__(**options)


NOBODY_NOTICES_S = 90


def train_to_a_hang_at_the_end(config: dict[str, Any]) -> int:
    """In the first start, rank 1 joins a thread that hangs after the last step; in the second, after a stop request."""
    import jax
    from jax.experimental import multihost_utils

    rank, folder = jax.process_index(), Path(config["folder"])
    start = len([*folder.glob(f"{rank}-*")])
    (folder / f"{rank}-{start}").touch()
    for step in range(1, 1000 if start else 20):
        time.sleep(0.05)
        if start == 1 and rank == 1 and step == 20:
            os.kill(config["driver"], signal.SIGINT)
        if stop_requested(step):
            break
    if rank == 1 and start < 2:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(time.sleep, NOBODY_NOTICES_S)
    if start:
        multihost_utils.sync_global_devices("saved")
    return start


@pytest.mark.slow
@pytest.mark.fault
def test_a_hang_at_the_end_of_a_loop_restarts_the_group(cluster, tmp_path, monkeypatch, caplog, record_property):
    record_property("fault", "a worker hangs after the others have returned, and in the last save")
    record_property("lost", "steps since the last checkpoint")
    monkeypatch.setattr("ray_jax_launch._control.control_actor.ControlActor", ImpatientActor)
    events: list[Any] = []
    config = {"folder": str(tmp_path), "driver": os.getpid()}
    with caplog.at_level(logging.WARNING, "ray_jax_launch"), pytest.raises(KeyboardInterrupt):
        launch(
            train_to_a_hang_at_the_end, config, hardware=cpu(2), storage_path=tmp_path, name="run", hang_timeout_s=5,
            on_event=events.append,
        )  # fmt: skip
    after_return, after_stop = [event.text for event in events]
    assert re.fullmatch(r"no step for \S+ s after step 19 \(.*\), although worker 0 has returned", after_return)
    assert re.fullmatch(r"no step for \S+ s after step \d+ \(.*\), although all workers answer", after_stop)
    stacks = [message for message in caplog.messages if message.startswith("stack of")]
    assert [stack.partition(":")[0] for stack in stacks] == [f"stack of worker {rank}" for rank in (1, 0, 1)]
    assert ", in sync_global_devices\n" in stacks[1]
    assert all(", in train_to_a_hang_at_the_end\n    with ThreadPoolExecutor" in stacks[number] for number in (0, 2))


def test_work_that_must_end_is_told_to_the_watchdog(tmp_path):
    """A call of `Checkpoints`, and the work after `mark_finished` and after a stop request."""
    told: dict[str, tuple[bool, bool]] = {}

    def tell(when: str) -> None:
        heartbeat: Any = current_session().heartbeat
        told[when] = heartbeat.read().is_training, heartbeat.read().must_end

    def tell_in_a_save(step: int) -> bool:
        tell("in a save")
        return False

    def loop() -> None:
        with Checkpoints(num_to_keep=1, keep=tell_in_a_save) as checkpoints:
            for step in (1, 2):
                assert not stop_requested(step)
                checkpoints.save(step, {"state": {"step": np.array([step])}}, metadata={})
                tell("in a step")
        mark_finished()
        tell("after mark_finished")

    def loop_to_stop() -> None:
        assert not stop_requested(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested(2)
        tell("after a stop request")

    launch(loop, hardware="local", storage_path=tmp_path, name="run", hang_timeout_s=5)
    with pytest.raises(KeyboardInterrupt):
        launch(loop_to_stop, hardware="local", storage_path=tmp_path, name="stopped", hang_timeout_s=5)
    assert told == {
        "in a save": (False, True),
        "in a step": (True, False),
        "after mark_finished": (False, True),
        "after a stop request": (False, True),
    }


class GoesOn(logging.Handler):
    """Calls a function at the first log line with a text."""

    def __init__(self, text: str, go_on: Any) -> None:
        super().__init__()
        self.text, self.go_on = text, go_on

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.go_on()


@pytest.fixture
def launch_here(tmp_path, caplog, monkeypatch):
    """Return a function that runs a loop in this process, and calls a function at a log line."""
    monkeypatch.setattr("ray_jax_launch._control.watchdog._PATIENCE", 1)

    def launch_here(wait: Any, line: str, go_on: Any) -> Any:
        def loop() -> int:
            for step in range(1, 61):
                time.sleep(0.05)
                if step == 50:
                    wait()
                stop_requested(step)
            return 60

        caplog.set_level(logging.WARNING, "ray_jax_launch")
        logger, handler = logging.getLogger("ray_jax_launch"), GoesOn(line, go_on)
        logger.addHandler(handler)
        try:
            return launch(loop, hardware="local", storage_path=tmp_path, name="run", hang_timeout_s=5)
        finally:
            logger.removeHandler(handler)

    return launch_here


def test_a_hang_in_this_process_is_logged_with_its_stack_and_ends_nothing(launch_here, caplog):
    event = threading.Event()
    result = launch_here(lambda: event.wait(300), "stack of worker 0:", event.set)
    assert result.return_value == 60
    line, stack = caplog.messages
    assert line.startswith("no step for ")
    usual = re.search(r" after step 49 \(usual: (\S+) s\); this process cannot be restarted from outside$", line)
    assert usual, line
    assert 0.05 <= float(usual[1]) < 1  # a step sleeps 0.05 s, and takes longer on a busy machine
    assert ", in loop\n    wait()\n" in stack


def test_a_loop_in_a_debugger_is_no_hang(launch_here, caplog):
    reader, writer = os.pipe()
    with open(reader) as commands:  # noqa: PTH123 - a pipe
        debugger = pdb.Pdb(stdin=commands, stdout=io.StringIO(), nosigint=True)
        result = launch_here(debugger.set_trace, "in a debugger", lambda: os.write(writer, b"continue\n"))
    os.close(writer)
    assert result.return_value == 60
    (line,) = caplog.messages
    assert line.endswith(": worker 0 is in a debugger; nothing is restarted")


def test_a_timeout_below_five_seconds_is_rejected(tmp_path):
    with pytest.raises(LaunchError, match=r"^hang_timeout_s must be a number of at least 5, got 4\.9\. Leave it out"):
        launch(lambda: None, hardware="local", storage_path=tmp_path, name="run", hang_timeout_s=4.9)
