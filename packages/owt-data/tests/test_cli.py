import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from owt_data import PrepareOptions, Progress, prepare, progress_bar, read_manifest
from owt_data._cli import main


def test_prepare_then_verify(articles, tmp_path, capsys):
    assert main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert json.loads((tmp_path / "out/manifest.json").read_text())["tokenizer"] == "bytes"
    assert main(["verify", str(tmp_path / "out")]) == 0
    with (tmp_path / "out/val.bin").open("ab") as file:
        file.write(b"xx")
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert "val.bin: expected" in capsys.readouterr().err


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


def test_inspect_shows_rows_of_text(articles, tmp_path, capsys):
    (tmp_path / "wiki.txt").write_text(f" \n = [bold] = \n{'x' * 200}\n")
    assert main(["inspect", str(tmp_path / "wiki.txt"), "--rows", "3"]) == 0
    assert capsys.readouterr().out == f"row 0: ''\nrow 1: ' = [bold] = \\n'\nrow 2: {'x' * 120 + '...'!r}\n"
    assert main(["inspect", str(articles), "--rows", "2"]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_without_a_terminal_progress_is_lines_for_the_log(articles, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("owt_data._prepare.progress_bar._SECONDS_PER_LINE", 0.0)
    main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"])
    err = capsys.readouterr().err
    assert "tokenizing  " in err
    assert " MB/s" in err
    assert "assembling  100 %  300 documents" in err


def test_on_a_terminal_progress_is_a_bar(articles, tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with progress_bar(console) as progress:
        prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer="bytes"), progress=progress)
        progress(Progress(stage="tokenizing", fraction=None))  # of a stream of unknown length
    assert "300 documents" in out.getvalue()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepare", "nowhere.txt", "out"], "error: nowhere.txt must be a file or a folder of files, got a name that"),
        (["prepare", "only-one"], "error: The names must be sources and a folder, got only-one. Name"),
        (
            ["inspect", "nowhere.bin", "--window-tokens", "0"],
            "error: window_tokens must be an integer of at least 1, got 0. ",
        ),
        (
            ["inspect", "nowhere.txt", "--rows", "2"],
            "error: nowhere.txt must be a file or a folder of files, got a name",
        ),
        (["inspect", "builtin", "--rows", "0"], "error: rows must be an integer of at least 1, got 0. "),
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
    assert list(tmp_path.iterdir()) == []


def test_unknown_options_exit_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["prepare", "a", "b", "--tokeniser", "bytes"])
    assert exit_.value.code == 2
    assert "--tokeniser" in capsys.readouterr().err


def test_help_imports_neither_datasets_nor_ray():
    code = (
        "import sys\nfrom owt_data._cli import main\n"
        "try: main(['prepare', '--help'])\n"
        "except SystemExit: sys.exit(bool({'datasets', 'ray', 'jax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
