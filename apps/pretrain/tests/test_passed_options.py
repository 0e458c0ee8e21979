"""Name the options of a run that other packages get, and see that they do."""

import dataclasses
from pathlib import Path

import pytest
import ray

import ray_jax_launch
from nnx_gpt2 import make_train_step
from pretrain import PRESETS, main
from pretrain._resolve.resolve import _num_tokenizing_tasks as num_tokenizing_tasks
from pretrain._training import configured_step, loop, process, profiling, setup
from pretrain._training.train_worker import train_worker
from ray_jax_launch import parse_hardware

SMALL = (
    "--data book.txt --tokenizer bytes --hardware local --train.max-steps 2 --train.global-batch-size 4 "
    "--model.seq-len 16 --model.num-layers 1 --model.num-heads 1 --model.embed-dim 8"
)
OPTIONS = (
    "--train.grad-accum-steps 2 --train.mask-documents --train.max-failures 7 --wait-for-resources-s 9 --profile 1:2 "
    "--train.hang-timeout-s 33 --name run"
)


def test_options_reach_the_step_the_launch_and_the_profiler(tmp_path, monkeypatch):
    """None of these is the default."""
    passed = {}

    def noting(function):
        def call(*args, **kwargs):
            passed.update(kwargs)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(ray_jax_launch, "launch", noting(ray_jax_launch.launch))
    monkeypatch.setattr(configured_step, "make_train_step", noting(make_train_step))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    assert main(f"{SMALL} {OPTIONS}".split()) == 0
    expected = {"grad_accum_steps": 2, "end_of_text": 256, "max_failures": 7, "wait_for_resources_s": 9}
    expected |= {"hang_timeout_s": 33, "name": "run", "storage_path": Path("runs"), "data_cpus": 0, "env_vars": {}}
    assert {name: passed[name] for name in expected} == expected
    (trace,) = tmp_path.glob("runs/*/tensorboard/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0


@pytest.mark.parametrize(("num_processes", "expected"), [(None, 62), (2, 2), (100, 62)])
def test_the_tasks_that_tokenize_a_stream_are_as_many_as_the_option_says(num_processes, expected, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    config = PRESETS["baby"]()
    config = dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, num_processes=num_processes))
    assert num_tokenizing_tasks(config, parse_hardware("cpu:2")) == expected
    assert num_tokenizing_tasks(config, parse_hardware("local")) is None


def test_workers_send_the_warnings_of_the_loop_to_the_command(monkeypatch):
    sent = []
    monkeypatch.setattr(ray_jax_launch, "log_to_driver", sent.append)
    monkeypatch.setattr(loop, "run", lambda **arguments: arguments["sample"])
    assert train_worker({"sample": "text"}) == "text"
    assert sent == ["pretrain"]
    assert {module._logger.name for module in (setup, process, profiling)} == {*sent}
