"""Options of a run that reach other packages, and the moment at which the clock of the steps starts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import ray

import ray_jax_launch
from nnx_gpt2 import make_train_step
from pretrain import PRESETS, main
from pretrain._commands.train import _num_tokenizing_tasks as num_tokenizing_tasks
from pretrain._training import loop
from pretrain._training.step_meter import StepMeter
from ray_jax_launch import parse_hardware

SMALL = (
    "--data book.txt --tokenizer bytes --hardware local --train.max-steps 2 --train.global-batch-size 4 "
    "--model.seq-len 16 --model.num-layers 1 --model.num-heads 1 --model.embed-dim 8"
)
OPTIONS = (
    "--train.grad-accum-steps 2 --train.mask-documents --train.max-failures 7 --wait-for-resources-s 9 --profile 1:2"
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
    monkeypatch.setattr(loop, "make_train_step", noting(make_train_step))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    assert main(f"{SMALL} {OPTIONS}".split()) == 0
    expected = {"grad_accum_steps": 2, "end_of_text": 256, "max_failures": 7, "wait_for_resources_s": 9}
    assert {name: passed[name] for name in expected} == expected
    (trace,) = tmp_path.glob("runs/*/tensorboard/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0


def test_the_time_of_a_step_does_not_include_the_first_one_of_a_start(tmp_path, monkeypatch):
    """Its clock starts when the device has nothing to do."""
    occupy = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ y), x).sum())
    busy = jax.block_until_ready(jnp.zeros((512, 512)))
    jax.block_until_ready(occupy(busy))  # compiles
    add_zero = jax.jit(lambda value, number: value + (0 * number).astype(value.dtype))
    newest, are_computed = {}, []

    class SlowStep:
        def __init__(self, *args, **kwargs):
            self.step = make_train_step(*args, **kwargs)
            self.lower = self.step.lower

        def __call__(self, *state):
            state, metrics = self.step(*state)
            newest.update({name: add_zero(value, occupy(busy)) for name, value in metrics.items()})
            return state, {**newest}

    def start(meter):
        are_computed.append(all(value.is_ready() for value in newest.values()))
        return start_clock(meter)

    start_clock = StepMeter.start
    monkeypatch.setattr(loop, "make_train_step", SlowStep)
    monkeypatch.setattr(StepMeter, "start", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 200)
    assert main(SMALL.split()) == 0
    assert are_computed
    assert all(are_computed)


@pytest.mark.parametrize(("num_processes", "expected"), [(None, 62), (2, 2), (100, 62)])
def test_the_tasks_that_tokenize_a_stream_are_as_many_as_the_option_says(num_processes, expected, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    config = PRESETS["baby"]()
    config = dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, num_processes=num_processes))
    assert num_tokenizing_tasks(config, parse_hardware("cpu:2")) == expected
    assert num_tokenizing_tasks(config, parse_hardware("local")) is None
