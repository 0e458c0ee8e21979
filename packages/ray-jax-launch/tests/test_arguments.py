"""Arguments of `launch` that are passed on: each arrives where Ray or jax uses it. Without a cluster."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train import (
    ControllerError,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    WorkerGroupError,
)
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.scaling_policy.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch import (
    DistributedConfig,
    Hardware,
    JaxTrainer,
    WaitingForNodes,
    cpu,
    gpu,
    launch,
    local,
    scaling_config,
)
from ray_jax_launch._control.control_actor import LocalControl, StopRequest
from ray_jax_launch._run_folder import RunFolder
from ray_jax_launch._storage import as_storage_path
from ray_jax_launch._train import run_group, run_plan
from ray_jax_launch._train.failures import Preempted
from ray_jax_launch._train.launch_plan import PreparedLaunch
from ray_jax_launch._train.run_plan import _connect, _for_ray


class Fitted(Exception):
    """Raised in place of a fit."""


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Return a function from arguments of a launch to its plan, which is not executed."""

    def stop(plan):
        raise Fitted(plan)

    def launched(**given):
        with pytest.raises(Fitted) as fitted:
            launch(lambda: None, **{"hardware": "local", "storage_path": tmp_path, "name": "run"} | given)
        return fitted.value.args[0]

    monkeypatch.setattr("ray_jax_launch._train.launch.run_plan", stop)
    return launched


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, FailureConfig(max_failures=3, preemption_grace_s=0.0)),
        ({"max_failures": 7, "preemption_grace_s": 9.0}, FailureConfig(max_failures=7, preemption_grace_s=9.0)),
    ],
)
def test_limits_of_failures_reach_rays_config(launched, given, config):
    assert launched(**given).run_config.failure_config == config


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("placement_strategy", "SPREAD"),
        ("label_selector", {"region": "here"}),
        ("resources_per_worker", {"CPU": 2, "memory": 8e9}),
    ],
)
def test_the_shape_of_a_group_reaches_rays_config(launched, argument, value):
    _, scaling = _connect(launched(**{argument: value}))
    _, plain = _connect(launched())
    assert getattr(scaling, argument) == value
    assert getattr(plain, argument) != value


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({}, {}),
        ({"env_vars": {"A": "1"}}, {"A": "1"}),
        ({"runtime_env": {"env_vars": {"A": "1", "B": "2"}}, "env_vars": {"A": "3"}}, {"A": "3", "B": "2"}),
        ({"hardware": "cpu:1x2"}, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}),
        ({"hardware": "cpu:1x2", "env_vars": {"JAX_NUM_CPU_DEVICES": "4"}}, {"JAX_NUM_CPU_DEVICES": "4"}),
    ],
)
def test_variables_of_the_caller_win(launched, given, variables):
    plan = launched(**given)
    hardware = plan.hardware
    runtime_env: Any = _for_ray(plan.run_config, None, hardware).worker_runtime_env
    found = runtime_env["env_vars"]
    assert found | variables == found
    assert hardware.kind != "local" or found == variables


def test_the_rest_of_a_runtime_environment_is_kept(launched):
    plan = launched(runtime_env={"working_dir": "/here"})
    assert _for_ray(plan.run_config, None, plan.hardware).worker_runtime_env == {"working_dir": "/here", "env_vars": {}}


@pytest.mark.parametrize(
    ("storage_path", "expected"), [("runs", "HERE/runs"), ("/data/runs", "/data/runs"), ("s3://b/runs", "s3://b/runs")]
)
def test_ray_gets_the_storage_of_the_folder_in_which_the_driver_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, storage_path: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_config = RunConfig(name="run", storage_path=storage_path)
    folder = RunFolder(as_storage_path(storage_path), None)
    assert _for_ray(run_config, folder, local()).storage_path == expected.replace("HERE", str(tmp_path))
    assert _for_ray(run_config, None, local()).storage_path == storage_path  # of a filesystem of the user's own


@pytest.fixture
def rays_trainer(monkeypatch):
    """Return a function from a plan to Ray's trainer, which is made for each start of a group."""
    monkeypatch.setattr(run_group, "is_silent", lambda: False)  # asks the cluster

    def make(plan, control=None):
        hardware = plan.hardware
        prepared = PreparedLaunch(
            plan=plan,
            hardware=hardware,
            scaling=scaling_config(hardware),
            run_config=_for_ray(plan.run_config, None, hardware),
            data_cpus=0,
            folder=None,
        )
        return run_group._make_trainer(prepared, control or LocalControl())

    return make


@pytest.mark.parametrize(
    ("failure", "limits", "decision"),
    [
        (Preempted("saved at step 3"), {"max_failures": 0, "max_preemption_failures": 1}, FailureDecision.RETRY),
        (Preempted("saved at step 3"), {"max_failures": 1, "max_preemption_failures": 0}, FailureDecision.RAISE),
        (ActorDiedError(), {"max_failures": 1, "max_preemption_failures": 0}, FailureDecision.RETRY),
        (ActorDiedError(), {"max_failures": 0, "max_preemption_failures": 1}, FailureDecision.RAISE),
    ],
)
def test_each_limit_of_failures_has_its_own_effect(rays_trainer, tmp_path, failure, limits, decision):
    run_config = RunConfig(name="run", storage_path=str(tmp_path), failure_config=FailureConfig(**limits))
    policy = rays_trainer(JaxTrainer(lambda: None, hardware="cpu:1", run_config=run_config)._plan).policies[
        "failure_policy"
    ]
    wrapped = failure if isinstance(failure, Preempted) else WorkerHealthCheckFailedError("", failure=failure)
    assert policy.make_decision(WorkerGroupError("", {0: wrapped})) == decision


@pytest.mark.parametrize(("hardware", "is_elastic"), [("cpu:2", False), ("cpu:1-2", True)])
def test_only_an_elastic_group_has_a_policy_that_waits(rays_trainer, launched, hardware, is_elastic):
    policies = rays_trainer(launched(hardware=hardware)).policies
    assert ("scaling_policy" in policies) == is_elastic


def test_configs_of_data_validation_and_rendezvous_are_used(rays_trainer, launched, tmp_path):
    data, backend = DataConfig(datasets_to_split=["rows"]), DistributedConfig(heartbeat_timeout_s=7)
    trainer = rays_trainer(launched(hardware="cpu:2", dataset_config=data, backend=backend))
    assert trainer.data_config._base is data
    assert trainer.backend_config is backend
    validation = ValidationConfig(fn=lambda checkpoint, **kwargs: {})
    run_config = RunConfig(name="run", storage_path=str(tmp_path))
    given = {"hardware": "cpu:2", "run_config": run_config, "validation_config": validation}
    trainer = rays_trainer(JaxTrainer(lambda: None, jax_config=JaxConfig(), **given)._plan)
    assert trainer.validation_config is validation
    assert trainer.backend_config == DistributedConfig()


def no_rows(rank: int, world_size: int) -> Any:
    raise AssertionError("must not start")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Hardware, dict[str, Any]]]:
    """Return a function from arguments of a launch to those of its check of the cluster, after which it ends."""

    def check(hardware: Hardware, **given: Any) -> None:
        raise Fitted(hardware, given)

    def checked(**given: Any) -> tuple[Hardware, dict[str, Any]]:
        with pytest.raises(Fitted) as fitted:
            launch(lambda: None, storage_path=tmp_path, name="run", **given)
        return fitted.value.args

    monkeypatch.setattr(run_plan, "connect", lambda hardware=None: None)
    monkeypatch.setattr(run_plan, "is_started_here", lambda: False)
    monkeypatch.setattr(run_plan, "auto", lambda: gpu(9, 3))
    monkeypatch.setattr(run_plan, "check_resources", check)
    return checked


@pytest.mark.parametrize(
    ("given", "hardware", "data_cpus", "per_worker"),
    [
        ({"hardware": "cpu:9"}, cpu(9), 0, {"CPU": 1}),
        ({"hardware": cpu(9), "datasets": {"rows": no_rows}}, cpu(9), 2, {"CPU": 1}),
        ({"hardware": cpu(9), "datasets": {"rows": no_rows}, "data_cpus": 7}, cpu(9), 7, {"CPU": 1}),
        ({"hardware": cpu(9), "datasets": {"rows": no_rows}, "data_cpus": 0}, cpu(9), 0, {"CPU": 1}),
        ({"hardware": "cpu:1", "data_cpus": 3}, cpu(1), 3, {"CPU": 1}),
        ({"hardware": "auto", "datasets": {"rows": no_rows}}, gpu(9, 3), 2, {"CPU": 1, "GPU": 3}),
        ({"hardware": "auto", "resources_per_worker": {"CPU": 7}}, gpu(9, 3), 0, {"CPU": 7, "GPU": 3}),
        ({"hardware": "gpu:3x2", "resources_per_worker": {"room": 9}}, gpu(3, 2), 0, {"CPU": 1, "GPU": 2, "room": 9}),
        (
            {"scaling_config": ScalingConfig(num_workers=7, use_gpu=True, resources_per_worker={"GPU": 3, "CPU": 5})},
            gpu(7, 3), 0, {"CPU": 5, "GPU": 3},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wait_s", [0.0, 9.5])
def test_a_cluster_is_checked_for_what_the_launch_needs(
    checked: Callable[..., Any],
    given: dict[str, Any],
    hardware: Hardware,
    data_cpus: int,
    per_worker: dict[str, float],
    wait_s: float,
) -> None:
    assert checked(wait_for_resources_s=wait_s, **given) == (
        hardware,
        {"data_cpus": data_cpus, "wait_for_resources_s": wait_s, "resources_per_worker": per_worker},
    )


@pytest.mark.parametrize(("num_cpus", "share"), [(10, 1), (9, 0.88), (2, 0.11)])
def test_workers_on_a_machine_with_few_cpus_share_them(
    checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_cpus: int, share: float
) -> None:
    monkeypatch.setattr(run_plan, "is_started_here", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": float(num_cpus), "memory": 7.0})
    _, found = checked(hardware="cpu:9", data_cpus=1)
    assert found["resources_per_worker"]["CPU"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("given", "is_connected"), [({}, False), ({"datasets": {"rows": no_rows}}, True), ({"data_cpus": 3}, True)]
)
def test_local_mode_connects_only_for_data(
    launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], is_connected: bool
) -> None:
    connected: list[Any] = []
    monkeypatch.setattr(run_plan, "connect", lambda *hardware: connected.append(hardware))
    hardware, _ = _connect(launched(**given))
    assert (hardware, connected) == (local(), [()] * is_connected)


def test_a_group_starts_the_cluster_for_its_own_hardware(
    launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[Any] = []
    monkeypatch.setattr(run_plan, "connect", lambda *hardware: connected.append(hardware))
    for given in ({"hardware": "cpu:7"}, {"hardware": None, "scaling_config": ScalingConfig(num_workers=7)}):
        _connect(launched(**given))
    assert connected == [(cpu(7),)] * 2


def test_the_environment_that_a_caller_passes_is_left_as_it_is(launched: Callable[..., Any]) -> None:
    runtime_env, env_vars = {"env_vars": {"A": "1"}, "pip": []}, {"B": "2"}
    for _ in range(2):
        plan = launched(runtime_env=runtime_env, env_vars=env_vars)
        assert plan.run_config.worker_runtime_env == {"env_vars": {"A": "1", "B": "2"}, "pip": []}
    assert (runtime_env, env_vars) == ({"env_vars": {"A": "1"}, "pip": []}, {"B": "2"})


@pytest.mark.parametrize(
    ("given", "level"), [(None, "ERROR"), (LoggingConfig(), "ERROR"), (LoggingConfig("DEBUG"), "DEBUG")]
)
def test_the_level_of_rays_log_is_the_users_unless_it_is_rays_default(
    tmp_path: Path, given: LoggingConfig | None, level: str
) -> None:
    run_config = RunConfig(name="run", storage_path=str(tmp_path), logging_config=given)
    logging_config = _for_ray(run_config, None, local()).logging_config
    assert logging_config is not None
    assert logging_config.log_level == level


@pytest.mark.parametrize(("given_s", "expected_s"), [(900.0, 900.0), (0.0, 240.0)])
def test_an_elastic_group_waits_as_long_as_the_launch_and_sends_its_lines_and_requests(
    given_s: float,
    expected_s: float,
    monkeypatch: pytest.MonkeyPatch,
    launched: Callable[..., Any],
    rays_trainer: Callable[..., Any],
) -> None:
    """Lost nodes come back within four minutes, also for a launch that does not wait for nodes at its start."""
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s, sleep=lambda seconds: None)
    for module in ("_ray_internals.ray_train", "_train.restart_policy"):
        monkeypatch.setattr(f"ray_jax_launch.{module}.time", clock)
    for kind, decision in (("non_running", NoopDecision()), ("running", ResizeDecision(3, {"CPU": 1}))):
        name = f"make_decision_for_{kind}_worker_group"
        monkeypatch.setattr(ElasticScalingPolicy, name, lambda self, *states, decision=decision: decision)
    plan, control = launched(hardware="cpu:2-3", wait_for_resources_s=given_s), LocalControl()
    made = rays_trainer(plan, control)
    scaling, failures = made.policies["scaling_policy"], made.policies["failure_policy"]
    too_few = ControllerError(WorkerGroupStartupTimeoutError(2))
    for waited_s in (0, 80, expected_s - 1):
        clock.now_s = 1000.0 + waited_s
        scaling.make_decision_for_non_running_worker_group()
        assert failures.make_decision(too_few) == FailureDecision.RETRY
    collected = control.collect.remote()
    assert [f"{expected_s:.0f} s" in line for _, line in collected.lines] == [True, True]
    assert collected.events == [WaitingForNodes(expected_s)] * 2
    clock.now_s += 2
    with pytest.raises(TimeoutError):
        scaling.make_decision_for_non_running_worker_group()
    assert failures.make_decision(too_few) == FailureDecision.RAISE
    poll = {"request": None, "next_step": None}
    assert control.poll.remote("group", 2, 0, **poll) == (None, None)
    assert scaling.make_decision_for_running_worker_group(None, None) == NoopDecision()
    assert control.poll.remote("group", 2, 0, **poll) == (StopRequest("resize"), None)


@pytest.mark.parametrize("is_trainer", [False, True], ids=["launch", "JaxTrainer"])
def test_each_argument_reaches_the_field_of_its_name(
    launched: Callable[..., Any], tmp_path: Path, is_trainer: bool
) -> None:
    given: dict[str, Any] = {
        "on_metrics": lambda rank, metrics: None,
        "on_event": lambda event: None,
        "datasets": {"rows": no_rows},
        "dataset_config": DataConfig(),
        "data_cpus": 7,
        "wait_for_resources_s": 9.5,
        "hang_timeout_s": 60.0,
    }
    if is_trainer:
        run_config = RunConfig(name="run", storage_path=str(tmp_path))
        plan = JaxTrainer(no_loop, train_loop_config={"a": 1}, hardware="cpu:3", run_config=run_config, **given)._plan
    else:
        plan = launched(hardware="cpu:3", **given)
    assert {name: getattr(plan, name) for name in given} == given
    assert plan.hardware == cpu(3)
    assert (plan.config, plan.has_rays_path) == (({"a": 1}, True) if is_trainer else (None, False))


def no_loop(config: Any) -> None:
    raise AssertionError("must not start")


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize(("timeout_s", "is_watched"), [(60.0, True), (None, False)])
def test_a_worker_knows_its_run_and_whether_it_is_watched_and_heard(
    launched: Callable[..., Any],
    rays_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float | None,
    is_watched: bool,
    is_silent: bool,
) -> None:
    monkeypatch.setattr(run_group, "is_silent", lambda: is_silent)
    control = LocalControl()
    trainer = rays_trainer(launched(hardware="cpu:3", hang_timeout_s=timeout_s), control)
    loop, session = trainer.train_loop_per_worker.args
    assert loop() is None
    assert (session.control, session.run_name, session.is_local) == (control, "run", False)
    assert (session.is_watched, session.prints) == (is_watched, is_silent)


def test_functions_of_a_rank_are_not_called_by_ray(
    launched: Callable[..., Any], rays_trainer: Callable[..., Any]
) -> None:
    made = rays_trainer(launched(hardware="cpu:3", datasets={"rows": no_rows})).datasets["rows"]
    assert made() is no_rows
