"""The largest microbatch that fits the devices, in plans and in runs."""

import contextlib
import dataclasses
import functools
import io
import json
from pathlib import Path

import jax
import pytest
from rich.console import Console

from nnx_gpt2 import GPT2Config, MemoryEstimate, estimate_memory, make_mesh
from pretrain import PRESETS, PretrainConfig, main
from pretrain._errors import UsageError
from pretrain._resolve import step_memory, target_devices
from pretrain._resolve.microbatches import resolve_microbatches
from pretrain._resolve.settings import resolve_as_before
from pretrain._resolve.step_memory import StepMemory, largest_microbatch
from pretrain._resolve.target_devices import Target
from pretrain._run.names import run_name
from ray_jax_launch import parse_hardware

SMALL = {"model.vocab_size": 257, "model.seq_len": 32, "model.num_layers": 1, "model.num_heads": 2}
SMALL |= {"model.embed_dim": 32, "train.global_batch_size": 12, "train.micro_batch_size": "auto"}
QUIET = Console(quiet=True)


@pytest.fixture(scope="module", autouse=True)
def each_step_is_compiled_once():
    """A compilation takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_memory, "estimate_memory", functools.cache(estimate_memory))
        yield


@pytest.fixture
def config() -> PretrainConfig:
    """12 windows a step, in the largest microbatch that fits."""
    return PRESETS["quickstart"]().with_options(SMALL)


def peak_bytes(num_microbatches: int, batch_size: int = 12) -> int:
    """Memory of a step in so many microbatches."""
    sizes = {"train.global_batch_size": batch_size, "train.grad_accum_steps": num_microbatches}
    estimate = step_memory.step_memory(PRESETS["quickstart"]().with_options(SMALL | sizes), make_mesh()).estimate
    assert estimate is not None
    return estimate.peak_bytes


@pytest.mark.parametrize(
    ("usable_bytes", "rejected_from", "expected"),
    [
        (1200, 13, (12, 1)),  # the share of a device fits: one microbatch
        (1199, 13, (6, 2)),
        (650, 13, (6, 2)),
        (649, 13, (4, 3)),
        (150, 13, (1, 12)),
        (149, 13, (1, 12)),  # none fits: the one that needs the least
        (10_000, 5, (4, 3)),  # the compiler rejects larger ones
        (10_000, 1, (12, 1)),  # or all
    ],
)
def test_the_microbatch_is_the_largest_of_all_that_fit(usable_bytes, rejected_from, expected, monkeypatch):
    """A window needs 100 bytes, and the sum of gradients of several microbatches 50."""

    def estimate(config, mesh):
        size, steps = 12 // config.train.grad_accum_steps, config.train.grad_accum_steps
        needed = MemoryEstimate(state_bytes=0, temporary_bytes=100 * size + 50 * (steps > 1), code_bytes=0)
        is_rejected = size >= rejected_from
        return StepMemory(config=config, estimate=None if is_rejected else needed, rejection="large" * is_rejected)

    monkeypatch.setattr(step_memory, "step_memory", estimate)
    config = PRESETS["quickstart"]().with_options({"train.global_batch_size": 12, "train.micro_batch_size": 5})
    target = Target(devices=jax.devices(), usable_bytes=usable_bytes)
    found = largest_microbatch(config, make_mesh(), target, [1])
    assert (12 // found.config.train.grad_accum_steps, found.config.train.grad_accum_steps) == expected
    assert (found.estimate is None, found.rejection) == (rejected_from == 1, "large" if rejected_from == 1 else "")


@pytest.mark.parametrize(("num_microbatches", "size"), [(1, 12), (2, 6), (3, 4)])
def test_a_run_takes_the_largest_microbatch_that_fits(num_microbatches, size, config, monkeypatch):
    """The memory is that of the compiled step, to the byte."""
    assert peak_bytes(3) < peak_bytes(2) < peak_bytes(1)
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: peak_bytes(num_microbatches))
    found = resolve_microbatches(config, parse_hardware("local"), QUIET)
    train = dataclasses.replace(config.train, micro_batch_size=size, grad_accum_steps=num_microbatches)
    assert found == dataclasses.replace(config, train=train)


@pytest.mark.slow
def test_the_whole_share_may_need_less_than_microbatches(monkeypatch):
    """They need a sum of gradients beside the gradient."""
    model = GPT2Config(vocab_size=257, seq_len=2, num_layers=1, num_heads=2, embed_dim=256)
    at_once, in_two = (
        estimate_memory(model, global_batch_size=2, grad_accum_steps=steps).peak_bytes for steps in (1, 2)
    )
    assert at_once < in_two
    changes = {"model.embed_dim": 256, "model.seq_len": 2, "train.global_batch_size": 2}
    config = PRESETS["quickstart"]().with_options(SMALL | changes)
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: at_once)
    assert resolve_microbatches(config, parse_hardware("local"), QUIET).train.grad_accum_steps == 1


def test_a_run_whose_step_fits_in_no_microbatch_is_rejected(config, monkeypatch):
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: 100_000)
    least_bytes, size = min((peak_bytes(steps, 3), 3 // steps) for steps in (1, 3))
    message = (
        f"a step must fit the 0.0 GiB of each device, got {least_bytes / 2**30:.2f} GiB with the microbatch {size}."
    )
    with pytest.raises(UsageError, match=message):
        resolve_microbatches(config.with_options({"train.global_batch_size": 3}), parse_hardware("local"), QUIET)


def test_the_devices_of_workers_are_for_the_workers(config):
    """Another process compiles for them: three devices, which share the 12 windows, and the memory of this machine."""
    found = resolve_microbatches(config, parse_hardware("cpu:3"), QUIET)
    assert (found.train.micro_batch_size, found.train.grad_accum_steps) == (4, 1)
    # Two to three workers: the microbatch of two is the larger one, and both numbers have equal ones.
    found = resolve_microbatches(config, parse_hardware("cpu:2-3"), QUIET)
    assert (found.train.micro_batch_size, found.train.grad_accum_steps) == (6, 1)
    large = config.with_options({"model.embed_dim": 1 << 20})
    with pytest.raises(UsageError, match=r"a step must fit the [\d.,]+ GiB of each device, got [\d.,]+ GiB with"):
        resolve_microbatches(large, parse_hardware("cpu:3"), QUIET)


def test_a_run_on_accelerators_needs_their_compiler_or_a_number(config, monkeypatch):
    with pytest.raises(
        UsageError, match=r"--hardware must be devices of this machine, or of a type, .*, got gpu:2 with"
    ):
        resolve_microbatches(config, parse_hardware("gpu:2"), QUIET)
    monkeypatch.setattr(target_devices, "find_spec", lambda module: None)
    target = target_devices.find_target(parse_hardware("tpu:v6e:2x2"), only_here=False)
    with pytest.raises(
        UsageError, match=r"must be a number without the compiler of the devices, .* --extra tpu on Linux"
    ):
        largest_microbatch(config, make_mesh(), target, [4])


def test_a_run_that_continues_keeps_its_microbatches(config):
    stored = config.with_options({"train.micro_batch_size": 6})
    stored = dataclasses.replace(stored, train=dataclasses.replace(stored.train, grad_accum_steps=2))
    assert resolve_as_before(config, stored).train == stored.train
    accumulated = config.with_options({"train.grad_accum_steps": 4})  # the first start had no size
    assert resolve_as_before(config, accumulated).train == accumulated.train


def test_a_size_that_is_to_be_found_is_in_the_name(config):
    found = run_name(config.with_options({"data": "book.txt"}))
    assert found == "quickstart-book-batch12-microbatch_auto-layers1-heads2-width32-context32-vocab257"


def test_a_command_trains_with_the_microbatch_that_fits_and_continues(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("A short book of a few words. " * 200)
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: peak_bytes(3))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [*options, "--data", "book.txt", "--tokenizer", "bytes", "--hardware", "local", "--name", "run"]
    assert main([*command, "--train.max-steps", "2"]) == 0
    stored = json.loads(Path("runs/run/config.json").read_text())["config"]["train"]
    assert (stored["micro_batch_size"], stored["grad_accum_steps"]) == (4, 3)
    assert "12 windows of 32, 12 per worker, in 3 microbatches" in capsys.readouterr().out
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: 0)  # nothing is compiled to find the size
    assert main([*command, "--train.max-steps", "4"]) == 0
    assert json.loads(Path("runs/run/config.json").read_text())["config"]["train"] == stored | {"max_steps": 4}


def test_a_plan_has_the_microbatch_of_the_run(monkeypatch):
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: peak_bytes(2))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", "--json", *options, "--train.max-steps", "2"]) == 0
    found = json.loads(out.getvalue())
    assert (found["micro_batch_size"], found["grad_accum_steps"]) == (6, 2)
    assert found["state_bytes"] + found["temporary_bytes"] == peak_bytes(2)
    monkeypatch.setattr(target_devices, "device_memory_bytes", lambda: 1000)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", "--json", *options, "--train.max-steps", "2"]) == 1
