"""The state of a run, which `runs`, `watch` and `report` share."""

import dataclasses
import os

import pytest

from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history
from pretrain._run.state import run_state

BEGAN_S = 1_700_000_000.0


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = PRESETS["quickstart"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
    write_description(run, describe(config, data, "local"))
    return run


@pytest.mark.parametrize(
    ("phase", "after_s", "state"),
    [
        ("compiling", 299, "training"),
        ("training", 301, "no sign of life"),
        ("stopped", 301, "stopped"),
        ("finished", 301, "finished"),
    ],
)
def test_a_run_that_is_silent_for_five_minutes_shows_no_sign_of_life(folder, phase, after_s, state):
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": phase})
    assert run_state(read_history(folder), BEGAN_S + after_s) == state


@pytest.mark.parametrize(("after_s", "state"), [(299, "training"), (301, "no sign of life")])
def test_a_run_of_pretrain_0_8_was_seen_when_its_files_were_written(folder, after_s, state):
    append_line(folder.metrics, {"step": 10, "loss": 2.5})
    for path in (folder.metrics, folder.config):
        os.utime(path, (BEGAN_S, BEGAN_S))
    assert run_state(read_history(folder), BEGAN_S + after_s) == state
