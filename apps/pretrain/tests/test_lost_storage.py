"""Storage that vanishes during a run: a failure, not bad input."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

APPLICATION = str(Path(__file__).parent.parent)
OPTIONS = (
    "--data book.txt --tokenizer bytes --hardware local --name run --model.num-layers 1 --model.num-heads 2 "
    "--model.embed-dim 16 --train.max-steps 1000000 --train.max-failures 0 --train.checkpoint-every 5 "
    "--train.log-every 5 --train.eval-tokens 1000 --train.sample-tokens 0 --trackers"
)


@pytest.mark.fault
def test_a_storage_that_vanishes_fails_the_run_in_one_sentence(tmp_path, record_property):
    record_property("fault", "the storage of a run vanishes while it trains")
    record_property("lost", "the run, which ends with exit code 1")
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 500)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, APPLICATION, *OPTIONS.split()],
            cwd=tmp_path, stdout=log, stderr=log, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
    try:
        metrics, limit = tmp_path / "runs/run/metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        assert process.poll() is None, (tmp_path / "log").read_text()
        (tmp_path / "runs").rename(tmp_path / "moved")
        (tmp_path / "runs").touch()  # nothing can be created in it
        assert process.wait(timeout=120) == 1, (tmp_path / "log").read_text()
    finally:
        process.kill()
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].endswith(": the same command continues from the newest checkpoint")
