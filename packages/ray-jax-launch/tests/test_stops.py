"""Stop requests, and the deaths of the processes that carry them. Real launches on a cluster of this machine."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig

from ray_jax_launch import (
    JaxTrainer,
    Restarting,
    StopRequestedError,
    TrainingFailed,
    cpu,
    latest_step,
    launch,
    request_stop,
)
from ray_jax_launch._control.control_actor import StopRequest, answer, count_failure, start_control_actor
from ray_jax_launch._control.forwarding import forwarding
from ray_jax_launch._control.interrupt import Interrupt

pytestmark = pytest.mark.usefixtures("cluster")

# Workers cannot import this file: their functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def save_when_asked(config):
    """Train without end, until a stop is requested."""
    import jax
    import jax.numpy as jnp

    from ray_jax_launch import Checkpoints, log_metrics, stop_requested

    log_metrics({"pid": os.getpid()})
    with Checkpoints() as checkpoints:
        step = checkpoints.latest_step() or 0
        while True:
            step += 1
            time.sleep(0.02)
            log_metrics({"step": step})
            if config["polls"] and stop_requested(step):
                checkpoints.save(step, {"state": {"step": jnp.int32(step)}}, metadata={})
                return jax.process_index()


@pytest.mark.slow
@pytest.mark.parametrize("polls", [True, False])
def test_ctrl_c_lets_a_loop_that_polls_save_and_ends_any_other(tmp_path, polls, caplog):
    seen = []

    def interrupt_at_20(rank, metrics):
        seen.append(metrics.get("step", 0))
        if seen[-1] == 20:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt, match="to continue" if polls else "^$"),
        caplog.at_level(logging.WARNING, "ray_jax_launch"),
    ):
        launch(
            save_when_asked,
            {"polls": polls},
            hardware=cpu(1),
            storage_path=tmp_path,
            name="run",
            on_metrics=interrupt_at_20,
        )
    assert signal.getsignal(signal.SIGINT) == before
    saved = latest_step(tmp_path / "run" / "checkpoints")
    if polls:
        assert saved is not None
        assert saved == seen[-1]
        assert saved >= 20
        assert [record.message for record in caplog.records if record.name == "ray_jax_launch"] == [
            "interrupted: the workers save what they have; press Ctrl-C again to stop at once"
        ]
    else:
        assert saved is None


def run_until_asked_by_the_control_actor(config):
    """Run until a stop is requested, in a worker that polls hourly."""
    import jax

    from ray_jax_launch import log_metrics, stop_requested
    from ray_jax_launch._control import stop_poller

    setattr(stop_poller, "_POLL_EVERY_S", 3600.0)  # noqa: B010 - in the worker's process
    step = 0
    while step < 10_000:
        step += 1
        time.sleep(0.02)
        log_metrics({"step": step})
        if stop_requested(step):
            break
    Path(config["folder"], f"stopped-{jax.process_index()}").write_text(str(step))


def test_workers_that_poll_hourly_stop_at_once_at_one_step(tmp_path):
    """The ranks of a group of 1,000 poll once in 50 s."""
    requested_s = []

    def interrupt_at_100(rank, metrics):
        if metrics["step"] == 100 and not requested_s:
            requested_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    loop, config = run_until_asked_by_the_control_actor, {"folder": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt, match="to continue"):
        launch(loop, config, hardware=cpu(2), storage_path=tmp_path, name="run", on_metrics=interrupt_at_100)
    assert time.monotonic() - requested_s[0] < 60
    assert 100 < int((tmp_path / "stopped-0").read_text()) == int((tmp_path / "stopped-1").read_text()) < 10_000


@pytest.mark.slow
@pytest.mark.fault
def test_ctrl_c_waits_for_a_worker_that_has_stood_still(tmp_path, record_property):
    record_property("fault", "Ctrl-C while a worker has stood still for six seconds (SIGSTOP)")
    record_property("lost", "nothing: it saves when it goes on")
    seen, pids = [], []

    def note(rank, metrics):
        pids.extend([metrics["pid"]] if "pid" in metrics else [])
        seen.extend([metrics["step"]] if "step" in metrics else [])

    def hold_the_worker():
        while not (pids and seen):
            time.sleep(0.1)
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(6)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2)
        os.kill(pids[0], signal.SIGCONT)

    thread = threading.Thread(target=hold_the_worker)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="to continue"):
        launch(save_when_asked, {"polls": True}, hardware=cpu(1), storage_path=tmp_path, name="run", on_metrics=note)
    thread.join()
    assert latest_step(tmp_path / "run" / "checkpoints") == seen[-1]


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_signal_ends_a_launch_whose_loop_does_not_poll(number, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)  # the actor's answer may take a second
    monkeypatch.setattr("ray_jax_launch._control.interrupt.time", clock)
    control, before = start_control_actor(), signal.getsignal(number)
    interrupt = Interrupt(control)
    interrupt.install()
    try:
        assert signal.getsignal(number) != before
        with pytest.raises(SystemExit):
            signal.raise_signal(number)
        signal.raise_signal(number)  # of the same stop: the launch is already ending
    finally:
        interrupt.restore()
        ray.kill(control)
    assert signal.getsignal(number) == before


def test_a_process_that_ignores_sighup_ignores_it_during_a_launch_too():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    control = start_control_actor()
    interrupt = Interrupt(control)
    interrupt.install()
    try:
        signal.raise_signal(signal.SIGHUP)
        assert answer(control.state.remote()).request is None
    finally:
        interrupt.restore()
        ray.kill(control)
        signal.signal(signal.SIGHUP, before)


def test_only_a_second_ctrl_c_after_a_second_does_not_wait_for_a_loop_that_polls(monkeypatch):
    now_s = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr("ray_jax_launch._control.interrupt.time", clock)
    control = start_control_actor()
    poll = partial(control.poll.remote, "group", 1, 0, request=None, next_step=None)
    assert ray.get(poll()) == (None, None)
    interrupt = Interrupt(control)
    interrupt.install()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert ray.get(poll()) == (StopRequest("interrupt"), None)
        now_s += 100
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        now_s += 0.5
        signal.raise_signal(signal.SIGINT)
        now_s += 0.6
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)
    finally:
        interrupt.restore()
        ray.kill(control)


def fail_when_asked(config):
    from ray_jax_launch import log_metrics, stop_requested

    step = 0
    while True:
        step += 1
        log_metrics({"step": step})
        assert not stop_requested(step)
        time.sleep(0.02)


@pytest.mark.slow
def test_the_driver_can_make_a_launch_fail(tmp_path):
    def request(rank, metrics):
        if metrics["step"] == 5:
            request_stop("the tokens are damaged")

    with pytest.raises(StopRequestedError) as failed:
        launch(fail_when_asked, {}, hardware=cpu(2), storage_path=tmp_path, name="run", on_metrics=request)
    assert str(failed.value) == "the tokens are damaged"


def print_much():
    import sys

    sys.stdout.write("hello from the loop\n")
    for text in ("x" * 5000, "x" * 5000, "y\n"):
        sys.stdout.write(text)
    for step in range(20_000):
        sys.stdout.write(f"step {step}\r")
    held = len(getattr(sys.stdout, "_held"))  # noqa: B009 - of the stream that replaces standard output
    sys.stdout.write("\nthe end\r\n")
    return held


def test_what_a_loop_prints_is_logged_and_a_long_line_is_not_held(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "ray_jax_launch"):
        result = launch(print_much, hardware=cpu(1), storage_path=tmp_path, name="run")
    printed = [record.message for record in caplog.records if record.message.startswith("worker 0: ")]
    lines = ["hello from the loop", "x" * 10_000, "y", "step 19999", "the end"]
    assert printed == [f"worker 0: {line}" for line in lines]
    assert result.return_value < 30


def save_late_on_rank_1(config):
    """Stop for a preempted node, and ask only at every tenth step. Rank 1 is slower, and far behind rank 0.

    Rank 1 saves two seconds after rank 0. After another start, return.
    """
    import jax
    import ray.util

    from ray_jax_launch import stop_requested
    from ray_jax_launch._control.session import current_session

    rank, saved = jax.process_index(), Path(config["saved"])
    if saved.exists():
        return
    group = ray.util.get_current_placement_group()
    assert group is not None
    noticed, poll = StopRequest("preemption"), current_session().control.poll.remote
    for step in range(0, 20_000, 10):
        time.sleep(0.1 if rank == 1 else 0.02)
        if rank == 0 and step == 300:
            ray.get(poll(group.id.hex(), 2, rank, request=noticed, next_step=None))
        if stop_requested(step):
            break
    else:
        raise AssertionError("the ranks did not stop")
    if rank == 1:
        time.sleep(2)
    saved.with_name(f"saved-{rank}").write_text(str(step))
    if rank == 1:
        saved.touch()


@pytest.mark.fault
def test_a_launch_ends_at_its_last_preemption_after_every_rank_has_saved(tmp_path, record_property):
    record_property("fault", "one preemption more than max_preemption_failures, and a rank that saves late")
    record_property("lost", "nothing: it ends, with its checkpoints")
    failures = FailureConfig(max_failures=3, max_preemption_failures=0)
    trainer = JaxTrainer(
        save_late_on_rank_1,
        train_loop_config={"saved": str(tmp_path / "saved")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), failure_config=failures),
    )
    with pytest.raises(TrainingFailed, match="saved at step"):
        trainer.fit()
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text()


def train_slowly(config):
    """Save every ten steps, until the step that a file names."""
    import jax

    from ray_jax_launch import Checkpoints, log_metrics, stop_requested

    last = Path(config["last"])
    with Checkpoints() as checkpoints:
        step = checkpoints.latest_step() or 0
        log_metrics({"start": step, "step": step})
        while step < (int(last.read_text()) if last.exists() else 10_000):
            step += 1
            time.sleep(0.02)
            log_metrics({"step": step})
            stop = stop_requested(step)
            if stop or step % 10 == 0:
                checkpoints.save(step, {"state": {"step": step}}, metadata={})
                checkpoints.wait()
            if stop:
                break
    return jax.process_count()


def kill_process(title):
    """Kill the process of this cluster whose title begins with a text."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}
    (victim,) = [
        int(pid) for pid, _, args in rows if args.startswith(title) and parents.get(parents[int(pid)]) == os.getpid()
    ]
    os.kill(victim, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.fault
def test_a_launch_survives_the_death_of_the_control_actor(tmp_path, caplog, record_property):
    record_property("fault", "SIGKILL of the control actor, then Ctrl-C")
    record_property("lost", "nothing")
    seen = []

    def kill_then_interrupt(rank, metrics):
        seen.append(metrics["step"])
        if metrics["step"] == 20:
            kill_process("ray::ControlActor")
        if metrics["step"] > 60 and sum(step > 60 for step in seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    config = {"last": str(tmp_path / "last")}
    with (
        pytest.raises(KeyboardInterrupt, match="to continue"),
        caplog.at_level(logging.INFO, "ray_jax_launch"),
    ):
        launch(train_slowly, config, hardware=cpu(2), storage_path=tmp_path, name="run", on_metrics=kill_then_interrupt)
    messages = [record.message for record in caplog.records]
    assert messages.count("the control actor died, and has started again") == 1
    saved = latest_step(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved == max(seen)


@pytest.mark.slow
@pytest.mark.fault
def test_the_workers_start_again_after_the_death_of_rays_controller(tmp_path, caplog, record_property):
    record_property("fault", "SIGKILL of Ray Train's controller, twice")
    record_property("lost", "steps since the last checkpoint")
    starts, killed, events = [], [], []

    def kill_twice(rank, metrics):
        if "start" in metrics and rank == 0:
            starts.append(metrics["start"])
        if rank == 0 and len(killed) < len(starts) and metrics["step"] > starts[-1] + 15:
            if len(killed) == 2:
                # Both ranks must see the file before they are there.
                (tmp_path / "new").write_text(str(metrics["step"] // 10 * 10 + 50))
                (tmp_path / "new").rename(tmp_path / "last")
            else:
                kill_process("ray::TrainController.run")
            killed.append(metrics["step"])

    config = {"last": str(tmp_path / "last")}
    with caplog.at_level(logging.WARNING, "ray_jax_launch"):
        result = launch(
            train_slowly, config, hardware=cpu(2), storage_path=tmp_path, name="run", on_metrics=kill_twice,
            on_event=events.append, max_failures=1,
        )  # fmt: skip
    assert result.return_value == 2
    assert events == [Restarting("failure", "Ray Train's controller died", 1)] * 2
    assert [start >= step - 16 for start, step in zip(starts[1:], killed, strict=False)] == [True, True]
    assert [record.message for record in caplog.records if record.name == "ray_jax_launch"] == 2 * [
        "Ray Train's controller died; the workers start again (failure 1 of at most 1 without a new checkpoint)"
    ]


@pytest.mark.fault
def test_the_death_of_the_control_actor_forgets_no_failure(record_property):
    record_property("fault", "death of the control actor and of a worker at once, as by Ray's memory monitor")
    record_property("lost", "steps since the last checkpoint")
    control = start_control_actor()
    with forwarding(control, None):
        assert count_failure(control) == 1
        answer(control.save.remote("/run", 10))
        assert [count_failure(control), count_failure(control)] == [1, 2]
        time.sleep(1.5)  # the driver collects every half second
        first = answer(control.collect.remote()).actor
        ray.kill(control, no_restart=False)
        while answer(control.collect.remote()).actor == first:
            time.sleep(0.05)
        assert count_failure(control) == 3
