"""From a configuration to a run that can start, in this process and on its device."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pretrain import PRESETS, PretrainConfig
from pretrain._errors import UsageError
from pretrain._resolve.resolve import resolve_settings, resolving
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._run.folder import RunFolder
from ray_jax_launch import parse_hardware

LOCAL = parse_hardware("local")
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
