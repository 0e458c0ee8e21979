import dataclasses
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from owt_data import (
    PrepareOptions,
    Progress,
    inspect,
    load_tokenizer,
    prepare,
    progress_bar,
    read_manifest,
    share_bar,
    train_tokenizer,
)
from owt_data._cli import main

LONG = "w" * 5000


def test_prepare_then_verify(articles, tmp_path, capsys):
    unchanged = f"{tmp_path}/out is unchanged: it was prepared from the same source and options"
    for number in range(2):
        assert main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
        assert (unchanged in capsys.readouterr().err.splitlines()) == (number == 1)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["tokenizer"] == "bytes"
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == f"{tmp_path}/out: no difference from its manifest\n"
    with (tmp_path / "out/val.bin").open("ab") as file:
        file.write(b"xx")
    assert main(["verify", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert "val.bin: expected" in err
    assert err.endswith("/out: 1 difference\n")
    (tmp_path / "out/train.bin").unlink()
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.endswith("/out: 2 differences\n")


def test_many_sources_and_given_splits(articles, tmp_path):
    lines = articles.read_text().splitlines(keepends=True)
    for name, half in (("a", lines[:100]), ("b", lines[100:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(half))
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    for out, sources in (("one", [str(articles)]), ("two", [a, b])):
        assert main(["prepare", *sources, str(tmp_path / out), "--tokenizer", "bytes"]) == 0
    assert (tmp_path / "one/train.bin").read_bytes() == (tmp_path / "two/train.bin").read_bytes()
    assert main(["prepare", f"train={b}", f"val={a}", str(tmp_path / "given"), "--tokenizer", "bytes"]) == 0
    manifest = read_manifest(tmp_path / "given")
    assert manifest is not None
    assert manifest.files["val.bin"].num_documents == 100


def test_inspect_shows_counts_and_text(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("In the beginning. " + "word " * 1000 + "[bold]The end.")
    main(["prepare", str(tmp_path / "book.txt"), str(tmp_path / "out"), "--tokenizer", "bytes"])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--window-tokens", "20"]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: tokenizer bytes, vocabulary of 257" in shown
    assert "train: 4,530 tokens, 9,060 bytes, 1 documents" in shown
    assert "first: 'In the beginning. wo'" in shown
    assert re.search(r"middle: '[word ]{20}'", shown)
    assert "last: 'word [bold]The end.<|endoftext|>'" in shown
    assert main(["inspect", str(tmp_path / "out/val.bin"), "--tokenizer", "bytes"]) == 0
    assert "train: 453 tokens" in capsys.readouterr().out


def test_inspect_shows_the_record_of_each_split(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(prepared)
    assert manifest is not None
    assert main(["inspect", str(prepared)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"made from {prepared.parent}/articles.jsonl by owt-data {version('owt-data')}"
    for split, num_documents in (("train", 270), ("val", 30)):
        num_bytes = (prepared / f"{split}.bin").stat().st_size
        assert f"{split}: {num_bytes // 2:,} tokens, {num_bytes:,} bytes, {num_documents} documents" in lines


def test_samples_are_from_the_start_the_middle_and_the_end(tmp_path: Path) -> None:
    text = "".join(f"{number:04d}" for number in range(1, 300))
    for name in ("train.bin", "val.bin"):
        np.frombuffer(text.encode(), np.uint8).astype("<u2").tofile(tmp_path / name)
    samples = inspect(tmp_path, tokenizer="bytes", window_tokens=4).samples
    assert samples["train"] == samples["val"] == {"first": "0001", "middle": "0150", "last": "0299"}


def test_a_sample_is_never_longer_than_the_text(prepared: Path) -> None:
    found = inspect(prepared, window_tokens=1_000_000)
    assert found.manifest == read_manifest(prepared)
    for split in ("train", "val"):
        tokens = np.fromfile(prepared / f"{split}.bin", "<u2")
        assert found.num_tokens[split] == len(tokens)
        text = load_tokenizer("bytes").decode(tokens.tolist())
        assert found.samples[split] == dict.fromkeys(("first", "middle", "last"), text)


def test_inspect_shows_rows_of_text(articles, tmp_path, capsys):
    (tmp_path / "wiki.txt").write_text(f" \n = [bold] = \n{'x' * 200}\n")
    assert main(["inspect", str(tmp_path / "wiki.txt"), "--rows", "3"]) == 0
    assert capsys.readouterr().out == f"row 0: ''\nrow 1: ' = [bold] = \\n'\nrow 2: {'x' * 120 + '...'!r}\n"
    assert main(["inspect", str(articles), "--rows", "2"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    (tmp_path / "body.jsonl").write_text('{"text": "a", "body": "b"}\n')
    assert main(["inspect", str(tmp_path / "body.jsonl"), "--rows", "1", "--text-column", "body"]) == 0
    assert capsys.readouterr().out == "row 0: 'b'\n"


def test_without_a_terminal_progress_is_lines_for_the_log(articles, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.progress_bar._SECONDS_PER_LINE", 0.0)
    main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"])
    err = capsys.readouterr().err
    assert "tokenizing  " in err
    assert " MB/s" in err
    assert "assembling  100 %  300 documents" in err


def test_the_log_has_a_line_every_half_minute_with_the_speed_of_this_start(monkeypatch):
    clock = iter([0.0, 10.0, 20.0, 50.0, 70.0, 90.0])
    monkeypatch.setattr("owt_data._prepare.progress_bar.time", SimpleNamespace(monotonic=lambda: next(clock)))
    out = io.StringIO()
    with progress_bar(Console(file=out, width=120)) as report:
        for stage, fraction, num_bytes in (
            ("checking", 0.1, 500_000_000),
            ("tokenizing", 0.12, 600_000_000),
            ("tokenizing", 0.2, 1_000_000_000),
            ("tokenizing", 0.3, 1_500_000_000),
        ):
            report(Progress(stage=stage, fraction=fraction, num_documents=7_000, num_bytes=num_bytes))
        report(Progress(stage="assembling", fraction=0.5, num_documents=7_000, num_tokens=9_000))
    assert out.getvalue().splitlines() == [
        "tokenizing  20 %  7,000 documents  0 tokens  13.3 MB/s",
        "assembling  50 %  7,000 documents  9,000 tokens",
    ]


def test_on_a_terminal_progress_is_a_bar(articles, tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=120)
    with progress_bar(console) as progress:
        prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer="bytes"), progress=progress)
        progress(Progress(stage="tokenizing", fraction=None))  # of a stream of unknown length
        progress(Progress(stage="tokenizing", fraction=0.37, num_documents=5_000, num_tokens=60_000))
    assert "300 documents" in out.getvalue()
    assert re.search(r"tokenizing .* 37% 5,000 documents  60,000 tokens  0\.0 MB/s", out.getvalue())
    with share_bar(console, "verifying") as report:
        report(0.42)
    assert re.search(r"verifying .* 42%", out.getvalue())


def test_the_time_of_a_stage_begins_when_the_one_before_it_is_complete(monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr("owt_data._prepare.progress_bar.Bar", functools.partial(Bar, get_time=lambda: now[0]))
    with progress_bar(Console(file=out, force_terminal=True, color_system=None, width=120)) as progress:
        progress(Progress(stage="reading", fraction=1.0))
        for share in range(1, 5):
            now[0] += 10
            progress(Progress(stage="tokenizing", fraction=share / 10))
    assert re.search(r"40% .* 0:00:30 0:01:00", out.getvalue().rpartition("tokenizing")[2])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepare", "nowhere.txt", "out"], "error: nowhere.txt must be a file or a folder of files, got a name that"),
        (["prepare"], "error: SOURCE must be given, got nothing. Write: owt-data prepare SOURCE... OUT\n"),
        (["prepare", "only-one"], "error: OUT must be given, got nothing. Write: owt-data prepare SOURCE... OUT\n"),
        (["verify"], "error: FOLDER must be given, got nothing. Write: owt-data verify FOLDER\n"),
        (
            ["verify", "a", "b"],
            "error: arguments must be --NAME VALUE, got b without --NAME. Put quotes around a value with spaces.\n",
        ),
        ([], "error: COMMAND must be given, got nothing; there are prepare, tokenizer, verify, inspect.\n"),
        (
            ["preprae"],
            "error: no command preprae; there are prepare, tokenizer, verify, inspect; did you mean prepare?\n",
        ),
        ([LONG], "error: no command wwww"),
        ([""], "error: no command ''; there are prepare, tokenizer, verify, inspect.\n"),
        (
            ["prepare", "a", "b", "--tokeniser", "bytes"],
            "error: no option --tokeniser of prepare; did you mean --tokenizer?\n",
        ),
        (["prepare", "a", "b", f"--{LONG}"], "error: options must be those of owt-data prepare --help, got --www"),
        (
            ["prepare", "a", "b", "-x"],
            "error: options must be those of owt-data prepare --help, got -x.\n",
        ),
        (
            ["prepare", "a", "b", "--tokenizer", LONG],
            "error: The tokenizer must be bytes, gpt2, r50k_base, p50k_base,",
        ),
        (
            ["prepare", "a", "b", "--split", "star"],
            "error: --split must be auto, documents, position or start, got star. Did you mean start?\n",
        ),
        (["prepare", "a", "b", "--split-seed", "abc"], "error: --split-seed must be an integer, got abc.\n"),
        (["prepare", "a", "b", "--split-seed="], "error: --split-seed must be an integer, got ''.\n"),
        (
            ["prepare", "a", "b", "--limit-rows", "9" * 5000],
            "error: --limit-rows must be an integer or none, got 999",
        ),
        (
            ["prepare", "a", "b", "--limit_rows=1.5"],
            "error: --limit-rows must be an integer or none, got 1.5.\n",
        ),
        (
            ["prepare", "a", "b", "--val-fraction", "-x"],
            "error: --val-fraction must be a number or none, got -x.\n",
        ),
        (
            ["prepare", "a", "b", "--ray=no"],
            "error: --ray must have no value, got no. Write --on-cluster or --no-on-cluster.\n",
        ),
        (["prepare", "a", "b", "--row-end"], "error: --row-end must have a value, got none. Write --row-end VALUE"),
        (["prepare", "a", "b", "--split", "--ray"], "error: --split must have a value, got none. Write --split VALUE"),
        (["prepare", "no\udcffdir", "out"], "error: The name no\\udcffdir must be UTF-8 text, got other bytes."),
        (
            ["inspect", "no\udcffdir", "--rows", "1"],
            "error: The name no\\udcffdir must be UTF-8 text, got other bytes.",
        ),
        (["verify", ""], "error: The name must be a path or a URI, got an empty text. Name a file or a folder."),
        (["inspect", ""], "error: The name must be a path or a URI, got an empty text. Name a file or a folder."),
        (
            ["verify", "hf://a/b"],
            "error: The name must be a path, s3://bucket/... or gs://bucket/..., got hf://a/b (no object storage).",
        ),
        (
            ["verify", "s3://"],
            "error: The name must be a path, s3://bucket/... or gs://bucket/..., got s3:// without a bucket.",
        ),
        (["inspect", "gs://"], "error: The name must be a path, s3://bucket/... or gs://bucket/..., got gs:// without"),
        (["verify", LONG], "error: {}/wwww"),
        (["prepare", "builtin", LONG], "error: {}/wwww"),
        (
            ["inspect", "nowhere.bin", "--window-tokens", "0"],
            "error: window_tokens must be an integer of at least 1, got 0.",
        ),
        (
            ["inspect", "nowhere.txt", "--rows", "2"],
            "error: nowhere.txt must be a file or a folder of files, got a name",
        ),
        (
            ["inspect", "builtin", "--rows", "2", "--window-tokens", "5"],
            "error: --window-tokens must be absent with --rows, got 5. Leave it out.",
        ),
        (
            ["inspect", "builtin", "--rows", "2", "--tokenizer", "bytes"],
            "error: --tokenizer must be absent with --rows, got 'bytes'. Leave it out.",
        ),
        (
            ["inspect", "nowhere", "--text-column", "body"],
            "error: --text-column must be absent without --rows, got 'body'. Leave it out.",
        ),
        (["inspect", "builtin", "--rows", "0"], "error: rows must be an integer of at least 1, got 0."),
        (["inspect", "nowhere"], "error: {}/nowhere must be a folder of token files or a .bin file, got a name that"),
        (["verify", "nowhere"], "error: {}/nowhere must be a folder that owt-data prepared, got a name that does not"),
    ],
)
def test_errors_are_one_sentence_and_exit_2(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith(message.format(tmp_path))
    assert err.count("\n") == 1
    assert len(err) < 500
    assert list(tmp_path.iterdir()) == []


def test_options_may_stand_anywhere_and_values_may_begin_with_a_minus_sign(articles, tmp_path):
    out = tmp_path / "out"
    options = ["--split_seed=7", "--row-end=--x_y \n", "--limit-rows", "40", "--val-fraction", "none"]
    options += ["--on-cluster", "--no-on-cluster"]
    assert main(["prepare", "--tokenizer=bytes", str(articles), "--row-end", "-x", *options, str(out)]) == 0
    manifest = read_manifest(out)
    assert manifest is not None
    expected = PrepareOptions(tokenizer="bytes", split_seed=7, row_end="--x_y \n", limit_rows=40)
    assert manifest.options == expected.record()


def test_the_options_reach_the_preparation_and_the_training(tmp_path, monkeypatch):
    rows = [json.dumps({"body": f"row {number} of the text"}) for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    given = []

    def note(function):
        return lambda *names, **options: given.append(options) or function(*names, **options)

    monkeypatch.setattr("owt_data._prepare.prepare.prepare", note(prepare))
    monkeypatch.setattr("owt_data._prepare.train_tokenizer.train_tokenizer", note(train_tokenizer))
    shared = ["--text-column", "body", "--limit-rows", "50", "--num-processes", "3"]
    assert main(["tokenizer", str(tmp_path / "rows.jsonl"), str(tmp_path / "new.json"), "--vocab", "270", *shared]) == 0
    options = [*shared, "--tokenizer", str(tmp_path / "new.json"), "--split", "position", "--val-fraction", "0.2"]
    assert main(["prepare", str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), *options]) == 0
    training, preparation = ({name: value for name, value in one.items() if name != "progress"} for one in given)
    assert training == {"vocab_size": 270, "text_column": "body", "limit_rows": 50, "num_processes": 3}
    assert preparation == {"num_processes": 3, "use_ray": False}
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert sum(record.num_documents for record in manifest.files.values()) == 50 + 1  # the split cuts one
    assert (manifest.options["split"], manifest.options["val_fraction"]) == ("position", 0.2)
    assert manifest.vocab_size == 270


def test_a_library_that_does_not_load_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "owt_data._tokens.verify", None)
    assert main(["verify", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: owt-data could not load its libraries or data: ")
    assert err.count("\n") == 1


def test_a_name_with_a_line_break_stays_on_its_line(articles, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (
        ["prepare", str(articles), "o\nut", "--tokenizer", "bytes"],
        ["verify", "o\nut"],
        ["inspect", "o\nut"],
    ):
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert "o\\nut" in out + err
        assert "o\nut" not in out + err


@pytest.mark.parametrize("columns", ["0", "1", "40", "1000"])
def test_help_and_output_fit_a_terminal_of_any_width(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in (["--help"], ["prepare", "-h"], ["inspect", "a", "--help"], ["verify", "--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: owt-data")
        assert max(map(len, out.splitlines())) <= min(max(20, int(columns) or 80), 100)
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_help_shows_each_option_with_its_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    main(["prepare", "--help"])
    out = capsys.readouterr().out
    for field in dataclasses.fields(PrepareOptions):
        assert f"  --{field.name.replace('_', '-')} " in out
    assert "  --split auto|documents|position|start\n" in out
    assert "Seed of the random choice of documents. (default: 2357)" in out
    assert "  --on-cluster, --ray, --no-on-cluster\n" in out
    assert "  SOURCE\n      builtin, a .txt, " in out
    assert "  owt-data prepare train=a.parquet val=b.parquet data/ab\n" in out


def test_the_help_lists_the_commands_and_each_command_has_its_own(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    main(["--help"])
    overview = capsys.readouterr().out
    names_of = {"prepare": "SOURCE... OUT", "tokenizer": "SOURCE... OUT", "verify": "FOLDER", "inspect": "NAME"}
    for command, names in names_of.items():
        assert f"\n  {command:11}" in overview
        main([command, "-h"])
        page = capsys.readouterr().out
        assert page.startswith(f"usage: owt-data {command} {names}")
        assert ("\noptions\n" in page) == ("[OPTIONS]" in page) == (command != "verify")
        assert f"\n  owt-data {command} " in page
        assert page.count("\n  owt-data ") >= 2 + 1  # two examples and `owt-data --help`


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"owt-data {version('owt-data')}\n"


def test_help_imports_neither_datasets_nor_ray():
    code = (
        "import sys\nfrom owt_data._cli import main\n"
        "main(['prepare', '--help'])\n"
        "sys.exit(bool({'datasets', 'ray', 'jax', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_a_relative_cache_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert main(["--help"]) == 0
    assert "XDG_CACHE_HOME" not in os.environ  # datasets reads it


@pytest.mark.parametrize("module", ["rich.console", "owt_data._errors"])
def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback(module, tmp_path):
    """The process reports each import on standard error. The signal comes when it has imported the module.

    On a busy machine the imports may have ended when the signal comes. The command then says that it is interrupted.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "owt_data", "inspect", "nowhere"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # The tests themselves may be a background job, which ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == module:
            os.kill(process.pid, signal.SIGINT)
            break
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert out == ""
    assert {line for line in err.splitlines() if not line.startswith("import time:")} <= {"interrupted"}


def test_names_and_texts_are_shown_as_they_are(tmp_path, monkeypatch, capsys):
    """`:heart:` is the name of an emoji."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("I :heart: this. " * 400)
    assert main(["prepare", "book.txt", ":heart:", "--tokenizer", "bytes", "--num-processes", "1"]) == 0
    assert ":heart:/train.bin" in capsys.readouterr().err
    assert main(["inspect", ":heart:"]) == 0
    assert "I :heart: this." in capsys.readouterr().out
    assert main(["verify", "x:heart:y"]) == 2
    assert "x:heart:y" in capsys.readouterr().err


def test_a_limit_of_memory_that_is_too_small_is_rejected():
    command = f"ulimit -v 300000; {sys.executable} -m owt_data inspect nowhere"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(
        "error: a process must be allowed to map at least 4 GiB of memory, got 292 MiB. Raise"
    )
