"""From a configuration to a run that can start, in this process and on its device."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pretrain import PRESETS, PretrainConfig, main
from pretrain._data import cache_folder, load_tokens
from pretrain._errors import UsageError
from pretrain._resolve.length import check_length
from pretrain._resolve.origin import _check_fork, resolve_anneal, settings_of
from pretrain._resolve.resolve import resolve_settings, resolving
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._run.description import DataDescription, Origin, describe, write_description
from pretrain._run.find import FoundCheckpoint
from pretrain._run.folder import RunFolder
from pretrain._surroundings.environment import FIXED_THREADS
from ray_jax_launch import parse_hardware

LOCAL = parse_hardware("local")
DATA = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={})
QUIET = Console(quiet=True)


@pytest.fixture
def config(tmp_path: Path) -> PretrainConfig:
    """A text of 60,000 bytes, and a batch in microbatches of at most 3 windows on a device."""
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 2069)
    preset = PRESETS["quickstart"]()
    return dataclasses.replace(
        preset,
        data=str(tmp_path / "book.txt"),
        prepare=dataclasses.replace(preset.prepare, cache_path=str(tmp_path / "cache"), num_processes=1),
        train=dataclasses.replace(preset.train, global_batch_size=24, micro_batch_size=3, max_epochs=2.0),
    )


def resolved(config: PretrainConfig, folder: RunFolder, stored: ResolvedRun | None = None) -> ResolvedRun:
    description = None if stored is None else stored.description
    config = resolve_settings(config, description, None, folder)
    with resolving(config, LOCAL, folder, description, None, QUIET, report=None) as run:
        return run


def with_train(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def test_a_new_run_has_no_open_settings(config: PretrainConfig, tmp_path: Path) -> None:
    """54,002 of 60,002 tokens are for training: 843 windows of 64, and 70 steps of 24 windows in two epochs."""
    run = resolved(config, RunFolder(tmp_path / "run"))
    train = run.config.train
    assert (run.config.model.vocab_size, train.max_steps, train.order) == (257, 70, "shuffle")
    assert train.grad_accum_steps == 8  # on one device
    assert (run.description.config, run.description.hardware) == (run.config, "local")
    assert (run.hardware, run.uses_ray_data, len(run.data.train)) == (LOCAL, False, 54_002)


@pytest.mark.parametrize(
    ("hardware", "num_shards", "data_mode", "has_fixed_threads", "uses_ray_data"),
    [
        ("cpu:2", 4, "prepared", True, True),
        ("cpu:2", None, "stream", False, False),
        ("gpu:2", 4, "prepared", False, True),
        ("local", 4, "prepared", False, False),
    ],
)
def test_workers_on_cpus_have_the_same_threads_for_shards_and_tasks_read_what_is_prepared(
    hardware: str, num_shards: int | None, data_mode: str, has_fixed_threads: bool, uses_ray_data: bool,
    config: PretrainConfig, tmp_path: Path,
) -> None:  # fmt: skip
    config = with_train(config, micro_batch_size=None, num_shards=num_shards)
    config = config.with_options({"data_mode": data_mode, "train.max_epochs": None})
    run = ResolvedRun(
        config=config, folder=RunFolder(tmp_path), data=load_tokens(with_train(config, num_shards=None), QUIET),
        hardware=parse_hardware(hardware), description=describe(config, DATA, hardware),
    )  # fmt: skip
    assert run.worker_variables == (FIXED_THREADS if has_fixed_threads else {})
    assert run.uses_ray_data == uses_ray_data


def test_a_continued_run_keeps_its_microbatches_on_other_devices(config: PretrainConfig, tmp_path: Path) -> None:
    """Its first start had two devices."""
    folder = RunFolder(tmp_path / "run")
    first = resolved(config, folder)
    of_first_start = with_train(first.config, grad_accum_steps=4)
    stored = dataclasses.replace(first, description=dataclasses.replace(first.description, config=of_first_start))
    assert resolved(config, folder, stored).config == of_first_start
    assert resolved(config, folder, stored).description == stored.description


def test_a_continued_run_rejects_other_settings_and_other_text(config: PretrainConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = resolved(config, folder)
    with pytest.raises(UsageError, match=r"train\.global_batch_size must be 24, its value at the start of the run"):
        resolved(with_train(config, global_batch_size=12), folder, first)
    with (tmp_path / "book.txt").open("a") as book:
        book.write("The end.")
    with pytest.raises(UsageError, match=r"must be .*, its value at the start of the run in .*--data"):
        resolved(config, folder, first)


def test_a_fork_has_the_settings_of_its_parent_but_for_those_of_one_command(tmp_path: Path) -> None:
    changes = {
        "model.vocab_size": 257,
        "profile": "3:5",
        "extend": True,
        "name": "parent",
        "seed": 7,
        "prompts": ("x",),
    }
    parent, folder = PRESETS["baby"]().with_options(changes), RunFolder(tmp_path / "parent")
    folder.path.mkdir()
    write_description(folder, describe(parent, DATA, "cpu:1"))
    name = f"{folder.path}@4"
    expected = dataclasses.replace(parent, from_checkpoint=name, name=None, extend=False, profile=None)
    assert settings_of(name, None) == expected


def test_an_annealed_run_has_its_own_length_whatever_gave_that_of_its_parent() -> None:
    changes = {"from_checkpoint": "parent@8", "anneal": 3, "train.max_epochs": 2.0, "train.max_tokens": 5000}
    origin = Origin(place="parent", step=8, tokenizer="bytes", weights_only=False)
    found = resolve_anneal(PRESETS["quickstart"]().with_options(changes), origin)
    assert (found.train.max_steps, found.train.max_epochs, found.train.max_tokens) == (11, None, None)
    assert (found.optimizer.schedule, found.optimizer.decay_steps) == ("wsd", 3)


@pytest.mark.parametrize(
    ("schedule", "steps", "now", "done", "message"),
    [
        ("wsd", 16, 22, 11, None),  # the last step at the peak rate
        ("wsd", 16, 22, 12, "the learning rate falls from step 11 on, and the run is at step 12"),
        ("wsd", 22, 16, 11, None),
        ("wsd", 22, 16, 12, "the learning rate falls from step 11 on"),
        ("cosine", 16, 22, 4, None),  # the first one after the warmup, at the peak rate
        ("cosine", 16, 22, 5, "the learning rate of the cosine schedule depends on this number"),
        ("constant", 16, 12, 12, None),
        ("constant", 16, 12, 13, "must be at least 13, the step of the newest checkpoint, got 12"),
        ("cosine", 16, 16, 16, None),
    ],
)
def test_a_run_has_another_length_until_its_rates_would_have_been_others(
    schedule: str, steps: int, now: int, done: int, message: str | None
) -> None:
    changes = {"optimizer.schedule": schedule, "optimizer.warmup_steps": 3}
    changes |= {"optimizer.decay_steps": 5} if schedule == "wsd" else {}
    config = PRESETS["quickstart"]().with_options(changes)
    stored, longer = (with_train(config, max_steps=number) for number in (steps, now))
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        check_length(longer, stored, done)
    if message and "newest" not in message:
        check_length(dataclasses.replace(longer, extend=True), stored, done)


@pytest.mark.parametrize(("step", "is_accepted"), [(13, True), (14, False)])
def test_a_run_is_annealed_from_the_last_step_at_the_peak_rate(step: int, is_accepted: bool, tmp_path: Path) -> None:
    changes = {"optimizer.schedule": "wsd", "optimizer.decay_steps": 5, "optimizer.warmup_steps": 3}
    before = with_train(PRESETS["quickstart"]().with_options(changes), max_steps=18)
    parent = FoundCheckpoint(RunFolder(tmp_path), describe(before, DATA, "cpu:1"), step)
    config = before.with_options({"from_checkpoint": f"parent@{step}", "anneal": 3})
    message = f"parent@{step} must be a checkpoint before the learning rate of its run falls, at most step 13, got 14"
    with contextlib.nullcontext() if is_accepted else pytest.raises(UsageError, match=message):
        _check_fork(config, parent)


@pytest.mark.parametrize("length", ["--train.max-steps 20", "--train.max-tokens 5000"])
def test_a_schedule_that_does_not_fit_is_rejected_before_the_text_is_tokenized(tmp_path, monkeypatch, capsys, length):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("words of a book " * 3000)
    options = "--train.global-batch-size 8 --model.seq-len 32 --optimizer.schedule wsd --optimizer.warmup-steps 18"
    line = f"--preset baby --data book.txt --hardware local {options} {length}"
    assert main(line.split()) == 2
    assert "error: optimizer.warmup_steps and decay_steps must fit into the 20 steps of the run, got 18 and " in (
        capsys.readouterr().err
    )
    assert not cache_folder().exists() or not any(cache_folder().iterdir())
