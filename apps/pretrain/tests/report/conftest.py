"""Runs on disk, in the format of `_run`."""

import dataclasses
import json
import math

import pytest
from rich.console import Console

from pretrain import PRESETS
from pretrain._commands.report import report
from pretrain._config import with_vocab_size
from pretrain._run.description import DataDescription, describe
from pretrain._run.files import append_line, write_json
from pretrain._run.folder import RunFolder


@pytest.fixture
def write_run(tmp_path):
    """Writes a run of the quickstart, and returns its folder."""

    def write(name="run", *, records=(), starts=(), phases=(), samples=(), data="builtin", val="cd34", **options):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        config = dataclasses.replace(with_vocab_size(PRESETS["quickstart"](), 257), data=data, **options)
        tokens = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"train.bin": "ab12", "val.bin": val})
        write_json(folder.config, describe(config, tokens, "cpu:1").to_json())
        folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        for path, lines in ((folder.starts, starts), (folder.phases, phases), (folder.samples, samples)):
            for line in lines:
                append_line(path, line)
        return folder

    return write


@pytest.fixture
def make_page(tmp_path):
    """Reports runs, and returns the page."""

    def make(*folders, **options):
        names = [str(folder) for folder in folders]
        return report(names, out=str(tmp_path / "page.html"), console=Console(quiet=True), **options).read_text()

    return make


@pytest.fixture
def records():
    """Makes the records of a run that learns."""

    def make(count, *, every=25, began_s=1_700_000_000.0, floor=1.5):
        made = [{"step": 0, "tokens": 0, "epoch": 0.0, "time_s": began_s, "val_loss": 5.6}]
        for number in range(1, count + 1):
            loss = round(floor + 4 * math.exp(-number / 4) + 0.02 * math.sin(7 * number), 5)
            made.append(
                {
                    "step": number * every, "tokens": number * every * 1024, "epoch": 0.01 * number,
                    "time_s": began_s + number, "loss": loss, "grad_norm_max": 0.5 + 1 / number,
                    "learning_rate": 1e-3, "step_s": 0.04, "tokens_per_s": 25_600.0, "data_wait_s": 1e-5,
                }
            )  # fmt: skip
            if number % 10 == 0:
                made[-1] |= {"val_loss": round(loss + 0.1, 5), "val_bits_per_byte": 2.2}
        return made

    return make
