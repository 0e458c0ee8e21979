"""Limits of the policy of restarts, and the failures that it is given, without a cluster."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.train import Checkpoint, ControllerError, FailureConfig, PreemptionError, TrainingFailedError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.preemption import PreemptionInfo

from ray_jax_launch import (
    DamagedCheckpointError,
    LaunchError,
    MismatchedCheckpointError,
    OutOfMemoryError,
    StopRequestedError,
    StorageFullError,
    TrainingFailed,
    cpu,
)
from ray_jax_launch._control.control_actor import LocalControl
from ray_jax_launch._control.events import Restarting
from ray_jax_launch._train.failures import ForwardReports, Preempted, Resized, first_failure, note_traceback, to_raise
from ray_jax_launch._train.restart_policy import RestartPolicy, restart_without_controller

RETRY, RAISE = FailureDecision.RETRY, FailureDecision.RAISE
DIED = WorkerGroupError("", {0: WorkerHealthCheckFailedError("", failure=ActorDiedError())})
PREEMPTED = WorkerGroupError("", {0: Preempted("saved at step 3")})


@pytest.mark.parametrize(("limit", "num_restarts"), [(0, 0), (2, 2), (-1, 20)])
@pytest.mark.parametrize(
    ("failure", "limited", "other"),
    [
        (DIED, "max_failures", "max_preemptions"),
        (ControllerError(WorkerGroupStartupFailedError("a taken port")), "max_failures", "max_preemptions"),
        (PREEMPTED, "max_preemptions", "max_failures"),
        (PreemptionError(PreemptionInfo(None, {"a node": [0]})), "max_preemptions", "max_failures"),
    ],
    ids=["died", "not started", "preempted", "node preempted"],
)
def test_a_group_starts_again_as_often_as_its_limit(failure, limited, other, limit, num_restarts):
    policy = RestartPolicy(LocalControl(), wait_for_resources_s=0, **{limited: limit, other: 1})
    decisions = [policy.make_decision(failure) for _ in range(20)]
    assert decisions == [RETRY] * num_restarts + [RAISE] * (20 - num_restarts)


@pytest.mark.parametrize(("config", "num_restarts"), [(None, 0), (FailureConfig(2), 2), (FailureConfig(-1), 20)])
def test_the_deaths_of_rays_controller_are_limited_too(config, num_restarts):
    control = LocalControl()
    restarts = [restart_without_controller(control, config) for _ in range(20)]
    assert restarts == [True] * num_restarts + [False] * (20 - num_restarts)


@pytest.mark.parametrize(("wait_for_resources_s", "wait_s"), [(0, 240), (600, 600)])
@pytest.mark.parametrize(
    "between",
    [DIED, PREEMPTED, ControllerError(WorkerGroupStartupFailedError("a taken port"))],
    ids=["died", "preempted", "not started"],
)
def test_each_wait_for_nodes_has_its_own_limit(monkeypatch, wait_for_resources_s, wait_s, between):
    control, too_few = LocalControl(), ControllerError(WorkerGroupStartupTimeoutError(2))
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("ray_jax_launch._train.restart_policy.time", clock)
    policy = RestartPolicy(control, max_failures=3, wait_for_resources_s=wait_for_resources_s)
    for began_s in (0.0, 5000.0):
        for waited_s in (0, wait_s - 1):
            clock.now_s = began_s + waited_s
            assert policy.make_decision(too_few) == RETRY
        assert policy.make_decision(between) == RETRY
    clock.now_s = 9000.0
    assert policy.make_decision(too_few) == RETRY
    clock.now_s += wait_s
    assert policy.make_decision(too_few) == RAISE
    lines = [line for _, line in control.collect.remote().lines if "too few" in line]
    assert lines == [f"the cluster has too few nodes for the workers; waiting up to {wait_s} s for more"] * 3


@pytest.mark.parametrize(("num_steps", "last"), [(1, RETRY), (0, RAISE)])
def test_the_same_failure_after_a_new_checkpoint_is_retried(num_steps: int, last: FailureDecision) -> None:
    control = LocalControl()
    policy = RestartPolicy(control, max_failures=3, wait_for_resources_s=0)
    failure = WorkerGroupError("", {0: raised(KeyError("a"))})
    control.save.remote("runs", 0)
    for number in range(6):
        assert policy.make_decision(failure) == (RETRY if number == 0 else last)
        control.save.remote("runs", (number + 1) * num_steps)


class JaxRuntimeError(Exception):
    """An error of jax, which is told by its name."""


def raised(error: Exception) -> Exception:
    """Return an error as a worker sends it."""
    try:
        raise error
    except Exception as caught:
        note_traceback(type(caught), caught, caught.__traceback__)
        return caught


def died(cause: Exception) -> Exception:
    return WorkerHealthCheckFailedError("", failure=cause)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ({3: KeyError("a"), 1: KeyError("a"), 7: KeyError("a")}, 1),
        ({0: JaxRuntimeError("a collective failed"), 2: died(ActorDiedError()), 7: died(ActorDiedError())}, 2),
        ({0: JaxRuntimeError("a collective failed"), 2: died(ActorDiedError()), 7: MemoryError()}, 7),
        ({0: died(ActorDiedError()), 2: KeyError("a"), 7: died(RayOutOfMemoryError("no memory"))}, 7),
        ({0: KeyError("a"), 3: JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")}, 3),
        ({0: KeyError("a"), 3: KeyError("RESOURCE_EXHAUSTED: no memory")}, 0),
    ],
    ids=["lowest", "died", "memory", "killed", "device", "another error"],
)
def test_the_rank_that_caused_the_failure_of_the_others_is_named(failures: dict[int, Exception], rank: int) -> None:
    found = {
        one: failure if isinstance(failure, WorkerHealthCheckFailedError) else raised(failure)
        for one, failure in failures.items()
    }
    assert first_failure(found)[0] == rank


@pytest.mark.parametrize(
    ("error", "num_restarts"),
    [
        (KeyError("a"), 1),
        (OSError("stale file handle"), 7),
        (TimeoutError("no answer"), 7),
        (JaxRuntimeError("a collective timed out"), 7),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"), 0),
        (DamagedCheckpointError("all"), 0),
        (LaunchError("data must be there"), 0),
        (StorageFullError("full"), 0),
    ],
    ids=repr,
)
def test_only_failures_that_a_machine_may_cause_are_retried_up_to_the_limit(
    error: Exception, num_restarts: int
) -> None:
    policy, failure = RestartPolicy(LocalControl(), max_failures=7, wait_for_resources_s=0), raised(error)
    decisions = [policy.make_decision(WorkerGroupError("", {2: failure})) for _ in range(num_restarts + 1)]
    assert decisions == [RETRY] * num_restarts + [RAISE]


def test_the_death_of_another_rank_does_not_hide_a_preemption() -> None:
    policy = RestartPolicy(LocalControl(), max_failures=0, wait_for_resources_s=0, max_preemptions=1)
    lost = WorkerGroupError("", {0: died(ActorDiedError()), 1: died(RayActorError(preempted=True))})
    assert [policy.make_decision(lost) for _ in range(2)] == [RETRY, RAISE]


@pytest.mark.parametrize(
    "error",
    [
        DamagedCheckpointError, LaunchError, MismatchedCheckpointError, OutOfMemoryError, StopRequestedError,
        StorageFullError,
    ],
)  # fmt: skip
def test_an_error_that_says_all_is_raised_as_it_is(error: type[Exception]) -> None:
    found = to_raise({1: raised(error("what must hold")), 2: raised(KeyError("a"))}, cpu(3), "/logs")
    assert type(found) is error
    assert str(found) == "what must hold"
    assert getattr(found, "__notes__", []) == []


def test_another_error_has_its_rank_its_traceback_and_the_folder_of_the_logs() -> None:
    found = to_raise({2: raised(KeyError("no such thing")), 1: died(ActorDiedError())}, cpu(3), "/logs")
    assert isinstance(found, TrainingFailed)
    assert isinstance(found, TrainingFailedError)
    assert (found.rank, found.log_folder) == (1, "/logs")
    found = to_raise({2: raised(KeyError("no such thing"))}, cpu(3), "/logs")
    assert isinstance(found, TrainingFailed)
    assert found.rank == 2
    assert "in raised" in found.details
    assert found.__notes__ == [found.details]


def test_the_error_of_a_device_without_memory_names_the_worker() -> None:
    failure = raised(JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes.\nmore"))
    found = to_raise({0: raised(KeyError("a")), 3: failure}, cpu(4), "/logs")
    assert isinstance(found, OutOfMemoryError)
    assert "worker 3 has too little memory for the training loop: RESOURCE_EXHAUSTED: 9 bytes. Use" in str(found)
    assert "in raised" in found.__notes__[0]


@pytest.mark.parametrize(("checkpoint", "num_reported"), [(None, 0), (Checkpoint("/a"), 1)], ids=["none", "one"])
def test_a_report_is_that_of_rank_0_and_counts_its_checkpoint(checkpoint: Any, num_reported: int) -> None:
    control = LocalControl()
    ForwardReports(control).after_report(None, [{"rank": 0, "loss": 2.0}, {"rank": 1}, {"rank": 2}], checkpoint)
    state = control.state.remote()
    assert (state.latest, state.num_reported) == ({"rank": 0, "loss": 2.0}, num_reported)


NOT_STARTED = ControllerError(WorkerGroupStartupFailedError("ray said:\na taken port\n"))
ON_OTHERS = "a node is preempted; the workers start again on the others"


@pytest.mark.parametrize(
    ("failure", "reason", "text", "consequence"),
    [
        (WorkerGroupError("", {2: raised(OSError("stale"))}), "failure", "worker 2 failed: OSError: stale", None),
        (DIED, "failure", "worker 0 died, or no longer answers", None),
        (NOT_STARTED, "failure", "the workers could not start: a taken port", None),
        (PREEMPTED, "preemption", "a node is preempted", "the workers start again on the others"),
        (
            PreemptionError(PreemptionInfo(None, {"a node": [0]})),
            "preemption", "a node is preempted", "the workers start again on the others",
        ),
        (
            WorkerGroupError("", {0: Resized("saved at step 3")}),
            "resize", "the cluster has room for another number of workers",
            "the workers start again, from where they were",
        ),
    ],
    ids=["raised", "died", "not started", "preempted", "node preempted", "resized"],
)  # fmt: skip
@pytest.mark.parametrize(("limit", "of"), [(7, " of at most 7 without a new checkpoint"), (-1, "")])
def test_each_restart_is_told_with_its_reason_and_the_number_of_failures(
    failure: TrainingFailedError, reason: Any, text: str, consequence: str | None, limit: int, of: str
) -> None:
    control = LocalControl()
    policy = RestartPolicy(control, max_failures=limit, wait_for_resources_s=0)
    for number in (1, 2):
        assert policy.make_decision(failure) == RETRY
        collected, count = control.collect.remote(), number if reason == "failure" else 0
        assert collected.events == [Restarting(reason, text, count)]
        last = consequence or f"the workers start again (failure {number}{of})"
        assert [line for _, line in collected.lines] == [f"{text}; {last}"]


@pytest.mark.parametrize(
    ("config", "of"), [(FailureConfig(2), " of at most 2 without a new checkpoint"), (FailureConfig(-1), "")]
)
def test_a_restart_after_the_death_of_rays_controller_is_told(
    caplog: pytest.LogCaptureFixture, config: FailureConfig, of: str
) -> None:
    control, what = LocalControl(), "Ray Train's controller died"
    for number in (1, 2):
        assert restart_without_controller(control, config)
        assert control.collect.remote().events == [Restarting("failure", what, number)]
        assert caplog.messages[-1] == f"{what}; the workers start again (failure {number}{of})"


HANG = "no step for 61 s after step 503 (usual: 0.4 s): worker 1 does not answer"


class HangingControl(LocalControl):
    """A control whose watchdog has killed the newest group."""

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return HANG if name == "end_group" else super()._call(name, *args, **kwargs)


def test_a_hang_is_the_cause_of_a_failure_and_never_the_same_one_again() -> None:
    control = HangingControl()
    policy = RestartPolicy(control, max_failures=2, wait_for_resources_s=0)
    killed = WorkerGroupError("", {0: raised(KeyError("a collective of the killed group"))})
    for number in (1, 2):
        assert policy.make_decision(killed) == RETRY
        collected = control.collect.remote()
        assert collected.events == [Restarting("failure", HANG, number)]
        last = f"the workers start again (failure {number} of at most 2 without a new checkpoint)"
        assert [line for _, line in collected.lines] == [f"{HANG}; {last}"]
    assert policy.make_decision(killed) == RAISE
    assert [line for _, line in control.collect.remote().lines] == [f"{HANG}; the workers do not start again"]


def test_a_hang_after_the_end_of_the_work_is_told_and_fails_nothing() -> None:
    control = HangingControl()
    policy = RestartPolicy(control, max_failures=2, wait_for_resources_s=0)
    control.finish.remote(7)
    assert policy.make_decision(DIED) == RAISE  # the launch returns the result
    collected = control.collect.remote()
    assert ([line for _, line in collected.lines], collected.events) == ([HANG], [])
    assert control.count_failure.remote() == 1
