"""The lines before a run: its model, data, length and hardware."""

import dataclasses
import io

import jax.numpy as jnp
import pytest
from rich.console import Console

from owt_data import GrowingTokens, PrepareOptions, open_tokens, prepare
from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run.folder import RunFolder
from pretrain._screen.introduction import introduce
from ray_jax_launch import Checkpoints, parse_hardware


@pytest.mark.parametrize(("hardware", "per_worker"), [("cpu:1", "16"), ("cpu:4", "4"), ("cpu:2-4", "4-8")])
@pytest.mark.parametrize(("num_microbatches", "shown"), [(1, ""), (2, ", in 2 microbatches")])
def test_the_introduction_has_the_sizes_of_the_run(hardware, per_worker, num_microbatches, shown, tmp_path):
    (tmp_path / "text.txt").write_text("x" * 100_000)
    prepare(str(tmp_path / "text.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    data, config = open_tokens(str(tmp_path / "tokens"), tokenizer="bytes"), PRESETS["quickstart"]()
    train = dataclasses.replace(config.train, max_steps=2000, grad_accum_steps=num_microbatches)
    config = with_vocab_size(dataclasses.replace(config, train=train), 257)
    out = io.StringIO()
    folder, console = RunFolder(tmp_path / "run"), Console(file=out, width=80)
    introduce(config, data, parse_hardware(hardware), folder, None, None, console)
    assert out.getvalue().splitlines() == [
        "model     834,432 parameters: 4 layers of width 128",
        "data      90,001 tokens to train on, 10,000 to validate on (bytes)",
        f"step      1,024 tokens: 16 windows of 64, {per_worker} per worker{shown}",
        "length    2,000 steps: 2,048,000 tokens, 22.76 epochs",
        f"hardware  {parse_hardware(hardware)}",
        f"run folder: {tmp_path / 'run'}",
    ]


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([1, 2, 3, 4], "cpu:1-4"),
        ([1, 2, 4], "cpu:1-4, with 1, 2 or 4 workers: other numbers do not fit the mesh or the batch"),
        ([2, 3], "cpu:1-4, with 2 or 3 workers: other numbers do not fit the mesh or the batch"),
        ([1], "cpu:1-4, with 1 worker: other numbers do not fit the mesh or the batch"),
    ],
)
def test_the_introduction_has_the_numbers_of_workers_that_fit(counts, shown, tmp_path):
    (tmp_path / "text.txt").write_text("x" * 100_000)
    prepare(str(tmp_path / "text.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    data = open_tokens(str(tmp_path / "tokens"), tokenizer="bytes")
    config = with_vocab_size(dataclasses.replace(PRESETS["quickstart"](), hardware="cpu:1-4"), 257)
    out, hardware = io.StringIO(), parse_hardware("cpu:1-4").restricted_to(counts)
    introduce(config, data, hardware, RunFolder(tmp_path / "run"), None, None, Console(file=out, width=80))
    assert f"hardware  {shown}" in out.getvalue().splitlines()


def test_the_introduction_of_a_stream_that_continues(tmp_path):
    (tmp_path / "text.txt").write_text("x" * 100_000)
    prepare(str(tmp_path / "text.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    data = open_tokens(str(tmp_path / "tokens"), tokenizer="bytes")
    data = dataclasses.replace(data, train=GrowingTokens(tmp_path / "tokens", "train", is_one_source=True))
    preset = PRESETS["quickstart"]()
    train = dataclasses.replace(preset.train, max_steps=7, global_batch_size=18)
    config = with_vocab_size(dataclasses.replace(preset, train=train), 257)
    folder, out = RunFolder(tmp_path / "a [run]"), io.StringIO()
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(3, {"params": {"bias": jnp.zeros(2)}}, metadata={})
    of_log = dataclasses.replace(train, log_every=3, checkpoints_to_keep=5)
    before = dataclasses.replace(config, train=of_log, hardware="local", profile="3:5", trackers=())
    introduce(config, data, parse_hardware("cpu:2-9"), folder, None, before, Console(file=out, width=20))
    assert out.getvalue().splitlines() == [
        "model     834,432 parameters: 4 layers of width 128",
        "data      a growing number of tokens to train on, 10,000 to validate on (bytes)",
        "step      1,152 tokens: 18 windows of 64, 2-9 per worker",
        "length    7 steps: 8,064 tokens",
        f"hardware  {parse_hardware('cpu:2-9')}",
        f"run folder: {folder.path}",
        "the run continues from its newest checkpoint",
        "changed since the last start: hardware local -> auto, trackers '' -> tensorboard, profile 3:5 -> none, "
        "train.log_every 3 -> 25, train.checkpoints_to_keep 5 -> 2",
        "the next save deletes all but the newest 2 checkpoints, the best one and those kept for good",
    ]
