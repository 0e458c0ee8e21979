"""Bad input of every kind: one sentence and exit code 2, or the right result, and nothing left behind."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import pytest
from rich.console import Console

from nnx_gpt2 import create_optimizer, create_train_state
from pretrain import main
from pretrain._cli import read_config
from pretrain._data import load_tokens
from pretrain._description import RUN, describe, describe_data
from pretrain._run import RunFolder, write_json
from ray_jax_launch import Checkpoints

MODEL = ["--model.num-layers=1", "--model.num-heads=2", "--model.embed-dim=16", "--train.max-steps=10"]
TRAIN = ["--name=run", "--data=book.txt", *MODEL]
SAMPLE = ["sample", "run", "--max-new-tokens=3"]
EVAL = ["eval", "run"]
EXPORT = ["export", "run", "out"]
SEED = str(2**63)
LONG = "n" * 300


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder to work in, with a text, its token files, and a finished run of a small model."""
    place = tmp_path_factory.mktemp("place")
    (place / "book.txt").write_text("A short book, of some words. " * 200)
    (place / "loop").symlink_to("loop")
    config = read_config(TRAIN)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        tokens = load_tokens(config, Console(quiet=True))
    folder = RunFolder(place / "runs" / "run")
    folder.path.mkdir(parents=True)
    description = describe(config, describe_data(tokens), "cpu:1").to_json()
    write_json(folder.config, description)
    write_json(folder.result, {"steps": 1, "metrics": {"val_loss": 5.5}, "wall_s": 1.0, "restarts": 0, "workers": 1})
    for path in (folder.metrics, folder.starts):
        path.write_text('{"step": 0, "workers": 1}\n')
    params = create_train_state(config.model, create_optimizer(config.optimizer, 10), jax.random.key(0)).params
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(1, {"params": params}, metadata={RUN: description})
    return place


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """A copy of `finished`, to work in."""
    place = shutil.copytree(finished, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(finished / "cache"))  # the description names the token files in there
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    return place


def contents(place):
    """Every file below a folder with its size, without locks and caches."""
    return {
        str(path.relative_to(place)): path.stat().st_size
        for path in place.rglob("*")
        if path.is_file() and path.name != ".lock" and "cache" not in path.parts
    }


def rejection(capsys, args, place):
    """The sentence that a command ends with."""
    before = contents(place)
    try:
        code = main(args)
    except SystemExit as exit_:  # options are rejected by tyro, in a frame
        code = exit_.code
    err = capsys.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    assert contents(place) == before
    return " ".join(err.replace("│", " ").split())


def old(place):
    """Make the run one of version 0.5, whose checkpoints have no description."""
    metadata = place / "runs/run/checkpoints/1/metadata/metadata"
    metadata.write_text("{}")
    (place / "runs/run/checkpoints/1/checksums.json").unlink()


def config_of(contents):
    """Damage the `config.json` of an old run."""

    def damage(place):
        old(place)
        (place / "runs/run/config.json").write_bytes(contents)

    return damage


def field(*names, value):
    """Change a field in the `config.json` of an old run."""

    def damage(place):
        old(place)
        path = place / "runs/run/config.json"
        description = inner = json.loads(path.read_text())
        for name in names[:-1]:
            inner = inner[name]
        inner[names[-1]] = value
        path.write_text(json.dumps(description))

    return damage


def folder_for(name):
    """Put a folder in the place of a file of the run."""

    def damage(place):
        path = place / "runs/run" / name
        path.unlink()
        path.mkdir()

    return damage


def file_for(name):
    """Put a file in the place of a folder of the run."""

    def damage(place):
        path = place / "runs/run" / name
        shutil.rmtree(path, ignore_errors=True)
        path.write_text("a file")

    return damage


def without(name):
    def damage(place):
        (place / "runs/run" / name).unlink()

    return damage


def unreadable(name):
    def damage(place):
        (place / name).chmod(0)

    return damage


COMMANDS = {"train": TRAIN, "sample": SAMPLE, "eval": EVAL, "export": EXPORT}
CONFIGS = {
    "empty": (config_of(b""), "Invalid JSON: EOF while parsing a value"),
    "cut": (config_of(b'{"config": {"pre'), "Invalid JSON: EOF while parsing a string"),
    "list": (config_of(b"[1]"), "Input should be an object"),
    "other-json": (config_of(b'{"config": {}, "data": 3}'), "config.prepare: Field required"),
    "not-utf-8": (config_of(b"\xff\xfe{"), "Invalid JSON: expected value"),
    "text-for-number": (field("config", "model", "num_layers", value="1"), "config.model.num_layers: Input should be"),
    "zero-layers": (
        field("config", "model", "num_layers", value=0),
        "config.model: Value error, model.num_layers must be",
    ),
    "number-for-data": (field("data", value=7), "data: Input should be an object"),
    "number-for-tokens": (field("data", "tokens", value=7), "data.tokens.str: Input should be a valid string"),
    "list-for-versions": (field("versions", value=[]), "versions: Input should be an object"),
}
CASES = {
    **{
        f"config-{kind}-{command}": (
            args,
            damage,
            f"config.json must be JSON that a run has written, got an error in it ({found}",
        )
        for kind, (damage, found) in CONFIGS.items()
        for command, args in COMMANDS.items()
    },
    "config-missing-old-run": (TRAIN, lambda place: (old(place), without("config.json")(place)), "config.json must be"),
    "config-folder": (TRAIN, folder_for("config.json"), "config.json must be a file, got something else. Move it away"),
    "config-deleted": (
        [*TRAIN, "--optimizer.learning-rate=0.01"],
        without("config.json"),
        "optimizer.learning_rate must be 0.002, as when the run in",
    ),
    "config-of-nnx-gpt2-0.1": (
        SAMPLE,
        field("versions", "nnx-gpt2", value="0.1.3"),
        "must be of nnx-gpt2 0.2 or later",
    ),
    "config-of-another-model-sample": (SAMPLE, field("config", "model", "num_layers", value=2), "checkpoint 1 in"),
    "config-of-another-model-eval": (EVAL, field("config", "model", "embed_dim", value=32), "checkpoint 1 in"),
    "config-of-another-model-export": (EXPORT, field("config", "model", "scan_layers", value=True), "checkpoint 1 in"),
    "metrics-folder": (TRAIN, folder_for("metrics.jsonl"), "metrics.jsonl must be a file, got something else."),
    "starts-folder": (TRAIN, folder_for("starts.jsonl"), "starts.jsonl must be a file, got something else."),
    "result-folder": (TRAIN, folder_for("result.json"), "result.json must be a file, got something else."),
    "checkpoints-file": (TRAIN, file_for("checkpoints"), "checkpoints must be a folder, got a file."),
    "ray-file": (TRAIN, file_for(".ray"), ".ray must be a folder, got a file."),
    "seed-train": ([*TRAIN, "--seed", SEED], None, f"seed must be at least 0 and below {SEED}, got {SEED}"),
    "seed-sample": ([*SAMPLE, "--seed", SEED], None, f"--seed must be at least 0 and below {SEED}, got {SEED}"),
    "seed-sample-negative": ([*SAMPLE, "--seed", "-1"], None, f"--seed must be at least 0 and below {SEED}, got -1"),
    "name-long": (["--name", LONG, "--data=book.txt"], None, "must be accessible, got File name too long"),
    "run-name-long": (["sample", LONG], None, "File name too long"),
    "storage-loop": (["--data=book.txt", "--storage-path=loop"], None, "got Too many levels of symbolic links"),
    "storage-file-uri": (["--data=book.txt", "--storage-path=file:book.txt"], None, "a storage path must be"),
    "run-loop": (["sample", "loop"], None, "got [Errno 40] Too many levels of symbolic links"),
    "export-uri": (["export", "run", "s3://bucket/x"], None, "out must be a folder, got s3://bucket/x. Export to"),
    "export-below-file": (["export", "run", "book.txt/x"], None, "must be accessible, got Not a directory"),
    "export-over-file": (["export", "run", "book.txt"], None, "out must be a new or empty folder, got book.txt."),
    "export-loop": (["export", "run", "loop"], None, "loop must be accessible, got File exists."),
}


@pytest.mark.parametrize(("args", "damage", "message"), CASES.values(), ids=CASES)
def test_rejected(args, damage, message, place, capsys):
    if damage is not None:
        damage(place)
    sentence = rejection(capsys, args, place)
    assert message in sentence


RIGHT = {
    **{
        f"config-{kind}": (
            SAMPLE,
            lambda place, contents=contents: (place / "runs/run/config.json").write_bytes(contents),
        )
        for kind, contents in {"empty": b"", "list": b"[1]", "not-utf-8": b"\xff"}.items()
    },
    "config-missing": (SAMPLE, without("config.json")),
    "config-missing-train": (TRAIN, without("config.json")),
    "eval-batch-size": ([*EVAL, "--batch-size=100000000"], None),
    "seed-largest": ([*SAMPLE, "--seed", str(2**63 - 1)], None),
    "file-uri": (["sample", "file:PLACE/runs/run", "--max-new-tokens=3"], None),
    "export-file-uri": (["export", "run", "file://PLACE/out"], None),
}


@pytest.mark.parametrize(("args", "damage"), RIGHT.values(), ids=RIGHT)
def test_right(args, damage, place, capsys):
    if damage is not None:
        damage(place)
    assert main([arg.replace("PLACE", str(place)) for arg in args]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "error" not in captured.err
    assert ("out" in args[-1]) == (place / "out" / "model.safetensors").exists()


def run_in_shell(place, line, **environment):
    """Run a line of shell, where $PRETRAIN is the command."""
    command = f"{sys.executable} -c 'import sys; from pretrain import main; sys.exit(main())'"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("$PRETRAIN", command)],
        cwd=place, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "args", [SAMPLE, EVAL, EXPORT, ["--help"], TRAIN], ids=["sample", "eval", "export", "help", "train"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
def test_standard_output_is_full(args, is_buffered, place):
    done = run_in_shell(place, f"$PRETRAIN {' '.join(args)} > /dev/full", PYTHONUNBUFFERED="" if is_buffered else "1")
    assert (done.returncode, done.stderr) == (
        2, "error: the output must be writable, got No space left on device. Free some space, or write it elsewhere.\n"
    )  # fmt: skip
