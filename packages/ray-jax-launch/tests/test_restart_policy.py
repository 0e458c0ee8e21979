"""Limits of the policy of restarts, without a cluster."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, FailureConfig, PreemptionError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.preemption import PreemptionInfo

from ray_jax_launch._train.control_actor import LocalControl
from ray_jax_launch._train.failures import Preempted
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
