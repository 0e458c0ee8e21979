"""Loops that do not fit in memory. Real launches, and the policy that decides what starts again."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
import ray.cloudpickle
import ray.exceptions
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import WorkerGroupError

from ray_jax_launch import OutOfMemoryError, cpu, launch
from ray_jax_launch._board import start_board
from ray_jax_launch._failures import note_traceback, to_raise
from ray_jax_launch._restart import RestartPolicy

pytestmark = pytest.mark.fault

# Workers cannot import this file: what they run is sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

REMEDY = "Use a smaller batch or model, more gradient accumulation parts, or more devices to share it"
# As Ray 2.60 writes it.
KILLED = "1 worker(s) were killed due to the node running low on memory. Memory on the node was 23GB used / 23GB limit"


def take_more_on_rank_1(config):
    """Rank 1 cannot allocate, and rank 0 waits for it."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("joined")
    if jax.process_index() == 1:
        jnp.ones(10**13)
    multihost_utils.sync_global_devices("never")


def test_an_array_that_no_device_can_hold_ends_the_launch_at_once(cluster, tmp_path, caplog, record_property):
    record_property("fault", "a loop allocates 40 TB")
    record_property("lost", "nothing: it ends at once, with its checkpoints")
    with pytest.raises(OutOfMemoryError) as failed:
        launch(take_more_on_rank_1, {}, hardware=cpu(2), storage_path=tmp_path, name="run")
    assert str(failed.value) == (
        "the training loop must fit in the memory of worker 1, got RESOURCE_EXHAUSTED: Out of memory allocating "
        f"40000000000000 bytes. {REMEDY}"
    )
    assert "in take_more_on_rank_1" in failed.value.__notes__[0]
    assert not [record.message for record in caplog.records if "start again" in record.message]


def raised(action):
    """The exception of an action, as a worker sends it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    note_traceback(caught.type, caught.value, caught.tb)
    return caught.value


def died(cause):
    return WorkerHealthCheckFailedError("A worker health check failed.", failure=cause)


@pytest.fixture
def decide(cluster):
    """What the policy decides on each failure of a group, given by rank."""
    board = start_board()
    policy = RestartPolicy(board, max_failures=3, wait_for_resources_s=0)
    yield lambda *failures: policy.make_decision(WorkerGroupError("", dict(enumerate(failures))))
    ray.kill(board)


@pytest.mark.parametrize(
    ("allocate", "line"),
    [
        (lambda: jnp.ones(10**13), "RESOURCE_EXHAUSTED: Out of memory allocating 40000000000000 bytes"),
        (lambda: np.ones(10**14), "Unable to allocate 728. TiB for an array with shape (100000000000000,)"),
        (lambda: bytearray(10**15), "MemoryError"),
    ],
    ids=["jax", "numpy", "python"],
)
def test_memory_that_cannot_be_allocated_is_no_failure_to_retry(decide, allocate, line):
    failure = raised(allocate)
    other = raised(lambda: jax.block_until_ready(jax.jit(lambda x: x)(1)) and 1 / 0)
    # Others may die or fail because of it.
    failures = [other, died(ray.exceptions.ActorDiedError()), failure]
    assert decide(*failures) == FailureDecision.RAISE
    error = to_raise(dict(enumerate(failures)), cpu(3), "/logs")
    assert isinstance(error, OutOfMemoryError)
    assert str(error).startswith(f"the training loop must fit in the memory of worker 2, got {line}")
    assert str(error).endswith(f". {REMEDY}")


def test_a_second_kill_by_the_memory_monitor_in_a_row_ends_the_launch(decide):
    killed, crashed = died(ray.exceptions.OutOfMemoryError(KILLED)), died(ray.exceptions.ActorDiedError())
    assert [decide(failure) for failure in (killed, crashed, killed)] == [FailureDecision.RETRY] * 3
    again = died(ray.exceptions.OutOfMemoryError(f"{KILLED.replace('23', '24')}\nOOM kill reason"))
    assert decide(crashed, again) == FailureDecision.RAISE
    error = to_raise({0: crashed, 1: again}, cpu(2), "/logs")
    assert isinstance(error, OutOfMemoryError)
    assert str(error).startswith(
        f"the training loop must fit in the memory of worker 1, got {KILLED.replace('23', '24')}. Use"
    )


def test_a_death_without_a_reason_is_a_failure_to_retry(decide):
    """The kernel's SIGKILL for want of memory looks like any other."""
    decisions = [decide(died(ray.exceptions.ActorDiedError())) for _ in range(4)]
    assert decisions == [FailureDecision.RETRY] * 3 + [FailureDecision.RAISE]
