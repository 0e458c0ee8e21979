"""Command lines: the values of options, and one sentence with a suggestion for each wrong name or value."""

import dataclasses
import subprocess
import sys

import pytest

from pretrain import PretrainConfig, main
from pretrain._cli import parse_command
from pretrain._command_line.command_classes import (
    COMMANDS,
    FREQUENT,
    BlameCommand,
    CompareCommand,
    DataCommand,
    DiffCommand,
    DoctorCommand,
    EvalCommand,
    ExportCommand,
    ReplayCommand,
    ReportCommand,
    RunsCommand,
    SampleCommand,
    VerifyCommand,
    WatchCommand,
)
from pretrain._command_line.option_table import options_of
from pretrain._errors import UsageError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sample run", SampleCommand(run="run")),
        ("sample run --top-k none --top_p=0.5", SampleCommand(run="run", top_k=None, top_p=0.5)),
        ("sample --temperature 1e-1 run", SampleCommand(run="run", temperature=0.1)),
        ("sample run --seed -1 --prompt=--x", SampleCommand(run="run", seed=-1, prompt="--x")),
        ("sample run --temperature -1e-3 --prompt -x", SampleCommand(run="run", temperature=-0.001, prompt="-x")),
        ("sample run --seed 1 --seed 2", SampleCommand(run="run", seed=2)),
        ("eval run --data train=a,val=b", EvalCommand(run="run", data="train=a,val=b")),
        (
            "eval gpt2 --tasks hellaswag:5,piqa own --limit 9 --json",
            EvalCommand(run="gpt2", tasks=("hellaswag:5,piqa", "own"), limit=9, json=True),
        ),
        ("export run out", ExportCommand(run="run", out="out")),
        (
            "export run@best out --weights last --dtype bfloat16 --push-to someone/run",
            ExportCommand(run="run@best", out="out", weights="last", dtype="bfloat16", push_to="someone/run"),
        ),
        ("report a b --out x.html", ReportCommand(runs=("a", "b"), out="x.html")),
        ("report --out x.html a", ReportCommand(runs=("a",), out="x.html")),
        ("report a --out x.html b", ReportCommand(runs=("a", "b"), out="x.html")),
        ("data first --step 12", DataCommand(run="first", step=12)),
        ("data first --find -x --json", DataCommand(run="first", find="-x", json=True)),
        ("data first --document 7 --full", DataCommand(run="first", document=7, full=True)),
        ("blame first --spike", BlameCommand(run="first", spike=True)),
        ("blame first --step 3 --without d17 w3", BlameCommand(run="first", step=3, without=("d17", "w3"))),
        ("diff a b", DiffCommand(a="a", b="b")),
        ("diff a@5 b@5 --elements --json", DiffCommand(a="a@5", b="b@5", elements=True, json=True)),
        ("replay a --from 5 --to 9", ReplayCommand(run="a", from_step=5, to_step=9)),
        ("replay a --step 5 --hardware cpu:2", ReplayCommand(run="a", step=5, hardware="cpu:2")),
        ("verify", VerifyCommand()),
        ("verify --kills 8 --hardware cpu:4 --seed 1", VerifyCommand(kills=8, hardware="cpu:4", seed=1)),
        ("verify --data book.txt --keep out", VerifyCommand(data="book.txt", keep="out")),
        ("compare a b --at 50", CompareCommand(runs=("a", "b"), at=50)),
        ("compare a b --against c d --json", CompareCommand(runs=("a", "b"), against=("c", "d"), json=True)),
        ("runs", RunsCommand(storage_path="runs")),
        ("runs s3://bucket/runs", RunsCommand(storage_path="s3://bucket/runs")),
        ("watch run", WatchCommand(run="run")),
        ("doctor", DoctorCommand()),
        (
            "doctor --hardware gpu:8 --data a --tokenizer gpt2 --storage-path s3://b --json",
            DoctorCommand(hardware="gpu:8", data="a", tokenizer="gpt2", storage_path="s3://b", json=True),
        ),
    ],
)
def test_a_command_has_the_values_of_its_line(line, expected):
    assert parse_command(line.split()) == expected


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        (["--dashboard"], "dashboard", True),
        (["--dashboard", "--no-dashboard"], "dashboard", False),
        (["--prepare.on-cluster", "--prepare.no-on-cluster"], "prepare.on_cluster", False),
        (["train", "--prompts", "a b", "c"], "prompts", ("a b", "c")),
        (["--prompts=a b", "--seed", "3"], "prompts", ("a b",)),
        (["--prompts", "a", "-b", "--seed", "3"], "prompts", ("a", "-b")),
        (["--prompts", "a", "--seed", "3"], "seed", 3),
        (["--trackers"], "trackers", ()),
        (["--train.eval-tasks", "piqa", "--train.eval-tasks=", "--seed", "3"], "train.eval_tasks", ()),
        (["--train.eval_tokens", "None"], "train.eval_tokens", None),
        (["--optimizer.learning-rate", "1"], "optimizer.learning_rate", 1.0),
        (["--text-column", "body"], "prepare.text_column", "body"),
        (["--tokenizer", "gpt2"], "prepare.tokenizer", "gpt2"),
        (["--split", "position"], "prepare.split", "position"),
        (["--val-fraction", "0.3"], "prepare.val_fraction", 0.3),
        (["--split-seed", "7"], "prepare.split_seed", 7),
    ],
)
def test_an_option_of_train_has_its_value(line, name, expected):
    value = parse_command(line)
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("line", "flag", "known"),
    [
        # Each section.
        ("--train.learning-rate 1", "--train.learning-rate", "--optimizer.learning-rate"),
        ("--optimizer.learn-rate 1", "--optimizer.learn-rate", "--optimizer.learning-rate"),
        ("--optimizer.weight_decy=1", "--optimizer.weight-decy", "--optimizer.weight-decay"),
        ("--model.num-layer 1", "--model.num-layer", "--model.num-layers"),
        ("--model.n-heads 1", "--model.n-heads", "--model.num-heads"),
        ("--train.max-step 1", "--train.max-step", "--train.max-steps"),
        ("--train.batch-size 1", "--train.batch-size", "--train.global-batch-size"),
        ("--prepare.val-frac 1", "--prepare.val-frac", "--prepare.val-fraction"),
        ("--prepare.text-col 1", "--prepare.text-col", "--prepare.text-column"),
        ("--mesh.fdsp 1", "--mesh.fdsp", "--mesh.fsdp"),
        ("--mesh.tensors 1", "--mesh.tensors", "--mesh.tensor"),
        ("--model.tensor 1", "--model.tensor", "--mesh.tensor"),
        ("--storage 1", "--storage", "--storage-path"),
        ("--present baby", "--present", "--preset"),
        ("--datas book.txt", "--datas", "--data"),
        # Without a section.
        ("--learning-rate 1", "--learning-rate", "--optimizer.learning-rate"),
        ("--learning_rate=1", "--learning-rate", "--optimizer.learning-rate"),
        ("--lr 1", "--lr", "--optimizer.learning-rate"),
        ("--max-steps 1", "--max-steps", "--train.max-steps"),
        ("--batch-size 1", "--batch-size", "--train.global-batch-size"),
        ("--num-layers 1", "--num-layers", "--model.num-layers"),
        ("--dropout 1", "--dropout", "--model.dropout-rate"),
        ("--fsdp 1", "--fsdp", "--mesh.fsdp"),
        ("--prompt x", "--prompt", "--prompts"),
    ],
)
def test_a_wrong_name_gets_the_right_suggestion(line, flag, known):
    with pytest.raises(UsageError) as caught:
        parse_command(line.split())
    assert str(caught.value) == f"no option {flag}; did you mean {known}?"


@pytest.mark.parametrize(
    ("line", "flag", "known"),
    [
        ("sample run --max-tokens 3", "--max-tokens", "--max-new-tokens"),
        ("sample run --topk 3", "--topk", "--top-k"),
        ("eval run --batch 3", "--batch", "--batch-size"),
        ("report run --output 3", "--output", "--out"),
    ],
)
def test_a_wrong_name_of_a_command_gets_an_option_of_this_command(line, flag, known):
    with pytest.raises(UsageError) as caught:
        parse_command(line.split())
    assert str(caught.value) == f"no option {flag} of {line.split()[0]}; did you mean {known}?"


@pytest.mark.parametrize("option", options_of(PretrainConfig), ids=lambda option: option.name)
def test_a_misspelled_option_gets_itself_as_the_suggestion(option):
    flag = option.flags[-1]
    with pytest.raises(UsageError) as caught:
        parse_command([flag + flag[-1], "1"])
    assert str(caught.value).endswith(f"; did you mean {flag}?")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--xyzzyq 3", "options must be those of pretrain train --help-all, got --xyzzyq."),
        ("-x", "options must be those of pretrain train --help-all, got -x."),
        *(
            (
                f"{line} {flag}{value}",
                f"no option {flag}. The same command continues its run from the newest checkpoint; another --name "
                "starts a new run.",
            )
            for line, flag, value in (
                ("train", "--resume", ""),
                ("--seed 3", "--resume", "=runs/first"),
                ("", "--continue", ""),
                ("--name first", "--restart", " yes"),
            )
        ),
        ("eval run --step 5", "no option --step of eval. Name a checkpoint RUN@STEP, with a number, or RUN@best."),
        ("sample run --resume", "options must be those of pretrain sample --help, got --resume."),
        (
            "help trains",
            f"no command trains; there are {', '.join(COMMANDS)}; did you mean train?",
        ),
        ("sample run --xyzzyq 3", "options must be those of pretrain sample --help, got --xyzzyq."),
        ("--train.max-steps abc", "--train.max-steps must be an integer, got abc."),
        ("--train.max-epochs abc", "--train.max-epochs must be a number or none, got abc."),
        (
            "--preset gpt2-midium",
            "--preset must be quickstart, baby, tutorial, wikitext, finetune, fineweb, speedrun, gpt2, gpt2-medium, "
            "gpt2-large or gpt2-xl, got gpt2-midium. Did you mean gpt2-medium?",
        ),
        ("--data-mode streams", "--data-mode must be prepared or stream, got streams. Did you mean stream?"),
        (
            "--trackers tensorboard wandbs",
            "--trackers must be any of tensorboard, wandb or trackio, or no value, got wandbs. Did you mean wandb?",
        ),
        ("--trackers none", "--trackers must be any of tensorboard, wandb or trackio, or no value, got none."),
        ("--name a@b", "name must have no @, got a@b. RUN@STEP names a checkpoint of a run."),
        ("--dashboard=1", "--dashboard must have no value, got 1. Write --dashboard or --no-dashboard."),
        ("--no-dashboard=1", "--no-dashboard must have no value, got 1. Write --dashboard or --no-dashboard."),
        (
            "--train.max-steps --seed 3",
            "--train.max-steps must have a value, got none. Write --train.max-steps VALUE, or --train.max-steps=VALUE.",
        ),
        *(
            (f"{line} {flag}", f"{flag} must have a value, got none. Write {flag} VALUE, or {flag}=VALUE.")
            for line, flag in (
                ("", "--seed"),
                ("", "--prompts"),
                ("", "--train.eval-tasks"),
                ("eval run", "--tasks"),
                ("sweep", "--grid"),
                ("compare a b", "--against"),
                ("blame run --step 1", "--without"),
            )
        ),
        (
            "--name a b",
            "arguments must be --NAME VALUE, got b without --NAME. Put quotes around a value with spaces.",
        ),
        (
            "sample run other",
            "arguments must be --NAME VALUE, got other without --NAME. Put quotes around a value with spaces.",
        ),
        ("sample", "RUN must be given, got nothing. Write: pretrain sample RUN"),
        ("export run", "OUT must be given, got nothing. Write: pretrain export RUN OUT"),
        ("report", "RUN must be given, got nothing. Write: pretrain report RUN..."),
        ("--train.log-every 0", "train.log_every must be at least 1, got 0."),
        (
            f"--train.max-steps {2**31}",
            f"train.max_steps must be at least 1 and at most {2**31 - 1}, got {2**31}.",
        ),
        (
            "--model.num-heads 5",
            "model.embed_dim must be a multiple of num_heads, got 128 and 5. Choose 125 or 130, or "
            "another number of heads.",
        ),
        ("--train.max-epochs 0", "train.max_epochs must be above 0 and at most 1e+39, got 0.0."),
        ("--train.max-tokens 0", "train.max_tokens must be at least 1, got 0."),
        ("--mesh.fsdp 0", "mesh.fsdp must be at least 1, got 0."),
        (
            "--from run@9 --anneal 5 --train.max-steps 20",
            "--train.max-steps cannot be given with --anneal, which is the number of steps. Leave one of them out.",
        ),
        ("--prepare.val-fraction 2", "prepare.val_fraction must be between 0 and 1, got 2.0."),
        (
            "report2",
            f"no command report2; there are {', '.join(COMMANDS)}; did you mean report?",
        ),
    ],
)
def test_an_error_is_one_sentence_on_standard_error(line, sentence, capsys):
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {sentence}\n")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A working folder with two runs, which have no checkpoint."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart-builtin", "wiki"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("name", "known"), [("quickstart", "quickstart-builtin"), ("runs/wikki", "wiki"), ("xyz", None)]
)
@pytest.mark.parametrize("command", ["sample", "eval"])
def test_a_wrong_run_names_the_runs_that_exist(command, name, known, runs, capsys):
    assert main([command, name]) == 2
    question = f"Did you mean {known}? " if known else ""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: run must be the folder or URI of a run, its name in runs, a folder of `export`, or published weights "
        f"such as gpt2, got {name}. {question}"
    )
    assert set(line.rpartition("runs has ")[2].rstrip(".").split(", ")) == {"quickstart-builtin", "wiki"}


def test_a_wrong_run_in_another_folder_names_the_runs_of_that_folder(runs, tmp_path, capsys):
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert main(["eval", str(tmp_path / "elsewhere" / "wikki")]) == 2
    assert f"Did you mean {tmp_path}/elsewhere/wiki? {tmp_path}/elsewhere has " in capsys.readouterr().err


def test_without_runs_the_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "quickstart"]) == 2
    assert f"There are no runs in {tmp_path}/runs: train one, or give a folder." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("shakespear", "shakespeare.txt"),
        ("shakespear.txt", "shakespeare.txt"),
        ("txts/books.jsonl", "texts/books.jsonl"),
        ("texts/bokks.jsonl", "texts/books.jsonl"),
        ("tokens.bn", "tokens.bin"),
    ],
)
def test_a_wrong_file_gets_a_similar_one_before_anything_is_announced(name, known, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing listens there
    (tmp_path / "texts").mkdir()
    for file in ("shakespeare.txt", "tokens.bin", "texts/books.jsonl"):
        (tmp_path / file).write_text("a text")
    assert main(["--data", name]) == 2
    captured = capsys.readouterr()
    assert captured.err.rstrip().endswith(f"Did you mean {known}?")
    assert "preparing" not in captured.out


def test_the_frequent_options_exist_and_are_about_a_dozen():
    names = {option.name for option in options_of(PretrainConfig)} | {"config", "print_config", "quiet", "verbose"}
    assert set(FREQUENT) <= names
    assert 12 <= len(FREQUENT) <= 18


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_description(command):
    fields = {field.name for field in dataclasses.fields(COMMANDS[command])}
    options = options_of(COMMANDS[command])
    assert {option.name.partition(".")[0] for option in options} == fields
    assert [option.name for option in options if not option.doc.endswith((".", ".)"))] == []


def test_versions_are_printed(capsys):
    assert main(["--version"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "ray"]
    assert all(number[0].isdigit() for number in lines.values())


def test_the_imports_of_a_command_are_seldom_searched_for_garbage():
    count = "print(sum(of_generation['collections'] for of_generation in gc.get_stats()))"
    start = "from pretrain.__main__ import main; sys.argv = ['pretrain', '--help']; main()"
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        for code in (f"import gc, jax, rich, sys; {count}", f"import gc, sys; {start}; import jax; {count}")
    ]
    assert int(found[1]) < int(found[0]) / 4
