"""Configurations in files: TOML, and the `config.json` of a run."""

import contextlib
import dataclasses
import json
import os
import threading
import time

import pytest

from pretrain import PRESETS, PretrainConfig, main
from pretrain._cli import parse_command
from pretrain._command_line.command_classes import ShowConfig
from pretrain._errors import UsageError
from pretrain._run.description import DataDescription, describe

TOML = """
preset = "baby"
seed = 5
prompts = ["a", "b\\n"]

[train]
max_steps = 7
eval-tokens = "none"

[optimizer]
learning_rate = 1
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*arguments):
    config = parse_command(arguments)
    assert isinstance(config, PretrainConfig)
    return config


def test_a_file_replaces_the_preset(in_folder):
    (in_folder / "run.toml").write_text(TOML)
    config, baby = parsed("--config", "run.toml"), PRESETS["baby"]()
    assert config == dataclasses.replace(
        baby,
        seed=5,
        prompts=("a", "b\n"),
        train=dataclasses.replace(baby.train, max_steps=7, eval_tokens=None),
        optimizer=dataclasses.replace(baby.optimizer, learning_rate=1.0),
    )
    assert type(config.optimizer.learning_rate) is float


def test_all_of_a_pipe_is_read_whose_writer_pauses():
    """As `--config <(cat base.toml; make_options)`."""
    read_end, write_end = os.pipe()

    def write():
        with os.fdopen(write_end, "w") as pipe:
            for line in ("seed = 5", "wait_for_resources_s = 9"):
                pipe.write(f"{line}\n")
                pipe.flush()
                time.sleep(0.5)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        config = parsed("--config", f"/dev/fd/{read_end}")
    finally:
        thread.join()
        os.close(read_end)
    assert (config.seed, config.wait_for_resources_s) == (5, 9)


def test_the_command_line_replaces_the_file(in_folder):
    (in_folder / "run.toml").write_text(TOML)
    config = parsed("--train.max-steps", "9", "--config", "run.toml", "--seed=6", "--preset", "quickstart")
    assert (config.preset, config.seed, config.train.max_steps) == ("quickstart", 6, 9)
    assert config.optimizer.learning_rate == 1.0
    assert config.train.eval_every == PRESETS["quickstart"]().train.eval_every


def test_a_wrong_pair_in_a_file_is_corrected_by_the_command_line(in_folder):
    (in_folder / "run.toml").write_text("[train]\ngrad_accum_steps = 5")  # the batch of the preset is 16
    assert parsed("--config", "run.toml", "--train.global-batch-size", "15").train.grad_accum_steps == 5


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("", (), (1000, 5.0, None)),
        ("max_steps = 7", (), (7, None, None)),
        ("max_steps = 7\nmax_epochs = 2", (), (7, 2.0, None)),
        ("max_epochs = 2", ("--train.max-tokens", "99"), (1000, None, 99)),
    ],
)
def test_a_length_replaces_the_length_of_what_it_replaces(in_folder, file, line, expected):
    (in_folder / "run.toml").write_text(f"[train]\n{file}")
    train = parsed("--preset", "wikitext", "--config", "run.toml", *line).train
    assert (train.max_steps, train.max_epochs, train.max_tokens) == expected


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "line",
    [
        (),
        ("--train.max-steps", "7", "--train.eval-tokens", "none", "--trackers"),
        ("--train.max-epochs", "0.5", "--train.max-tokens", "9", "--name", "a 'b' \"c\" \\ \u00fc", "--dashboard"),
        ("--optimizer.learning-rate", "1.2345678901234567e-05", "--optimizer.min-learning-rate", "0"),
        (
            "--prompts",
            "a\tb",
            "\u20ac \U0001f600 \x7f",
            "$'\\n'",
            "--prepare.row-end",
            "\r\n",
            "--prepare.limit-rows=1",
        ),
    ],
)
def test_a_printed_configuration_is_read_back_exactly(in_folder, preset, line, capsys):
    assert main(["--preset", preset, *line, "--print-config"]) == 0
    (in_folder / "run.toml").write_text(capsys.readouterr().out)
    assert parsed("--config", "run.toml") == parsed("--preset", preset, *line)


def test_printing_starts_nothing(in_folder, capsys):
    assert parse_command(["--seed", "3", "--print-config"]) == ShowConfig(config=parsed("--seed", "3"))
    assert main(["--data", "nowhere.txt", "--print-config"]) == 0
    assert 'data = "nowhere.txt"' in capsys.readouterr().out
    assert list(in_folder.iterdir()) == []


@pytest.fixture
def description(in_folder):
    """The description of a run, as JSON."""
    config = parsed("--preset", "gpt2", "--seed", "5", "--prompts", "a", "b")
    return describe(config, DataDescription(tokens="x", tokenizer="gpt2", fingerprint={}), "cpu:1").to_json()


@pytest.mark.parametrize(("name", "text"), [("a.toml", "seed = 5"), ("A.TOML", "seed = 5"), ("A.JSON", '{"seed": 5}')])
def test_a_file_may_come_from_windows(in_folder, name, text):
    """Its name may be in capitals, and a mark of the byte order may precede its text."""
    (in_folder / name).write_text(text, encoding="utf-8-sig")
    assert parsed("--config", name).seed == 5


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_configuration_of_a_run_is_an_input(in_folder, description, is_bare):
    (in_folder / "config.json").write_text(json.dumps(description["config"] if is_bare else description))
    expected = parsed("--preset", "gpt2", "--seed", "5", "--prompts", "a", "b", "--name", "again")
    assert parsed("--config", "config.json", "--name", "again") == expected


def test_the_configuration_of_another_version_is_rejected(in_folder, description, capsys):
    (in_folder / "config.json").write_text(json.dumps(description | {"format": 99}))
    assert main(["--config", "config.json", "--print-config"]) == 2
    assert "config.json must have format 1, which pretrain " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.toml", "[train]\nlearning_rate = 1", "no option train.learning_rate, in x.toml; did you mean optimizer."),
        ("x.toml", "[models]\nnum_layers = 1", "no option models.num_layers, in x.toml; did you mean model.num_"),
        ("x.toml", "sed = 1", "no option sed, in x.toml; did you mean seed?"),
        ("x.toml", "model = 1", "model in x.toml must be a section, got 1. Write the names of its options."),
        ("x.toml", "zzz = 1", "options in x.toml must be those of pretrain --help-all, got zzz."),
        ("x.toml", "'' = 1", "options in x.toml must be those of pretrain --help-all, got ''."),
        ("x.toml", "[seed]\nx = 1", "no option seed.x, in x.toml; "),
        ("x.toml", "config = 'y.toml'", "options in x.toml must be those of pretrain --help-all, got config."),
        ("x.toml", "[train]\nmax_steps = 1.5", "train.max_steps in x.toml must be an integer, got 1.5."),
        ("x.toml", "[train]\nmax_steps = true", "train.max_steps in x.toml must be an integer, got True."),
        ("x.toml", "seed = 'none'", "seed in x.toml must be an integer, got 'none'."),
        ("x.toml", "dashboard = 1", "dashboard in x.toml must be true or false, got 1."),
        ("x.toml", "prompts = 'a'", "prompts in x.toml must be texts, got 'a'."),
        ("x.toml", "prompts = [1]", "prompts in x.toml must be texts, got [1]."),
        ("x.toml", "preset = 'babi'", "got 'babi'. Did you mean baby?"),
        ("x.toml", "[train]\nmax_steps = 0", "train.max_steps must be at least 1 and at most 2147483647, got 0."),
        ("x.toml", "seed = ", "x.toml must be TOML, got an error in it (Invalid value"),
        ("x.toml", b"\xff", "x.toml must be TOML, got an error in it ('utf-8' codec"),
        ("x.json", "{", "x.json must be JSON, got an error in it ("),
        ("x.json", "[1]", "x.json must hold options by their names, got list."),
        ("x.json", '{"config": {}, "data": {}}', "x.json must have format 1, which pretrain "),
        ("x.json", '{"train": {"max_step": 1}}', "no option train.max_step, in x.json; did you mean train.max_steps?"),
        (
            "x.json",
            '{"seed": 3, "seed": 4}',
            "x.json must be JSON, got an error in it (seed occurs twice).",
        ),
        ("x.json", '{"train": {"max_steps": 3, "max_steps": 4}}', "error in it (max_steps occurs twice)."),
        ("x.json", '{"format": 1, "files": {}}', "x.json must hold options by their names, got format, files. Give a"),
        (
            "x.toml",
            "[train]\nmax_steps = 5\nmax-steps = 6",
            "x.toml must give each option once, got train.max_steps twice.",
        ),
        (
            "x.json",
            '{"train.max_steps": 7, "train": {"max_steps": 9}}',
            "give each option once, got train.max_steps twi",
        ),
        ("x.json", '{"config": {}, "data": {}, "format": 9}', "got 9, of an unknown version. Give another --config."),
        (
            "x.json",
            '{"config": {}, "data": {}, "format": 1}',
            "config.prepare: Field required). Give another --config.",
        ),
        ("y.toml", "", "x.toml must be accessible, got No such file or directory."),
    ],
)
def test_a_wrong_file_is_rejected_in_one_sentence(in_folder, name, content, sentence, capsys):
    (in_folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["--config", "x.toml" if name == "y.toml" else name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize(
    ("num_bytes", "is_accepted"), [(32_000, True), (32_001, False)], ids=["the most", "a byte more"]
)
def test_a_file_has_a_largest_size(in_folder, num_bytes, is_accepted, capsys):
    text = "seed = 7\n#"
    (in_folder / "x.toml").write_text(text + "x" * (num_bytes - len(text)))
    assert main(["--config", "x.toml", "--print-config"]) == (0 if is_accepted else 2)
    captured = capsys.readouterr()
    assert ("seed = 7\n" in captured.out) == is_accepted
    assert ("at most 32,000 bytes" in captured.err) == (not is_accepted)


def test_a_pipe_whose_writer_writes_nothing_is_not_waited_for_forever(monkeypatch, capsys):
    monkeypatch.setattr("pretrain._command_line.config_file._SILENCE_S", 0.01)
    read_end, write_end = os.pipe()
    assert main(["--config", f"/dev/fd/{read_end}"]) == 2
    assert "a pipe that is silent" in capsys.readouterr().err
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("name", ["x.toml", "large.toml", "folder", "pipe"])
def test_no_file_stays_open(in_folder, name):
    (in_folder / "x.toml").write_text("seed = 7")
    (in_folder / "large.toml").write_text("#" * 40_000)
    (in_folder / "folder").mkdir()
    os.mkfifo(in_folder / "pipe")
    before = os.listdir("/dev/fd")  # noqa: PTH208 - numbers
    with contextlib.nullcontext() if name == "x.toml" else pytest.raises((UsageError, OSError)):
        parsed("--config", name)
    assert os.listdir("/dev/fd") == before  # noqa: PTH208
