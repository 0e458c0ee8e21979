"""Bad input of every kind: one sentence and exit code 2, or the right result, and nothing left behind."""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_gpt2 import create_optimizer, create_train_state
from pretrain import PretrainConfig, main
from pretrain._cli import parse_command
from pretrain._data import load_tokens
from pretrain._rejection import rejection
from pretrain._run.description import RUN, describe, describe_data
from pretrain._run.files import write_json
from pretrain._run.folder import RunFolder
from ray_jax_launch import Checkpoints

SMALL = "--data book.txt --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --train.max-steps 10"
TRAIN = f"--name run {SMALL}"
SAMPLE = "sample run --max-new-tokens 3"
EVAL = "eval run"
EXPORT = "export run out"
COMMANDS = (TRAIN, SAMPLE, EVAL, EXPORT)
END = 2**63
LONG = "n" * 300


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder to work in, with a text, its token files, and a finished run of a small model."""
    place = tmp_path_factory.mktemp("place")
    (place / "book.txt").write_text("A short book, of some words. " * 200)
    (place / "odd.bin").write_bytes(b"123")
    np.full(2000, 300, "<u2").tofile(place / "ids.bin")
    np.full(2000, 65, "<u2").tofile(place / "letters.bin")
    (place / "loop").symlink_to("loop")
    config = parse_command(shlex.split(TRAIN))
    assert isinstance(config, PretrainConfig)
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
        checkpoints.save(1, {"params": params}, metadata={RUN: description, "record": {"step": 1}})
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
    """Every folder, and every file with its size, but for caches, and what a start adds to a run that was there."""
    sizes = {str(path.relative_to(place)): path.stat().st_size if path.is_file() else None for path in place.rglob("*")}
    apart = ("cache/", *(f"runs/run/{name}" for name in (".ray", ".lock", "phases.jsonl", "samples.jsonl")))
    return {name: size for name, size in sizes.items() if not name.startswith(apart)}


def rejected(capsys, args, place):
    """The sentence that a command ends with."""
    before = contents(place)
    code = main(args)
    err = capsys.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    assert contents(place) == before
    assert err.count("\n") == 1
    return err


def old(place):
    """Make the run one of version 0.5, whose checkpoints have no description."""
    metadata = place / "runs/run/checkpoints/1/metadata/metadata"
    metadata.write_text('{"record": {"step": 1}}')
    (place / "runs/run/checkpoints/1/checksums.json").unlink()


def config_of(contents):
    """Damage the `config.json` of an old run, or delete it."""

    def damage(place):
        old(place)
        path = place / "runs/run/config.json"
        path.unlink() if contents is None else path.write_bytes(contents)

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
    """Delete a file of the run."""

    def damage(place):
        (place / "runs/run" / name).unlink()

    return damage


def nothing(place):
    pass


# A command line without a damaged file, and what its sentence has.
LINES = [
    ("--data nowhere.txt", "nowhere.txt"),
    ("--data nowhere.bin", "nowhere.bin"),
    ("--data book.txt --model.seq-len 1024", "book.txt must have at least 1025 validation tokens"),
    (f"--data book.txt --train.max-tokens {10**15}", "train.max_tokens must give at most 2147483647 steps, got None"),
    ("--data train=book.txt,val=nowhere.txt", "nowhere.txt"),
    ("--data train=book.txt,val=ids.bin", "data must be text or token files for both splits, got train=book.txt,val="),
    ("--data book.txt --prepare.num-processes 0", "prepare.num_processes must be at least 1, got 0."),
    ("--data book.txt --prepare.cache-path odd.bin/x", "odd.bin"),
    ("--data book.txt --prepare.cache-path s3://bucket/x", "prepare.cache_path must be a folder that all nodes"),
    (
        "--data book.txt --data-mode stream --train.max-epochs 2",
        "train.max_epochs must be absent with data_mode stream, which does not know the number of tokens",
    ),
    *(
        (f"--hardware local --data {data} --data-mode stream", "data must be text, as NAME or train=NAME,val=NAME,")
        for data in ("ids.bin", "a=1:book.txt,b=1:book.jsonl")
    ),
    (
        "--hardware local --data book.txt --data-mode stream --prepare.split position",
        "split must be start for one source that is read while it is prepared, got position.",
    ),
    ("--hardware local --data nowhere.txt --data-mode stream", "nowhere.txt"),
    ("--data book.txt --tokenizer gpt2", "The files of tokenizer 'gpt2' must be downloaded once, got"),
    ("--data someone/something", "must be a file or a dataset of the Hugging Face hub, got neither"),
    ("--data odd.bin", "odd.bin"),
    ("--data ids.bin", "must be below 257, the vocabulary of the tokenizer"),
    (
        "--data book.txt --hardware cpu:3",
        "must be divisible by 3 (3 data-parallel devices x 1 accumulation steps), got 16.",
    ),
    (
        "--data book.txt --hardware cpu:2 --train.grad-accum-steps 16",
        "must be divisible by 32 (2 data-parallel devices x 16 accumulation steps), got 16. Change it, train.grad",
    ),
    (
        "--data book.txt --hardware tpu:v7x:2x2x2 --train.global-batch-size 24",
        "must be divisible by 16 (16 data-parallel devices x 1 accumulation steps), got 24. Change it, train.grad",
    ),
    (
        "--data book.txt --hardware tpu:v6e:4x4 --mesh.tensor 8 --model.num-heads 8",
        "tpu:v6e:4x4: mesh axis tensor must divide the 4 devices of one process, got 8. Choose a smaller size, or",
    ),
    (
        "--data book.txt --hardware gpu:3x2 --mesh.fsdp 4 --train.global-batch-size 24",
        "gpu:3x2: mesh axes fsdp and tensor must be at least 1 and their product must divide the 6 devices, got 4",
    ),
    (
        "--data book.txt --hardware tpu:v4:2x2x2:2 --mesh.fsdp 16",
        "a product that divides the 8 devices of one TPU slice, got 16 and 1. Choose smaller sizes: only the data",
    ),
    ("--data book.txt --hardware tpu", "hardware"),
    ("--data book.txt --hardware gpu:2", "The Ray cluster must have 2 GPUs for gpu:2, got 0. Ask for fewer workers"),
    ("--data book.txt --storage-path book.txt", "must be accessible, got Not a directory."),
    ("--data book.txt --storage-path new/deep --model.vocab-size 100", "--model.vocab-size must be at least 257"),
    ("--data book.txt --name 'a b?c'", "name must be a printable text that begins with no dot or space and has no /"),
    ("--data book.txt --storage-path loop", "got Too many levels of symbolic links"),
    ("--data book.txt --storage-path file:book.txt", "a storage path must be"),
    ("--data book.txt --storage-path nowhere://x", "nowhere://x"),
    (
        "--data book.txt --model.vocab-size 100",
        "--model.vocab-size must be at least 257, the vocabulary of the tokenizer bytes",
    ),
    (f"--data book.txt --seed {END}", f"seed must be at least 0 and below {END}, got {END}"),
    (f"--data book.txt --name {LONG}", "must be accessible, got File name too long"),
    ("--data book.txt --model.vocab-size 999999999", "the model and its batch must fit the"),
    (f"{SMALL} --train.global-batch-size 100000000", "the model and its batch must fit the"),
    ("sample nowhere", "run must be the folder or URI of a run, or its name in runs, got nowhere."),
    ("sample nowhere --top-k 0", "--top-k must be at least 1, got 0."),
    ("sample nowhere --top-p 1.5", "--top-p must be above 0 and at most 1, got 1.5."),
    ("sample nowhere --temperature nan", "--temperature must be finite and at least 0, got nan."),
    ("sample nowhere --max-new-tokens -5", "--max-new-tokens must be at least 0, got -5."),
    ("sample nowhere --num-samples 0", "--num-samples must be at least 1, got 0."),
    ("sample nowhere --prompt ''", "--prompt must be a text of at least one character, got ''."),
    (f"{SAMPLE} --seed {END}", f"--seed must be at least 0 and below {END}, got {END}"),
    (f"{SAMPLE} --seed -1", f"--seed must be at least 0 and below {END}, got -1"),
    (f"sample {LONG}", "File name too long"),
    ("sample loop", "Too many levels of symbolic links"),
    ("sample book.txt", "run must be the folder or URI of a run"),
    ("eval nowhere", "run must be the folder or URI of a run, or its name in runs, got nowhere."),
    (f"{EVAL} --batch-size 0", "--batch-size must be at least 1, got 0."),
    (f"{EVAL} --data loop", "loop"),
    (f"{EVAL} --data train=letters.bin", "got 'train=letters.bin': val has no name."),
    (f"{EVAL} --data leters.bin", "leters.bin must be a token file, got a name that does not exist. Did you mean"),
    ("export run s3://bucket/x", "out must be a folder, got s3://bucket/x. Export to a folder, and copy the files"),
    ("export run book.txt/x", "must be accessible, got Not a directory"),
    ("export run book.txt", "out must be a new or empty folder, got book.txt."),
    ("export run loop", "loop must be accessible, got File exists."),
]
# Contents of the `config.json` of an old run, and what the sentence has.
CONFIGS = [
    (config_of(b""), "Invalid JSON: EOF while parsing a value"),
    (config_of(b'{"config": {"pre'), "Invalid JSON: EOF while parsing a string"),
    (config_of(b"[1]"), "Input should be an object"),
    (config_of(b'{"config": {}, "data": 3}'), "config.prepare: Field required"),
    (config_of(b"\xff\xfe{"), "Invalid JSON: expected value"),
    (field("config", "model", "num_layers", value="1"), "config.model.num_layers: Input should be"),
    (field("config", "model", "num_layers", value=0), "config.model: model.num_layers must be"),
    (field("data", value=7), "data: Input should be an object"),
    (field("data", "tokens", value=7), "data.tokens.str: Input should be a valid string"),
    (field("versions", value=[]), "versions: Input should be an object"),
]
# A command line, what is damaged before, and what the sentence has.
DAMAGED = [
    *(
        (line, damage, f"config.json must be JSON as a run writes it, got an error in it ({message}")
        for damage, message in CONFIGS
        for line in COMMANDS
    ),
    (TRAIN, config_of(None), "config.json must be JSON as a run writes it, got an error in it (Invalid JSON"),
    (TRAIN, folder_for("config.json"), "config.json must be a file, got something else. Move it away, or choose"),
    (
        f"{TRAIN} --optimizer.learning-rate 0.01",
        without("config.json"),
        "optimizer.learning_rate must be 0.002, its value at the start of the run in",
    ),
    (SAMPLE, field("versions", "nnx-gpt2", value="0.1.3"), "must be written by nnx-gpt2 0.2 or later"),
    (SAMPLE, field("config", "model", "num_layers", value=2), "error: the checkpoint must hold the arrays"),
    (EVAL, field("config", "model", "embed_dim", value=32), "error: the checkpoint must hold the arrays"),
    (EXPORT, field("config", "model", "scan_layers", value=True), "error: the checkpoint must hold the arrays"),
    (
        f"{TRAIN} --model.num-layers 2",
        lambda place: (field("config", "model", "num_layers", value=2)(place), without("result.json")(place)),
        "error: the checkpoint must hold the arrays",
    ),
    (TRAIN, folder_for("metrics.jsonl"), "metrics.jsonl must be a file, got something else."),
    (TRAIN, folder_for("starts.jsonl"), "starts.jsonl must be a file, got something else."),
    (TRAIN, folder_for("result.json"), "result.json must be a file, got something else."),
    (TRAIN, file_for("checkpoints"), "checkpoints must be a folder, got a file."),
]


@pytest.mark.parametrize(
    ("line", "damage", "message"), [*((line, nothing, message) for line, message in LINES), *DAMAGED]
)
def test_rejected(line, damage, message, place, capsys):
    damage(place)
    assert message in rejected(capsys, shlex.split(line), place)


def test_what_is_damaged_has_a_copy(place, capsys):
    """Each checkpoint holds a copy of `config.json`, and a damaged `result.json` is no result."""
    path = place / "runs/run/config.json"
    expected = path.read_text()
    for contents in (b"", b"[1]", b"\xff", None):
        path.unlink() if contents is None else path.write_bytes(contents)
        assert main(shlex.split(SAMPLE)) == 0
    assert main(shlex.split(TRAIN)) == 0
    assert "is finished; choose another --name for a new one\nsteps" in capsys.readouterr().out
    assert path.read_text() == expected


@pytest.mark.parametrize(
    ("line", "out"),
    [
        (f"{EVAL} --batch-size 100000000", '"step": 1'),
        *(
            (f"{EVAL} --data {data}", '"num_tokens": ')
            for data in ("letters.bin", "train=letters.bin,val=letters.bin", "a=1:letters.bin,b=2:./letters.bin")
        ),
        (f"{SAMPLE} --seed {END - 1}", "\n"),
        ("sample file:$PLACE/runs/run --max-new-tokens 3 --num-samples 40", "\n"),
        ("export run file://$PLACE/out", "wrote the model of step 1 to file://"),
    ],
)
def test_right(line, out, place, capsys):
    assert main(shlex.split(line.replace("$PLACE", str(place)))) == 0
    captured = capsys.readouterr()
    assert out in captured.out
    assert captured.err == ""
    assert ("out" in line) == (place / "out" / "model.safetensors").exists()


def test_a_failed_allocation_is_rejected_in_one_sentence():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.numpy.zeros(10**13).block_until_ready()
    expected = "the model and its batch must fit the memory, got RESOURCE_EXHAUSTED: Out of memory allocating"
    assert (rejection(caught.value) or "").startswith(expected)
    assert rejection(KeyError("step")) is None


FULL = "the output must be writable, got No space left on device. Free some space, or write it elsewhere."
# What bash runs, the exit code, and what standard error has.
SHELL = [
    *((f"PYTHONUNBUFFERED=1 $PRETRAIN {line} > /dev/full", 2, FULL) for line in (SAMPLE, "--help")),
    *((f"PYTHONUNBUFFERED= $PRETRAIN {line} > /dev/full", 2, FULL) for line in (TRAIN, "--help")),
    (f"$PRETRAIN {EVAL} >&- 2>&-", 0, ""),
    (f"$PRETRAIN {EXPORT} >&-", 0, ""),
    (f"$PRETRAIN {SAMPLE} | true", 141, ""),
    (f"PYTHONIOENCODING=ascii $PRETRAIN {SAMPLE} --prompt \u00fc | grep '^.xfc'", 0, ""),
    (f"LC_ALL=C $PRETRAIN {SAMPLE} --prompt $'\\xff'", 0, ""),
    (f"GCE_METADATA_ROOT=127.0.0.1:9 $PRETRAIN --storage-path gs://bucket/runs {SMALL}", 2, "got gs://bucket/runs/"),
    (
        f"cd runs/run/checkpoints && cp -r 1 2 && echo > $(find 2/params -path '*/d/*' | head -1) && cd ../../.. && "
        f"$PRETRAIN {SAMPLE}",
        0,
        "checkpoint 2 in ",
    ),
    (f"chmod 0 runs/run; $LIMITED $PRETRAIN {SAMPLE}", 2, "Permission denied"),
    (f"chmod 0 book.txt; $LIMITED $PRETRAIN {TRAIN}", 2, "Permission denied"),
    (
        f"chmod 500 runs; $LIMITED $PRETRAIN --name new {SMALL}",
        2,
        "runs/new must be accessible, got Permission denied.",
    ),
    (
        f"chmod 0 runs/run/metrics.jsonl; $LIMITED $PRETRAIN {TRAIN}",
        2,
        "metrics.jsonl must be accessible, got Permission",
    ),
    (
        f"touch runs/run/.lock; chmod 500 runs/run; $LIMITED $PRETRAIN {TRAIN}",
        2,
        "runs/run must be writable, got a read-only folder.",
    ),
    ("$PRETRAIN sample nowhere 2> /dev/full", 2, ""),
    (f"chmod 0 runs/run/result.json; $LIMITED $PRETRAIN {TRAIN}", 2, "result.json must be accessible, got Permission"),
    (f"chmod 500 .; $LIMITED $PRETRAIN {EXPORT}", 2, "out must be accessible, got Permission denied."),
]


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full, and gives up root's rights by setpriv")
@pytest.mark.parametrize(("line", "code", "message"), SHELL)
def test_in_a_shell(line, code, message, place):
    # root may read everything, unless it gives up the right to.
    limited = "setpriv --bounding-set=-dac_override,-dac_read_search" if os.geteuid() == 0 else ""
    pretrain = f"{sys.executable} {Path(__file__).parent.parent}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("$PRETRAIN", pretrain).replace("$LIMITED", limited)],
        cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "WARNING" not in done.stderr  # a line of a library's own format
    assert done.stderr.count("\n") == (1 if message else 0)
