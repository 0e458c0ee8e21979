"""Arguments of `launch` that are passed on: each arrives where Ray or jax uses it. Without a cluster."""

import pytest
from ray.exceptions import ActorDiedError
from ray.train import DataConfig, FailureConfig, RunConfig, ValidationConfig, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch import DistributedConfig, JaxTrainer, launch
from ray_jax_launch._train.control_actor import LocalControl
from ray_jax_launch._train.failures import Preempted


class Fitted(Exception):
    """Raised in place of a fit."""


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Return a function from arguments of a launch to its trainer, which is not started."""

    def fit(trainer):
        raise Fitted(trainer)

    def launched(**given):
        with pytest.raises(Fitted) as fitted:
            launch(lambda: None, **{"hardware": "local", "storage_path": tmp_path, "name": "run"} | given)
        return fitted.value.args[0]

    monkeypatch.setattr(JaxTrainer, "fit", fit)
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
    _, scaling = launched(**{argument: value})._connect()
    _, plain = launched()._connect()
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
    trainer = launched(**given)
    hardware = trainer._hardware
    found = trainer._run_config(None, hardware).worker_runtime_env["env_vars"]
    assert found | variables == found
    assert hardware.kind != "local" or found == variables


def test_the_rest_of_a_runtime_environment_is_kept(launched):
    trainer = launched(runtime_env={"working_dir": "/here"})
    assert trainer._run_config(None, trainer._hardware).worker_runtime_env == {"working_dir": "/here", "env_vars": {}}


@pytest.fixture
def rays_trainer(monkeypatch):
    """Return a function from a trainer to Ray's trainer, which it makes for each start of its group."""
    monkeypatch.setattr("ray_jax_launch._train.trainer.is_silent", lambda: False)  # asks the cluster

    def make(trainer):
        hardware, scaling = trainer._hardware, trainer.scaling_config
        return trainer._trainer(hardware, scaling, trainer._run_config(None, hardware), None, LocalControl())

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
    policy = rays_trainer(JaxTrainer(lambda: None, hardware="cpu:1", run_config=run_config)).policies["failure_policy"]
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
    trainer = rays_trainer(JaxTrainer(lambda: None, jax_config=JaxConfig(), **given))
    assert trainer.validation_config is validation
    assert trainer.backend_config == DistributedConfig()
