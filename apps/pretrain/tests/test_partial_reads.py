"""Reads of parts of a log: their results, and that their costs do not grow with the log."""

import dataclasses
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run import files, partial_reads
from pretrain._run.description import DataDescription, describe
from pretrain._run.folder import RunFolder
from pretrain._run.history import last_sign_of_life, read_recent, work_s
from pretrain._run.log_parts import SAMPLES, TEXTS
from pretrain._run.metrics import TEXT_METRICS, Numbers, cut_lines, read_records, recent_records
from pretrain._run.partial_reads import NewLines, last_lines, lines_backwards, lines_from
from pretrain._screen.run_view import RunView
from pretrain._training.run_log import RunLog

CONFIG = with_vocab_size(PRESETS["quickstart"](), 257)
TRAIN = dataclasses.replace(CONFIG.train, max_steps=10**6, log_every=1, eval_every=100, checkpoint_every=100)
CONFIG = dataclasses.replace(CONFIG, train=TRAIN, trackers=())
DESCRIPTION = describe(CONFIG, DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={}), "local")


def record(step: int) -> dict[str, Any]:
    values = {"step": step, "time_s": 1e9 + step, "windows": "0123456789abcdef", "loss": 9 / (1 + step), "step_s": 1.0}
    return values | ({"val_loss": 9.5 / (1 + step)} if step % 100 == 0 else {})


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the number of lines that were parsed."""
    num_lines, parse = 0, files.parse_line

    def counted(*args: Any) -> Any:
        nonlocal num_lines
        num_lines += 1
        return parse(*args)

    for module in (files, partial_reads):
        monkeypatch.setattr(module, "parse_line", counted)
    return lambda: num_lines


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("end", ["", '{"step": 9', '{"step": 9}', "x" * 500])
def test_the_lines_backwards_are_those_of_the_file(
    block: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_reads, "_BLOCK", block)
    path, texts = tmp_path / "log", ['{"step": 1}', "damaged", "", "z" * 300, '{"step": 2, "loss": 0.5}', '{"step": 3}']
    path.write_text("".join(text + "\n" for text in texts) + end)
    found = [*lines_backwards(path)]
    content = path.read_bytes()
    assert [line for _, line in found] == [{"step": 3}, {"step": 2, "loss": 0.5}, {"step": 1}]
    assert [json.loads(content[:position].splitlines()[-1]) for position, _ in found] == [line for _, line in found]
    assert all(content[position - 1 : position] == b"\n" for position, _ in found)
    assert last_lines(path, 2) == [{"step": 2, "loss": 0.5}, {"step": 3}]


@pytest.mark.parametrize("content", ["", "\n", "x", '{"step": 1}'])
def test_a_log_without_a_line_has_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert [*lines_backwards(path)] == [*lines_from(path, 0)] == NewLines(path).read() == recent_records(path, 5) == []
    path.write_text(content)
    assert [*lines_backwards(path)] == [*lines_from(path, 0)] == NewLines(path).read() == recent_records(path, 5) == []


def test_the_lines_from_a_step_are_found_among_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [json.dumps({"step": 3 * step, "loss": 1.0}) for step in range(1000)]
    for place in (5, 500, 501, 998):
        lines[place] = "\0" * 9000
    path.write_text("\n".join(lines) + "\n")
    steps = [line["step"] for line in lines_from(path, 0)]
    assert len(steps) == 996
    for step in (-1, 0, 1, 14, 15, 16, 1499, 1500, 1502, 1504, 2990, 2994, 2997, 2998):
        assert [line["step"] for line in lines_from(path, step)] == [found for found in steps if found >= step]


def test_all_lines_of_a_step_are_among_those_from_it(tmp_path: Path) -> None:
    """A step has a sample of each prompt."""
    path, lines = tmp_path / "log", [{"step": 7 * step, "prompt": prompt} for step in range(100) for prompt in "abc"]
    write(path, lines)
    for step in range(0, 700, 7):
        assert [*lines_from(path, step, TEXTS[SAMPLES])] == [line for line in lines if line["step"] >= step]


def test_few_lines_are_parsed_to_find_a_step_among_many(tmp_path: Path, count: Callable[[], int]) -> None:
    path = tmp_path / "log"
    write(path, [record(step) for step in range(100_000)])
    assert next(lines_from(path, 71_234, TEXT_METRICS)) == record(71_234)
    assert count() < 60


def test_recent_records_have_the_last_ones_the_validations_and_some_of_all(
    tmp_path: Path, count: Callable[[], int]
) -> None:
    numbers = []
    for num_records in (20_000, 80_000):
        write(path := tmp_path / "log", [record(step) for step in range(num_records)])
        before = count()
        found = recent_records(path, 100)
        numbers.append(count() - before)
        assert [one["step"] for one in found[-64:]] == [*range(num_records - 64, num_records)]
        assert found == [record(one["step"]) for one in found]
        steps = [one["step"] for one in found]
        assert steps == sorted({*steps})
        assert max(after - before for before, after in pairwise(steps)) <= num_records / 60
        assert {num_records - 100, num_records - 200} <= {*steps}
        assert sum("val_loss" in one for one in found) >= 64
    assert numbers[1] < 1.2 * numbers[0] < 5000
    write(path, [record(step) for step in range(900)])
    assert recent_records(path, 100) == read_records(path)


def test_the_numbers_of_a_file_are_its_records_without_texts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert [*Numbers(path)] == Numbers(path)[:] == []
    records = [record(step) | ({"num_skipped": 2**53 - step} if step > 70 else {}) for step in range(150)]
    write(path, [*records[9:], *records[:9]])
    found = Numbers(path)
    without = [{name: value for name, value in one.items() if name != "windows"} for one in records]
    assert [*found] == without
    assert (len(found), found[-1], found[3:9:2]) == (150, without[-1], without[3:9:2])
    assert {name: type(value) for name, value in found[100].items()} == {n: type(v) for n, v in without[100].items()}
    with pytest.raises(IndexError):
        found[150]


def test_new_lines_are_those_since_the_last_look_and_those_that_a_restart_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, [record(step) for step in range(50)])
    new = NewLines(path, TEXT_METRICS)
    assert new.read() == []
    with path.open("a") as file:
        file.write(json.dumps(record(50)) + "\n" + '{"step": 51, "lo')
        file.flush()
        assert new.read() == [record(50)]
        file.write('ss": 1.0}\n')
    assert [new.read(), new.read()] == [[{"step": 51, "loss": 1.0}], []]
    cut_lines(path, 39, TEXT_METRICS)
    again = [record(step) | {"time_s": 2e9} for step in range(40, 60)]
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in again))
    assert [new.read(), new.read()] == [again, []]
    path.unlink()
    assert new.read() == []
    write(path, [record(step) for step in range(2)])
    assert new.read() == [record(0), record(1)]


def test_after_a_cut_of_very_many_lines_new_ones_are_still_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, [record(step) for step in range(3000)])
    new = NewLines(path, TEXT_METRICS)
    write(path, [record(step) for step in range(5)])
    assert new.read() == []
    with path.open("a") as file:
        file.write(json.dumps(record(5)) + "\n")
    assert new.read() == [record(5)]


def test_a_start_and_a_cut_read_the_end_of_a_long_run_alone(tmp_path: Path, count: Callable[[], int]) -> None:
    folder = RunFolder(tmp_path)
    write(folder.metrics, [record(step) for step in range(30_000)])
    found = folder.metrics.stat().st_ino
    with RunLog(folder, CONFIG, DESCRIPTION, send=lambda metrics: None) as log:
        log.begin(29_900, 1e9)
        log.open("cpu", 1)
    assert count() < 200
    assert folder.metrics.stat().st_ino == found
    assert last_lines(folder.metrics, 1, TEXT_METRICS) == [record(29_899)]
    assert len(read_records(folder.metrics)) == 29_900


def test_a_cut_is_on_disk_before_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sync = [], os.fsync
    write(path := tmp_path / "log", [{"step": step} for step in range(10)])
    monkeypatch.setattr(os, "fsync", lambda file: (sizes.append(os.fstat(file).st_size), sync(file)))
    cut_lines(path, 4)
    assert sizes == [5 * len('{"step": 1}\n')]


def test_the_view_of_a_long_run_has_its_time_and_its_curve(tmp_path: Path, count: Callable[[], int]) -> None:
    folder = RunFolder(tmp_path)
    time_s, phases = 1e9, []
    for number in range(1000):
        name = "stopped" if number % 100 == 99 else ("training", "saving")[number % 2]
        before_s = 0.0
        if phases:
            last = phases[-1]
            before_s = last["before_s"] + (0.0 if last["phase"] == "stopped" else time_s - last["time_s"])
        phases.append({"step": number, "time_s": time_s, "phase": name, "before_s": before_s})
        time_s += number % 7
    write(folder.phases, phases)
    write(folder.metrics, [record(step) for step in range(30_000)])
    history = read_recent(folder, DESCRIPTION)
    view = RunView.of(history, is_local=True, clock=lambda: time_s)
    expected = sum(number % 7 for number in range(1000) if number % 100 != 99)
    assert view.elapsed_s() == work_s(history.phases, time_s) == expected
    assert last_sign_of_life(history.phases, history.records) == 1e9 + 29_999
    assert count() < 5000
    for curve in (view.losses, view.val_losses):
        steps = [step for step, _ in curve.points]
        assert len(steps) > 50
        assert max(after - before for before, after in pairwise(steps)) < 30_000 / 30
