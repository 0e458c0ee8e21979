"""How much `train` prints: `--quiet`, the default, and `--verbose`; and from when it counts its time."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

APPLICATION = Path(__file__).parent.parent
SMALL = (
    "--hardware local --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --train.max-steps 4 "
    "--train.eval-tokens 100 --train.sample-tokens 0 --train.log-every 2 --trackers --data book.txt --name run"
)


@pytest.fixture
def train(tmp_path):
    """Runs `train` in a process, and returns its exit code, its output, its errors and its seconds."""
    (tmp_path / "book.txt").write_text("words of a book " * 3000)

    def run(*words):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, APPLICATION, *SMALL.split(), *words], cwd=tmp_path, env=os.environ | {"COLUMNS": "80"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr, time.monotonic() - began

    return run


def test_a_quiet_run_prints_one_line_and_its_errors(train, tmp_path):
    for _ in range(2):  # the second command finds the finished run
        code, out, err, _ = train("-q")
        (line,) = out.splitlines()
        assert re.fullmatch(rf"{re.escape(str(tmp_path / 'runs/run'))}  step 4  loss [0-9.]+  val loss [0-9.]+", line)
        assert (code, err) == (0, "")
    code, out, err, _ = train("--quiet", "--seed", "3")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_verbose_run_prints_what_the_libraries_log(train, tmp_path):
    code, out, err, seconds = train("--verbose")
    assert code == 0
    assert re.search("^absl: ", err, re.MULTILINE)
    assert re.search(r"^\d\d:\d\d:\d\d  step 4/4  ", out, re.MULTILINE)
    # The time counts from the start of the command, with the imports.
    wall_s = json.loads((tmp_path / "runs/run/result.json").read_text())["wall_s"]
    phases = [json.loads(line) for line in (tmp_path / "runs/run/phases.jsonl").read_text().splitlines()]
    assert wall_s < seconds < wall_s + 5
    assert phases[-1]["time_s"] - phases[0]["time_s"] < wall_s
    assert "done in " in out


def test_the_default_prints_no_logs_of_libraries(train):
    code, out, err, _ = train()
    assert (code, err) == (0, "")
    assert out.startswith("loading JAX and Ray\n")


def test_quiet_and_verbose_exclude_each_other(train):
    code, out, err, _ = train("-q", "-v")
    assert (code, out) == (2, "")
    assert err == "error: --quiet cannot be given with --verbose. Leave one of them out.\n"
