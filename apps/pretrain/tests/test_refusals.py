"""Bad input: one sentence, exit code 2, nothing left behind."""

import json

import numpy as np
import pytest

from pretrain import PRESETS, main
from pretrain._run import RunFolder, describe, write_json


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty folder to work in, with a text in it and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-tokenizers"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    (tmp_path / "book.txt").write_text("A short book. " * 100)
    return tmp_path


def refusal(capsys, *args):
    """What the command says on its way out with exit code 2."""
    try:
        code = main(list(args))
    except SystemExit as exit_:  # options are refused by tyro, in its own frame
        code = exit_.code
    assert code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def unframed(text):
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--preset", "huge"], "invalid choice 'huge' for argument '--preset'"),
        (["--model.num-layer", "3"], "Unrecognized options: --model.num-layer"),
        (["--model.num-heads", "5"], "model.embed_dim must be a multiple of model.num_heads, got 128 and 5"),
        (["--train.max-steps", "0"], "train.max_steps must be at least 1, got 0"),
        (["--train.max-steps", "many"], "invalid literal for int() with base 10: 'many'"),
        (["launch"], "Unrecognized options: launch"),
    ],
)
def test_options(args, message, capsys, workplace):
    assert message in unframed(refusal(capsys, *args))
    assert [path.name for path in workplace.iterdir()] == ["book.txt"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "nowhere.txt"], "expected a file or folder, but nowhere.txt does not exist"),
        (["--data", "nowhere.bin"], "nowhere.bin, which does not exist"),
        (["--data", "book.txt", "--model.seq-len", "512"], "expected at least 513 validation tokens"),
        (["--data", "book.txt", "--tokenizer", "gpt2"], "the files of tokenizer 'gpt2' could not be downloaded"),
        (["--data", "someone/something"], "as a dataset of the Hugging Face hub it could not be loaded"),
        (["--data", "odd.bin"], "expected an even number of bytes in"),
        (["--data", "ids.bin"], "must be below 257, the vocabulary of the tokenizer"),
        (
            ["--data", "book.txt", "--hardware", "cpu:3"],
            "must be a multiple of the 3 devices of cpu:3 that share it, got 16.",
        ),
        (
            ["--data", "book.txt", "--hardware", "tpu:v7x:2x2x2", "--train.global-batch-size", "24"],
            "must be a multiple of the 16 devices of tpu:v7x:2x2x2 that share it, got 24. Change it, or --hardware.",
        ),
        (
            ["--data", "book.txt", "--hardware", "tpu:v6e:4x4", "--mesh.tensor", "8", "--model.num-heads", "8"],
            "tpu:v6e:4x4: mesh axis tensor must divide the 4 devices of one process, got 8. Choose a smaller size, or",
        ),
        (
            ["--data", "book.txt", "--hardware", "gpu:3x2", "--mesh.fsdp", "4", "--train.global-batch-size", "24"],
            "gpu:3x2: mesh axes fsdp and tensor must be at least 1 and their product must divide the 6 devices, got 4",
        ),
        (
            ["--data", "book.txt", "--hardware", "tpu:v4:2x2x2:2", "--mesh.fsdp", "16"],
            "a product that divides the 8 devices of one TPU slice, got 16 and 1. Choose smaller sizes: only the data",
        ),
        (["--data", "book.txt", "--hardware", "tpu"], "expected hardware as auto, cpu:WORKERS"),
        (["--data", "book.txt", "--storage-path", "book.txt"], "expected a storage path that can be written"),
        (
            ["--data", "book.txt", "--storage-path", "nowhere://x"],
            "expected a folder, s3://bucket/path or gs://bucket/path that",
        ),
        (["--data", "book.txt", "--model.vocab-size", "100"], "expected a model.vocab_size of at least 257"),
        (["sample", "nowhere"], "expected the folder or URI of a run, or the name of one in runs, got nowhere"),
        (
            ["sample", "nowhere", "--top-k", "0"],
            "expected --temperature of at least 0 and --top-k of at least 1, got 0.8",
        ),
        (["sample", "nowhere", "--temperature", "nan"], "expected --temperature of at least 0 and --top-k"),
        (["sample", "nowhere", "--max-new-tokens", "-5"], "expected --max-new-tokens of at least 0"),
        (["eval", "nowhere"], "expected the folder or URI of a run, or the name of one in runs, got nowhere"),
    ],
)
def test_sentences(args, message, capsys, workplace):
    (workplace / "odd.bin").write_bytes(b"123")
    np.full(2000, 300, "<u2").tofile(workplace / "ids.bin")
    before = {path.name for path in workplace.iterdir()}
    err = refusal(capsys, *args)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    left = {path.name for path in workplace.iterdir()} - before
    assert left <= {"runs"}
    assert not any((workplace / "runs").glob("*"))


def test_a_name_that_is_another_runs(capsys, workplace):
    folder = RunFolder(workplace / "runs" / "mine")
    folder.path.mkdir(parents=True)
    write_json(folder.config, describe(PRESETS["quickstart"](), {"fingerprint": {}}, "cpu:1"))
    err = refusal(capsys, "--name", "mine", "--data", "book.txt", "--optimizer.learning-rate", "0.01")
    assert "was started with optimizer.learning_rate 0.002, not 0.01" in err
    assert json.loads(folder.config.read_text())["config"]["optimizer"]["learning_rate"] == 0.002


@pytest.mark.fault
def test_a_run_whose_configuration_a_power_cut_emptied_is_refused_in_a_sentence(capsys, workplace, record_property):
    record_property("fault", "config.json is empty, as a power cut could leave it before version 0.5")
    record_property("lost", "nothing, once it is restored from a copy")
    folder = RunFolder(workplace / "runs" / "mine")
    folder.path.mkdir(parents=True)
    folder.config.touch()
    for command in (["--name", "mine", "--data", "book.txt"], ["sample", "mine"], ["eval", "mine"]):
        err = refusal(capsys, *command)
        assert err.count("\n") == 1
        assert "config.json must be a file of one JSON object, got an empty one. Restore it from a copy, or" in err


def test_more_gpus_than_the_cluster_has(capsys, workplace):
    err = refusal(capsys, "--data", "book.txt", "--hardware", "gpu:2")
    assert err == (
        "error: The Ray cluster must have 2 GPUs for gpu:2, got 0. Ask for fewer workers, add nodes, or set "
        "RAY_ADDRESS to a cluster that has them\n"
    )
    assert not any((workplace / "runs").glob("*"))


def test_a_run_without_a_checkpoint_has_nothing_to_sample(capsys, workplace):
    folder = RunFolder(workplace / "runs" / "young")
    folder.path.mkdir(parents=True)
    write_json(folder.config, describe(PRESETS["quickstart"](), {"fingerprint": {}}, "cpu:1"))
    assert "the run must have a checkpoint, got none in" in refusal(capsys, "sample", "young")
