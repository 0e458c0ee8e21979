"""The state of a run, which `runs`, `watch` and `report` share."""

import dataclasses
import os
from itertools import accumulate

import pytest

from pretrain import PRESETS
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history
from pretrain._run.lock import lock_run
from pretrain._run.state import last_seen_s, run_state

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
        ("failed", 301, "failed"),
        ("finished", 301, "finished"),
    ],
)
def test_a_run_that_is_silent_for_five_minutes_shows_no_sign_of_life(folder, phase, after_s, state):
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": phase})
    assert run_state(read_history(folder), BEGAN_S + after_s) == state


@pytest.mark.parametrize(
    ("interval_s", "after_s", "state"),
    [(1, 59, "training"), (1, 70, "no sign of life"), (400, 1200, "training"), (400, 1300, "no sign of life")],
)
def test_silence_is_told_after_a_time_that_depends_on_the_time_between_records(folder, interval_s, after_s, state):
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
    for step in range(4):
        append_line(folder.metrics, {"step": step, "time_s": BEGAN_S + step * interval_s, "loss": 2.0})
    assert run_state(read_history(folder), BEGAN_S + 3 * interval_s + after_s) == state


@pytest.mark.parametrize(
    ("phase", "intervals_s", "after_s", "state"),
    [
        ("training", [1000.0, *[1.0] * 20], 70.0, "no sign of life"),  # only the last intervals count
        ("training", [1.0, 1.0, 40.0, 1.0], 175.0, "training"),  # the longest one counts: 60 + 3 * 40
        ("training", [1.0, 1.0, 40.0, 1.0], 185.0, "no sign of life"),
        ("training", [1.0], 290.0, "training"),  # one interval tells nothing
        ("evaluating", [1.0] * 7, 290.0, "training"),  # there are no records in it
        ("evaluating", [1.0] * 7, 310.0, "no sign of life"),
    ],
)
def test_the_longest_of_the_last_intervals_tells_how_long_silence_may_be(
    phase: str, intervals_s: list[float], after_s: float, state: str, folder: RunFolder
) -> None:
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": phase})
    times = [*accumulate(intervals_s, initial=BEGAN_S)]
    for step, time_s in enumerate(times):
        append_line(folder.metrics, {"step": step, "time_s": time_s, "loss": 2.0})
    assert run_state(read_history(folder), times[-1] + after_s) == state


def test_a_run_without_a_phase_was_seen_when_it_was_described(folder: RunFolder) -> None:
    os.utime(folder.config, (BEGAN_S, BEGAN_S))
    assert last_seen_s(read_history(folder)) == BEGAN_S
    append_line(folder.metrics, {"step": 9, "time_s": BEGAN_S + 7, "loss": 2.0})
    assert last_seen_s(read_history(folder)) == BEGAN_S + 7


def test_the_time_between_two_commands_is_no_interval(folder):
    append_line(folder.starts, {"step": 0, "time_s": BEGAN_S - 90_001})
    append_line(folder.metrics, {"step": 0, "time_s": BEGAN_S - 90_000, "loss": 2.0})
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
    append_line(folder.starts, {"step": 0, "time_s": BEGAN_S})
    for step in range(1, 4):
        append_line(folder.metrics, {"step": step, "time_s": BEGAN_S + step, "loss": 2.0})
    assert run_state(read_history(folder), BEGAN_S + 100) == "no sign of life"


def test_a_command_that_was_killed_on_this_machine_has_failed_at_once(folder):
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": "training"})
    with lock_run(folder.path):
        assert run_state(read_history(folder), BEGAN_S + 1) == "training"
    assert run_state(read_history(folder), BEGAN_S + 1) == "failed"


def test_a_stopped_run_whose_command_starts_again_is_not_stopped(folder):
    append_line(folder.phases, {"step": 0, "time_s": BEGAN_S, "phase": "stopped"})
    with lock_run(folder.path):
        assert run_state(read_history(folder), BEGAN_S + 1000) == "training"
    assert run_state(read_history(folder), BEGAN_S + 1000) == "stopped"
