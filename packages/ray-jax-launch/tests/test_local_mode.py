"""Local mode: the loop runs in this process, and Ray does not start."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
import ray.data
import ray.train
from ray.train import RunConfig, ScalingConfig

from ray_jax_launch import (
    Checkpoints,
    JaxTrainer,
    LaunchError,
    SavedCheckpoint,
    StopRequestedError,
    check_resources,
    connect,
    latest_step,
    launch,
    local,
    log_metrics,
    log_to_driver,
    mark_finished,
    parse_hardware,
    request_stop,
    stop_requested,
)


def train(config):
    """Save at each step, from the newest step to the last one."""
    with Checkpoints() as checkpoints:
        step = checkpoints.latest_step() or 0
        while step < config["last"]:
            step += 1
            log_metrics({"step": step, "twice": 2 * step})
            log_metrics({"step": -step, "phase": "saving"})  # only for on_metrics
            if stop_requested(step):
                break
            checkpoints.save(step, {"state": {"step": jnp.int32(step)}}, metadata={})
    context = ray.train.get_context()
    return {
        "thread": threading.current_thread().name,
        "pid": os.getpid(),
        "rank": (context.get_world_rank(), context.get_world_size()),
        "devices": jax.local_device_count(),
    }


def test_the_loop_runs_in_this_process_with_all_functions_and_without_ray(tmp_path, caplog):
    seen = []
    with caplog.at_level(logging.INFO, "ray_jax_launch"):
        result = launch(
            train,
            {"last": 3},
            hardware="local",
            storage_path=tmp_path,
            name="run",
            on_metrics=lambda rank, metrics: seen.append((rank, metrics["step"])),
        )
    assert not ray.is_initialized()
    assert result.return_value == {"thread": "MainThread", "pid": os.getpid(), "rank": (0, 1), "devices": 2}
    assert seen == [(0, 1), (0, -1), (0, 2), (0, -2), (0, 3), (0, -3)]
    assert result.metrics == {"step": 3, "twice": 6}
    assert result.error is None
    assert result.path == tmp_path / "run"
    assert sorted(path.name for path in result.path.iterdir()) == ["checkpoints"]
    assert [record.message for record in caplog.records] == ["worker 0 of 1: this process, 2 devices (cpu:0, cpu:1)"]
    assert isinstance(result.checkpoint, SavedCheckpoint)
    assert result.checkpoint.step == 3
    assert result.checkpoint.restore({"state": {"step": jnp.int32(0)}}) == {"state": {"step": 3}}
    assert Path(result.checkpoint.path) == tmp_path / "run" / "checkpoints" / "3"


def test_a_second_start_continues_and_no_workers_in_the_scaling_config_means_local(tmp_path):
    launch(train, {"last": 2}, hardware=local(), storage_path=tmp_path, name="run")
    trainer = JaxTrainer(
        train,
        train_loop_config={"last": 4},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    assert result.metrics == {"step": 4, "twice": 8}
    assert result.path == str(tmp_path / "run")
    # Nothing is left to do: the result has the checkpoint that the loop found.
    result = trainer.fit()
    assert result.metrics == {}
    assert isinstance(result.checkpoint, SavedCheckpoint)
    assert result.checkpoint.step == 4


def test_a_loop_cannot_send_what_is_no_metric_or_no_step(tmp_path):
    calls: dict[str, tuple[Any, Any]] = {
        "metrics must be numbers by name, got None": (log_metrics, None),
        "the name of a metric must be a printable text, got 5": (log_metrics, {5: 1}),
        "the name of a metric must be a printable text, got '\\ud800'": (log_metrics, {"\ud800": 1}),
        "metric 'a' must be a number or a text, got None": (log_metrics, {"a": None}),
        "metric 'a' must be a number or a text, got 1000": (log_metrics, {"a": 10**400}),
        "metric 'a' must be a number or a text, got array([1., 1.])": (log_metrics, {"a": np.ones(2)}),
        "step must be a whole number of at least 0, got -1": (stop_requested, -1),
        "step must be a whole number of at least 0, got 'a'": (stop_requested, "a"),
        "step must be a whole number of at least 0, got None": (stop_requested, None),
    }

    def loop():
        for message, (call, argument) in calls.items():
            with pytest.raises(LaunchError, match=re.escape(message)):
                call(argument)
        request_stop("one\n" * 9000)
        stop_requested(1)

    with pytest.raises(StopRequestedError) as stopped:
        launch(loop, hardware="local", storage_path=tmp_path)
    assert str(stopped.value).startswith("one one ")
    assert len(str(stopped.value)) == 1000


def test_an_exception_of_the_loop_leaves_it_as_it_is(tmp_path):
    class MyError(Exception):
        pass

    def fail():
        raise MyError("what the loop says")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(MyError) as failed:
        launch(fail, hardware="local", storage_path=tmp_path, name="run")
    assert getattr(failed.value, "__notes__", []) == []
    assert signal.getsignal(signal.SIGINT) == before
    with pytest.raises(RuntimeError, match="No training loop runs in this process"):
        log_metrics({"step": 1})
    with pytest.raises(RuntimeError):
        ray.train.get_context()


def test_nothing_fails_the_run_after_its_end(tmp_path, caplog):
    def fail_at_the_end():
        mark_finished(7)
        raise OSError("no picture")

    result = launch(fail_at_the_end, hardware="local", storage_path=tmp_path, name="run")
    assert result.return_value == 7
    assert "the loop failed: OSError: no picture; this was after the training had ended" in caplog.text


def test_a_warning_is_logged_once(tmp_path, caplog):
    def warn():
        log_to_driver("a package")
        logging.getLogger("a package").warning("look")
        logging.getLogger("ray_jax_launch").warning("look too")

    launch(warn, hardware="local", storage_path=tmp_path, name="run")
    assert [record.message for record in caplog.records if record.message.startswith("look")] == ["look", "look too"]


def test_environment_variables_are_set_while_the_loop_runs(tmp_path):
    result = launch(
        lambda: os.environ["A_NAME"], hardware="local", storage_path=tmp_path, name="run", env_vars={"A_NAME": "1"}
    )
    assert result.return_value == "1"
    assert "A_NAME" not in os.environ


def test_the_values_of_the_callers_environment_are_restored(tmp_path, monkeypatch):
    monkeypatch.setenv("A_NAME", "before")
    given = {"hardware": "local", "storage_path": tmp_path, "name": "run"}
    assert launch(lambda: os.environ["A_NAME"], env_vars={"A_NAME": "1"}, **given).return_value == "1"
    assert os.environ["A_NAME"] == "before"


def test_no_environment_variables_in_a_runtime_environment_are_none(tmp_path):
    given = {"hardware": "local", "storage_path": tmp_path, "name": "run"}
    assert launch(lambda: 1, runtime_env={"env_vars": None}, **given).return_value == 1


def test_the_levels_of_rays_loggers_are_restored(tmp_path):
    loggers = [logging.getLogger(name) for name in ("ray.train", "ray.data")]
    before = [logger.level for logger in loggers]
    levels = launch(
        lambda: [logger.level for logger in loggers], hardware="local", storage_path=tmp_path, name="run"
    ).return_value
    assert levels == [logging.ERROR] * 2
    assert [logger.level for logger in loggers] == before


def test_local_hardware_needs_no_cluster():
    connect(parse_hardware("local"))
    check_resources(parse_hardware("local"), data_cpus=1)
    assert not ray.is_initialized()


CTRL_C = """
import signal, sys, time
import jax.numpy as jnp
from ray_jax_launch import *

def loop():
    with Checkpoints() as checkpoints:
        step = checkpoints.latest_step() or 0
        while True:
            step += 1
            stop = stop_requested(step)
            if step == 3:
                print("running", flush=True)
            if stop and sys.argv[2] == "saves":
                time.sleep(1.5)
                checkpoints.save(step, {"state": {"step": jnp.int32(step)}}, metadata={})
                return
            if stop:
                print("ignored", flush=True)
                time.sleep(600)
            time.sleep(0.05)

try:
    launch(loop, hardware="local", storage_path=sys.argv[1], name="run")
except KeyboardInterrupt as error:
    print("interrupted", error)
"""


def running_process(tmp_path, what):
    """Start a process whose loop runs."""
    arguments = [sys.executable, "-c", CTRL_C, str(tmp_path), what]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_signals_of_one_stop_let_the_loop_save(tmp_path, number):
    process = running_process(tmp_path, "saves")
    process.send_signal(number)
    assert process.stderr is not None
    line = process.stderr.readline().rstrip()
    process.send_signal(number)  # while the loop saves
    output, errors = process.communicate(timeout=30)
    assert output.startswith("interrupted stopped"), errors
    assert "to continue" in output
    assert errors == ""
    remedy = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
    assert line.endswith(f"interrupted: the workers save what they have{remedy}")
    saved = latest_step(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved >= 3


def test_only_a_second_ctrl_c_stops_a_loop_that_does_not_return(tmp_path):
    process = running_process(tmp_path, "hangs")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ignored\n"
    for number in (signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert output.startswith("interrupted"), errors
    assert latest_step(tmp_path / "run" / "checkpoints") is None
    assert "interrupted: the workers stop at once; saved checkpoints stay" in errors


FAILED_SAVE = """
import resource, signal, sys, time
import jax.numpy as jnp
from ray_jax_launch import *

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

def loop():
    with Checkpoints() as checkpoints:
        for step in range(1, 1000):
            if step == 1:
                checkpoints.save(step, {"state": {"w": jnp.ones(1 << 20)}}, metadata={})
            stop_requested(step)
            print(step, flush=True)
            time.sleep(0.05)

try:
    launch(loop, hardware="local", storage_path=sys.argv[1], name="run")
except UnsavedCheckpointError as error:
    print(error, flush=True)
"""


def test_a_failed_save_ends_the_loop_at_its_next_step(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", FAILED_SAVE, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    *steps, error = process.stdout.splitlines()
    assert error.startswith(f"checkpoint 1 in {tmp_path}/run/checkpoints could not be written: "), process.stderr
    assert "was not saved" not in process.stderr
    assert int(steps[-1]) < 999


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "hardware or scaling_config must be given, got neither"),
        ({"hardware": "local", "scaling_config": ScalingConfig()}, "must be given, got both"),
        ({"hardware": 3}, "hardware must be a Hardware or its text, got 3"),
        ({"hardware": "local", "env_vars": {"A": 1}}, "env_vars must be texts by name, got {'A': 1}"),
        ({"hardware": "local", "env_vars": {1: "A"}}, "env_vars must be texts by name, got {1: 'A'}"),
        ({"hardware": "local", "env_vars": "A=1"}, "env_vars must be a dict, got 'A=1'"),
        ({"hardware": "local", "runtime_env": {"env_vars": ["A=1"]}}, "env_vars must be texts by name, got ['A=1']"),
        ({"hardware": "local", "runtime_env": 3}, "runtime_env must be a dict, got 3"),
        (
            {"hardware": "local", "datasets": {"rows": [1]}},
            "datasets must be Ray Datasets or functions by name, got [1",
        ),
        ({"hardware": "local", "datasets": [1]}, "datasets must be Ray Datasets or functions by name, got [1"),
        ({"hardware": "local", "resources_per_worker": {"CPU": -1}}, "resources_per_worker['CPU'] must be a number of"),
        (
            {"hardware": "local", "resources_per_worker": 3},
            "resources_per_worker must be a dict of amounts, got 3. Write them as in ",
        ),
        ({"hardware": "gpu:many"}, "hardware must be auto, cpu:WORKERS"),
        ({"hardware": "local", "placement_strategy": "WIDE"}, "placement_strategy must be one of PACK, SPREAD, "),
        (
            {"scaling_config": ScalingConfig(), "placement_strategy": "SPREAD"},
            "placement_strategy must be None with ",
        ),
        ({"hardware": "local", "dataset_config": {}}, "dataset_config must be a DataConfig, got {}"),
        (
            {"hardware": "tpu:v6e:4x4", "label_selector": {"a": "b"}},
            "label_selector must be valid for tpu:v6e:4x4, got {'label_selector': {'a': 'b'}} (",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_rejected_with_one_sentence(tmp_path, given, message):
    with pytest.raises(LaunchError) as rejected:
        launch(lambda: None, storage_path=tmp_path / "runs", name="run", **given)
    assert message in str(rejected.value)
    assert "\n" not in str(rejected.value)
    assert str(rejected.value).endswith(".")
    assert [*tmp_path.iterdir()] == []
    assert not ray.is_initialized()


async def wait_for_nothing(config):
    pass


@pytest.mark.parametrize("loop", [lambda config, other: None, wait_for_nothing])
def test_a_loop_that_cannot_be_called_with_its_config_is_rejected(tmp_path, loop):
    with pytest.raises(LaunchError, match="the training loop must be a function of no argument or one"):
        launch(loop, hardware="local", storage_path=tmp_path, name="run")


def test_an_optional_argument_gets_the_config(tmp_path):
    def loop(config=None):
        return config

    given = {"hardware": "local", "storage_path": tmp_path, "name": "run"}
    assert launch(loop, {"a": 1}, **given).return_value == {"a": 1}
    assert launch(loop, **given).return_value is None


@pytest.mark.slow
def test_datasets_of_both_kinds_start_ray(tmp_path):
    def count():
        shards = [ray.train.get_dataset_shard(name) for name in ("ranked", "plain", "made")]
        return [[row["id"] for row in shard.iter_rows()] for shard in shards if shard is not None]

    try:
        connect()
        result = launch(
            count,
            hardware="local",
            storage_path=tmp_path,
            name="run",
            datasets={
                "ranked": lambda rank, world_size: ray.data.range(2 + rank),
                "plain": ray.data.range(3),
                "made": lambda: ray.data.range(4),
            },
        )
    finally:
        ray.shutdown()
    assert result.return_value == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
