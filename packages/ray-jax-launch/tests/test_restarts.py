"""Restarts: failures that a launch retries, and failures that end it. Real launches on a cluster of this machine."""

import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
import ray.cloudpickle
import ray.exceptions
from ray.train import ControllerError, PreemptionError, TrainingFailedError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.preemption import PreemptionInfo

from ray_jax_launch import DistributedConfig, LaunchError, OutOfMemoryError, TrainingFailed, cpu, launch
from ray_jax_launch._control.control_actor import start_control_actor
from ray_jax_launch._train.backend import _DistributedBackend
from ray_jax_launch._train.failures import Preempted, Resized, note_traceback, to_raise
from ray_jax_launch._train.restart_policy import RestartPolicy

pytestmark = pytest.mark.usefixtures("cluster")

# Workers cannot import this file: their functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class UnluckyBackend(_DistributedBackend):
    """At the first start another program has taken the free port."""

    def choose_coordinator(self, worker_group: Any) -> str:
        taken = Path(os.environ["TAKEN_PORT"])
        if not taken.exists():
            return super().choose_coordinator(worker_group)
        port = taken.read_text()
        taken.unlink()
        return f"127.0.0.1:{port}"


@dataclass
class UnluckyConfig(DistributedConfig):
    @property
    def backend_cls(self):
        return UnluckyBackend


def fail_then_finish(config):
    """Rank 0 fails to read at first. Then it finishes, and is killed while it does optional work."""
    import jax
    from jax.experimental import multihost_utils

    from ray_jax_launch import mark_finished

    multihost_utils.sync_global_devices("joined")
    if jax.process_index() == 0:
        starts = Path(config["starts"])
        with starts.open("a") as file:
            file.write(f"{time.time()}\n")
        if len(starts.read_text().splitlines()) == 1:
            raise OSError("stale file handle")
        mark_finished("all that matters")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_survives_a_taken_port_a_read_error_and_a_death_after_its_end(
    tmp_path, caplog, monkeypatch, record_property
):
    record_property("fault", "port of the rendezvous taken; read error in the loop; SIGKILL after the last step")
    record_property("lost", "nothing")
    # The controller, which chooses the port, gets these variables from the driver.
    faults = {"TAKEN_PORT": str(tmp_path / "port")}
    monkeypatch.setattr("ray.train.v2.api.data_parallel_trainer.get_env_vars_to_propagate", lambda: dict(faults))
    with socket.socket() as taken, caplog.at_level(logging.WARNING, "ray_jax_launch"):
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        (tmp_path / "port").write_text(str(taken.getsockname()[1]))
        result = launch(
            fail_then_finish,
            {"starts": str(tmp_path / "starts")},
            hardware=cpu(2),
            storage_path=tmp_path,
            name="run",
            backend=UnluckyConfig(),
            max_failures=2,
        )
    assert result.return_value == "all that matters"
    assert len((tmp_path / "starts").read_text().splitlines()) == 2
    joining, reading, end = [record.message for record in caplog.records if record.name == "ray_jax_launch"]
    # Either rank 0 fails first, or rank 1 dies first, which had joined the other program.
    assert joining.startswith("the workers could not start: jax.distributed.initialize: ")
    assert joining.endswith("; the workers start again (failure 1 of at most 2 without a new checkpoint)")
    what = "worker 0 failed: OSError: stale file handle; the workers start again"
    assert reading == f"{what} (failure 2 of at most 2 without a new checkpoint)"
    assert end.startswith("worker 0 died, or no longer answers; this was after the training had ended")


def fail_at_step_3(config):
    from ray_jax_launch import PermanentError, stop_requested

    with Path(config["starts"]).open("a") as file:
        file.write("start\n")
    for step in range(1, 4):
        assert not stop_requested(step)
    if config["error"] == "program":
        raise KeyError("no such thing")
    if config["error"] == "permanent":
        raise PermanentError("the loss is not finite")
    raise LaunchError("data must be on every node, got none. Copy it")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("error", "raised", "num_starts"),
    [
        ("program", TrainingFailed, 2),
        ("permanent", TrainingFailed, 1),
        ("input", LaunchError, 1),
    ],
)
def test_a_failure_that_would_happen_again_ends_the_launch(
    tmp_path, caplog, record_property, error, raised, num_starts
):
    record_property("fault", f"a loop fails in the same way at the same step ({error} error)")
    record_property("lost", "nothing: it ends, with its checkpoints")
    starts = tmp_path / "starts"
    with pytest.raises(raised) as failed, caplog.at_level(logging.WARNING, "ray_jax_launch"):
        launch(
            fail_at_step_3, {"starts": str(starts), "error": error}, hardware=cpu(1), storage_path=tmp_path, name="run"
        )
    assert len(starts.read_text().splitlines()) == num_starts
    if error == "input":
        assert str(failed.value) == "data must be on every node, got none. Copy it"
    if error == "program":
        again = caplog.records[-1].message
        assert again.endswith("the workers do not start again, because they failed in the same way before")


REMEDY = "Use a smaller batch or model, more gradient accumulation steps, or more devices to shard it."
# As Ray 2.60 writes it.
KILLED = "1 worker(s) were killed due to the node running low on memory. Memory on the node was 23GB used / 23GB limit"


def take_more_on_rank_1(config):
    """Rank 1 cannot allocate memory, and rank 0 waits for rank 1."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("joined")
    if jax.process_index() == 1:
        jnp.ones(10**13)
    multihost_utils.sync_global_devices("never")


@pytest.mark.slow
@pytest.mark.fault
def test_an_array_that_no_device_can_hold_ends_the_launch_at_once(tmp_path, caplog, record_property):
    record_property("fault", "a loop allocates 40 TB")
    record_property("lost", "nothing: it ends at once, with its checkpoints")
    with pytest.raises(OutOfMemoryError) as failed:
        launch(take_more_on_rank_1, {}, hardware=cpu(2), storage_path=tmp_path, name="run")
    assert str(failed.value) == (
        "worker 1 has too little memory for the training loop: RESOURCE_EXHAUSTED: Out of memory allocating "
        f"40000000000000 bytes. {REMEDY}"
    )
    assert "in take_more_on_rank_1" in failed.value.__notes__[0]
    assert not [record.message for record in caplog.records if "start again" in record.message]


def raised(action):
    """Return the exception of an action, as a worker sends it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    note_traceback(caught.type, caught.value, caught.tb)
    return caught.value


def died(cause):
    return WorkerHealthCheckFailedError("A worker health check failed.", failure=cause)


@pytest.fixture
def control():
    """A control actor."""
    control = start_control_actor()
    yield control
    ray.kill(control)


@pytest.fixture
def decide(control):
    """Return a function from the failures of a group, by rank, to the decision of the policy."""
    policy = RestartPolicy(control, max_failures=3, wait_for_resources_s=0)

    def decide(*failures):
        error = failures[0]
        if not isinstance(error, TrainingFailedError):
            error = WorkerGroupError("", dict(enumerate(failures)))
        return policy.make_decision(error)

    return decide


@pytest.mark.parametrize(
    ("allocate", "line"),
    [
        (lambda: jnp.ones(10**13), "RESOURCE_EXHAUSTED: Out of memory allocating 40000000000000 bytes"),
        (lambda: np.ones(10**14), "Unable to allocate 728. TiB for an array with shape (100000000000000,)"),
        (lambda: bytearray(10**15), "MemoryError"),
    ],
    ids=["jax", "numpy", "python"],
)
def test_a_loop_whose_memory_cannot_be_allocated_is_not_restarted(decide, allocate, line):
    failure = raised(allocate)
    other = raised(lambda: jax.block_until_ready(jax.jit(lambda x: x)(1)) and 1 / 0)
    # Other ranks may die or fail because of it.
    failures = [other, died(ray.exceptions.ActorDiedError()), failure]
    assert decide(*failures) == FailureDecision.RAISE
    error = to_raise(dict(enumerate(failures)), cpu(3), "/logs")
    assert isinstance(error, OutOfMemoryError)
    assert str(error).startswith(f"worker 2 has too little memory for the training loop: {line}")
    assert str(error).endswith(f". {REMEDY}")


def test_a_second_kill_by_the_memory_monitor_in_a_row_ends_the_launch(decide):
    killed, crashed = died(ray.exceptions.OutOfMemoryError(KILLED)), died(ray.exceptions.ActorDiedError())
    assert [decide(failure) for failure in (killed, crashed, killed)] == [FailureDecision.RETRY] * 3
    again = died(ray.exceptions.OutOfMemoryError(f"{KILLED.replace('23', '24')}\nOOM kill reason"))
    assert decide(crashed, again) == FailureDecision.RAISE
    error = to_raise({0: crashed, 1: again}, cpu(2), "/logs")
    assert isinstance(error, OutOfMemoryError)
    assert str(error).startswith(
        f"worker 1 has too little memory for the training loop: {KILLED.replace('23', '24')}. Use"
    )


def test_a_death_without_a_reason_is_retried(decide):
    """A SIGKILL by the kernel for lack of memory looks like any other SIGKILL."""
    decisions = [decide(died(ray.exceptions.ActorDiedError())) for _ in range(4)]
    assert decisions == [FailureDecision.RETRY] * 3 + [FailureDecision.RAISE]


def test_preemptions_do_not_count_as_failures(decide):
    preemptions = [
        PreemptionError(PreemptionInfo(None, {"a node": [0]})),
        died(ray.exceptions.RayActorError(preempted=True)),
        Preempted("saved at step 3"),
    ]
    # The collectives of other ranks fail too.
    broken = raised(lambda: jax.block_until_ready(jax.jit(lambda x: x)(1)) and 1 / 0)
    for _ in range(3):
        assert [decide(failure) for failure in preemptions] == [FailureDecision.RETRY] * 3
        assert decide(broken, preemptions[2]) == FailureDecision.RETRY
    died_once = died(ray.exceptions.ActorDiedError())
    assert [decide(died_once) for _ in range(4)] == [FailureDecision.RETRY] * 3 + [FailureDecision.RAISE]


def test_the_same_exception_ends_the_launch_only_twice_in_a_row(decide):
    failure = raised(lambda: {}["key"])
    assert decide(failure) == FailureDecision.RETRY
    assert decide(died(ray.exceptions.ActorDiedError())) == FailureDecision.RETRY
    assert decide(failure) == FailureDecision.RETRY
    assert decide(failure) == FailureDecision.RAISE


def test_failures_with_a_new_checkpoint_between_them_do_not_add_up(control, decide):
    died_again, same = died(ray.exceptions.ActorDiedError()), raised(lambda: {}["key"])
    for step in range(5):
        ray.get(control.save.remote("/run", step))
        assert [decide(died_again) for _ in range(2)] == [FailureDecision.RETRY] * 2
        assert decide(same) == FailureDecision.RETRY
    assert decide(died_again) == FailureDecision.RAISE


def test_a_resize_does_not_count_as_a_failure(decide):
    resized = [Resized("saved at step 3")] * 2
    assert [decide(*resized) for _ in range(10)] == [FailureDecision.RETRY] * 10


def test_the_wait_for_nodes_starts_again_after_each_loss(decide, monkeypatch):
    too_few = ControllerError(WorkerGroupStartupTimeoutError(2))
    assert decide(too_few) == FailureDecision.RETRY
    now = time.monotonic()
    monkeypatch.setattr("ray_jax_launch._train.restart_policy.time", SimpleNamespace(monotonic=lambda: now + 239))
    assert decide(too_few) == FailureDecision.RETRY
    assert decide(died(ray.exceptions.ActorDiedError())) == FailureDecision.RETRY
    monkeypatch.setattr("ray_jax_launch._train.restart_policy.time", SimpleNamespace(monotonic=lambda: now + 1000))
    assert decide(too_few) == FailureDecision.RETRY
    monkeypatch.setattr("ray_jax_launch._train.restart_policy.time", SimpleNamespace(monotonic=lambda: now + 1300))
    assert decide(too_few) == FailureDecision.RAISE
