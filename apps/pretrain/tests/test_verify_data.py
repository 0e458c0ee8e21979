"""Token files that were damaged at the same size: the run ends, and says which file."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from rich.console import Console

from owt_data import DataError, PrepareOptions, open_tokens, prepare
from pretrain._commands.verify_data import verified_data
from pretrain._errors import RunFailedError

RUN = (
    "--data tokens --hardware local --name run --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 "
    "--train.sample-tokens 0"
)


@pytest.fixture
def place(tmp_path):
    """A folder with token files, whose training tokens have another id."""
    (tmp_path / "book.txt").write_text("A short book, of some words. " * 2000)
    prepare(str(tmp_path / "book.txt"), tmp_path / "tokens", PrepareOptions(tokenizer="bytes"))
    tokens = np.fromfile(tmp_path / "tokens" / "train.bin", "<u2")
    tokens[-1000] ^= 1
    tokens.tofile(tmp_path / "tokens" / "train.bin")
    return tmp_path


def run(place, options):
    return subprocess.run(
        [sys.executable, "-m", "pretrain", *RUN.split(), *options.split()],
        cwd=place, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_damaged_file_ends_a_run(place):
    done = run(place, f"--train.max-steps {10**9} --train.checkpoint-every {10**9}")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"error: {place / 'tokens' / 'train.bin'} is damaged: " in done.stderr
    assert "the same command continues" in done.stderr
    assert (place / "runs" / "run" / "starts.jsonl").exists()
    assert not (place / "runs" / "run" / "result.json").exists()


def test_a_damaged_file_is_found_before_the_training_if_asked(place):
    done = run(place, "--train.max-steps 5 --verify-data first")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"error: {place / 'tokens' / 'train.bin'} is damaged: " in done.stderr
    assert not (place / "runs").exists()


@pytest.mark.slow
def test_files_are_not_verified_if_asked(place):
    done = run(place, "--train.max-steps 5 --verify-data off")
    assert done.returncode == 0, done.stderr
    assert (place / "runs" / "run" / "result.json").exists()


@pytest.mark.parametrize("mode", ["off", "first", "background"])
def test_tokens_are_verified_when_it_is_asked(mode, place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    data, steps = open_tokens(str(place / "tokens"), tokenizer="bytes"), []
    error = {"off": None, "first": DataError, "background": RunFailedError}[mode]
    with (
        pytest.raises(error, match=r"train\.bin is damaged") if error else contextlib.nullcontext(),
        verified_data(data, mode, Console(quiet=True), stop=steps.append),
    ):
        limit_s = time.monotonic() + 60
        while mode == "background" and not steps and time.monotonic() < limit_s:
            time.sleep(0.01)
        steps.append("trained")
    assert steps[-1:] == ([] if mode == "first" else ["trained"])
    assert verifying_threads() == []


def verifying_threads():
    return [thread.name for thread in threading.enumerate() if "_stop_if_damaged" in thread.name]


def test_a_damaged_file_stops_a_training_until_it_ends(place, monkeypatch):
    """A launch that has not begun yet ignores the first request."""
    monkeypatch.setattr("pretrain._commands.verify_data._REPEAT_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    data = open_tokens(str(place / "tokens"), tokenizer="bytes")
    requests, has_three = [], threading.Event()

    def stop(damage):
        requests.append(damage)
        if len(requests) == 3:
            has_three.set()

    with (
        pytest.raises(RunFailedError, match=r"train\.bin is damaged") as caught,
        verified_data(data, "background", Console(quiet=True), stop=stop),
    ):
        assert has_three.wait(60)
    assert set(requests) == {str(caught.value)}
    assert verifying_threads() == []
