"""A folder to work in, with a text, its token files, and a finished run of a small model."""

import dataclasses
import functools
import shlex
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state
from pretrain import PretrainConfig, main
from pretrain._cli import parse_command
from pretrain._config import with_vocab_size
from pretrain._data import load_tokens
from pretrain._resolve.settings import resolve_order
from pretrain._run.description import RUN, describe, describe_data
from pretrain._run.files import write_json
from pretrain._run.folder import RunFolder
from ray_jax_launch import Checkpoints

SMALL = "--data book.txt --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --train.max-steps 10"
TRAIN = f"--name run {SMALL}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder to work in, with a text, its token files, and a finished run of a small model."""
    place = tmp_path_factory.mktemp("place")
    (place / "book.txt").write_text("A short book, of some words. " * 200)
    (place / "odd.bin").write_bytes(b"123")
    np.full(2000, 300, "<u2").tofile(place / "ids.bin")
    for name in ("letters.bin", "again.bin"):
        np.full(2000, 65, "<u2").tofile(place / name)
    (place / "loop").symlink_to("loop")
    (place / "weights").mkdir()
    (place / "weights" / "config.json").write_text('{"model_type": "gpt2"}')
    config = parse_command(shlex.split(TRAIN))
    assert isinstance(config, PretrainConfig)
    config = resolve_order(with_vocab_size(config, 257))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        tokens = load_tokens(config, Console(quiet=True))
    folder = RunFolder(place / "runs" / "run")
    folder.path.mkdir(parents=True)
    description = describe(config, describe_data(tokens), "cpu:1").to_json()
    write_json(folder.config, description)
    write_json(folder.result, {"steps": 1, "metrics": {"val_loss": 5.5}, "restarts": 0, "workers": 1})
    for path in (folder.metrics, folder.starts):
        path.write_text('{"step": 0, "workers": 1}\n')
    save_checkpoint(place, description)
    return place


def save_checkpoint(place, description):
    """Save a checkpoint of the small model with a description."""
    with Checkpoints(place / "runs/run/checkpoints") as checkpoints:
        checkpoints.save(1, {"params": make_params()}, metadata={RUN: description, "record": {"step": 1}})


@functools.cache
def make_params():
    config = parse_command(shlex.split(TRAIN))
    assert isinstance(config, PretrainConfig)
    model = dataclasses.replace(config.model, vocab_size=257)
    return create_train_state(model, create_optimizer(OptimizerConfig(), 10), jax.random.key(0)).params


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """A copy of `finished`, to work in."""
    place = shutil.copytree(finished, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(finished / "cache"))  # the description names the token files in there
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    return place


def contents(place):
    """Every folder, and every file with its size, but for caches, and what a start adds to a run that was there."""
    sizes = {str(path.relative_to(place)): path.stat().st_size if path.is_file() else None for path in place.rglob("*")}
    apart = ("cache/", *(f"runs/run/{name}" for name in (".ray", ".lock", "phases.jsonl", "samples.jsonl")))
    return {name: size for name, size in sizes.items() if not name.startswith(apart)}


@pytest.fixture
def save(place):
    """Saves a checkpoint with a description."""
    return lambda description: save_checkpoint(place, description)


SLOW_START = "Ray did not start within 30 s"  # a warning, on a machine with too much work


@pytest.fixture
def rejected(place, capsys):
    """Runs a command that is rejected, and returns its sentence."""

    def run(args):
        before = contents(place)
        code = main(args)
        lines = capsys.readouterr().err.splitlines(keepends=True)
        err = "".join(line for line in lines if SLOW_START not in line)
        assert code == 2, err
        assert "Traceback" not in err
        assert contents(place) == before
        assert err.count("\n") == 1
        return err

    return run
