"""Storage and text that fail during a run: the run has begun, so nothing is deleted, and the exit code is 1."""

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

APPLICATION = str(Path(__file__).parent.parent)
OPTIONS = (
    "--tokenizer bytes --hardware local --name run --model.num-layers 1 --model.num-heads 2 --train.max-steps 1000000 "
    "--train.max-failures 0 --train.log-every 5 --train.eval-tokens 1000 --train.sample-tokens 0 --trackers"
)
BOOK = "--data book.txt --model.embed-dim 16 --train.checkpoint-every 5"
LIMIT_S = 120


@contextmanager
def training(place, options, limit=None):
    """A command that trains in a folder, and the file of its output."""
    (place / "book.txt").write_text("A short book, of some words. " * 500)
    log = place / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, APPLICATION, *OPTIONS.split(), *options.split()],
            cwd=place, stdout=file, stderr=file, env={**os.environ, "JAX_PLATFORMS": "cpu"},
            preexec_fn=limit,
        )  # fmt: skip
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def wait_for_records(place, process, log):
    metrics, limit = place / "runs/run/metrics.jsonl", time.monotonic() + LIMIT_S
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.1)
    assert process.poll() is None, log.read_text()


def failure(process, log):
    """The only error line of a command that must fail with exit code 1."""
    assert process.wait(timeout=LIMIT_S) == 1, log.read_text()
    printed = log.read_text()
    (error,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert error.endswith(": the same command continues from the newest checkpoint")
    return error


def phases(place):
    return [json.loads(line)["phase"] for line in (place / "runs/run/phases.jsonl").read_text().splitlines()]


@pytest.mark.fault
def test_a_storage_that_vanishes_fails_the_run_in_one_sentence(tmp_path, record_property):
    record_property("fault", "the storage of a run vanishes while it trains")
    record_property("lost", "the run, which ends with exit code 1")
    with training(tmp_path, BOOK) as (process, log):
        wait_for_records(tmp_path, process, log)
        (tmp_path / "runs").rename(tmp_path / "moved")
        (tmp_path / "runs").touch()  # nothing can be created in it
        failure(process, log)
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.fault
def test_a_folder_that_is_renamed_during_its_run_gets_no_double(tmp_path, record_property):
    record_property("fault", "the folder of a run is renamed while it trains")
    record_property("lost", "steps since the previous checkpoint; the command ends with exit code 1")
    with training(tmp_path, BOOK) as (process, log):
        wait_for_records(tmp_path, process, log)
        (tmp_path / "runs/run").rename(tmp_path / "runs/renamed")
        sentence = failure(process, log)
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["renamed"]
        assert "was moved, deleted or replaced while its command ran" in sentence
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.fault
def test_a_command_writes_nothing_into_another_run_in_the_place_of_its_own(tmp_path, record_property):
    record_property("fault", "another run takes the name of a run that trains")
    record_property("lost", "steps since the previous checkpoint; the command ends with exit code 1")
    with training(tmp_path, BOOK) as (process, log):
        wait_for_records(tmp_path, process, log)
        (tmp_path / "other").mkdir()
        (tmp_path / "other/.lock").write_text('{"owner": "another"}')
        (tmp_path / "runs/run").rename(tmp_path / "runs/renamed")
        (tmp_path / "other").rename(tmp_path / "runs/run")
        sentence = failure(process, log)
        assert [path.name for path in (tmp_path / "runs/run").iterdir()] == [".lock"]
        assert "was moved, deleted or replaced while its command ran" in sentence
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.fault
def test_a_first_checkpoint_that_does_not_fit_deletes_no_records(tmp_path, record_property):
    record_property("fault", "the first checkpoint does not fit the storage")
    record_property("lost", "the steps before it, but not their records")
    options = "--data book.txt --model.embed-dim 256 --train.checkpoint-every 5 --train.global-batch-size 2"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    with training(tmp_path, options, limit) as (process, log):
        failure(process, log)
    assert (tmp_path / "runs/run/metrics.jsonl").stat().st_size
    assert phases(tmp_path)[-1] == "failed"


@pytest.mark.slow
@pytest.mark.fault
def test_tokens_that_vanish_during_a_run_are_a_failure_and_no_bad_input(tmp_path, record_property):
    record_property("fault", "train.bin is deleted while a run trains")
    record_property("lost", "steps since the previous checkpoint; the command ends with exit code 1")
    (tmp_path / "bin").mkdir()
    for name in ("train.bin", "val.bin"):
        (tmp_path / "bin" / name).write_bytes(b"A\0" * 20_000)
    with training(tmp_path, f"{BOOK} --data bin") as (process, log):
        wait_for_records(tmp_path, process, log)
        (tmp_path / "bin/train.bin").unlink()
        failure(process, log)
    assert (tmp_path / "runs/run/metrics.jsonl").stat().st_size


@pytest.mark.slow
@pytest.mark.fault
def test_a_bad_line_of_a_stream_deletes_no_records(tmp_path, record_property):
    record_property("fault", "a line of the text is no JSON, found while the run trains on the text before it")
    record_property("lost", "steps since the previous checkpoint; the command ends with exit code 1")
    # The first 4 MiB are parsed at once, and the first shards of text are tokenized before the run trains.
    row = json.dumps({"text": "A short book, of some words. " * 20, "unused": "x" * 500}) + "\n"
    (tmp_path / "text.jsonl").write_text(row * 4_500 + "{no JSON\n" + row)
    options = (
        "--data text.jsonl --data-mode stream --model.embed-dim 4 --model.seq-len 64 --train.checkpoint-every 1000000"
    )
    with training(tmp_path, f"{options} --prepare.num-processes 1") as (process, log):
        wait_for_records(tmp_path, process, log)
        assert "text.jsonl" in failure(process, log)
        assert "Traceback" not in log.read_text()
    assert phases(tmp_path)[-1] == "failed"
    assert (tmp_path / "runs/run/metrics.jsonl").stat().st_size
