"""Levels of the output of `train`, and the beginning of its time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

APPLICATION = Path(__file__).parent.parent
SMALL = (
    "--hardware local --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --train.max-steps 4 "
    "--train.eval-tokens 100 --train.sample-tokens 0 --train.log-every 2 --trackers --data book.txt --name run"
)


@pytest.fixture
def train(tmp_path):
    """Runs `train` in a process, and returns its exit code, its output and its errors."""
    (tmp_path / "book.txt").write_text("words of a book " * 3000)

    def run(*words):
        done = subprocess.run(
            [sys.executable, APPLICATION, *SMALL.split(), *words], cwd=tmp_path, env=os.environ | {"COLUMNS": "80"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_quiet_run_prints_one_line_and_its_errors(train, tmp_path):
    for _ in range(2):  # the second command finds the finished run
        code, out, err = train("-q")
        (line,) = out.splitlines()
        assert re.fullmatch(rf"{re.escape(str(tmp_path / 'runs/run'))}  step 4  loss [0-9.]+  val loss [0-9.]+", line)
        assert (code, err) == (0, "")
    code, out, err = train("--quiet", "--seed", "3")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_verbose_run_prints_what_the_libraries_log(train, tmp_path):
    code, out, err = train("--verbose")
    assert code == 0
    assert re.search("^absl: ", err, re.MULTILINE)
    assert re.search(r"^\d\d:\d\d:\d\d  step 4/4  ", out, re.MULTILINE)
    assert "done in " in out


NOTES = """
import sys, time

def note(event, args):
    if event == "import" and args[0] == "jax":
        with open("imported.txt", "a") as file:
            file.write(f"{time.time()}\\n")

sys.addaudithook(note)
"""


def test_the_time_counts_from_the_start_of_the_command(train, tmp_path, monkeypatch):
    """The imports of JAX and Ray take seconds, and are part of the start."""
    (tmp_path / "sitecustomize.py").write_text(NOTES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert train()[0] == 0
    imported_s = float((tmp_path / "imported.txt").read_text().split()[0])
    phases = [json.loads(line) for line in (tmp_path / "runs/run/phases.jsonl").read_text().splitlines()]
    assert phases[0]["phase"] == "starting"
    assert phases[0]["time_s"] < imported_s
    seconds = json.loads((tmp_path / "runs/run/result.json").read_text())["seconds"]
    assert sum(seconds.values()) >= round(phases[-1]["time_s"] - imported_s, 3)


def test_the_default_prints_no_logs_of_libraries(train):
    code, out, err = train()
    assert (code, err) == (0, "")
    assert out.startswith("loading JAX and Ray\n")


def test_quiet_and_verbose_exclude_each_other(train):
    code, out, err = train("-q", "-v")
    assert (code, out) == (2, "")
    assert err == "error: --quiet cannot be given with --verbose. Leave one of them out.\n"
