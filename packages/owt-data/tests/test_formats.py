"""Files of other versions, of huge or nested values, and pipes in their places."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from owt_data import DataError, PrepareOptions, open_tokens, prepare, prepare_in_background
from owt_data._cli import main
from owt_data._tokens.plan import read_plan

BYTES = ("--tokenizer", "bytes", "--num-processes", "1")
START = PrepareOptions(tokenizer="bytes", split="start")


@pytest.fixture
def interrupted(corpus, tmp_path) -> Path:
    """The working folder of a preparation that was interrupted."""
    with prepare_in_background(str(corpus), tmp_path / "out", START, num_processes=1):
        pass
    return tmp_path / ".out.partial"


def change(path, **fields):
    """Change fields of the JSON object in the first line of a file."""
    first, *rest = path.read_text().splitlines(keepends=True) if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text(json.dumps({**json.loads(first), **fields}) + "\n" + "".join(rest))


def both_versions(path, found):
    return (
        f"{path} must have format {2 if path.name == 'plan.json' else 1}, which owt-data {version('owt-data')} reads, "
        f"got {found}, written by version 99.0 of owt-data. Use that version, or delete {path.parent} and prepare the "
        "text"
    )


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"format": 3}, "format 3"),
        ({"format": 0}, "format 0"),
        ({"format": "x" * 5000}, f"format '{'x' * 39}...{'x' * 39}'"),
        ({"new": 1}, "the unknown field new"),
        ({"options": {**START.record(), "new": 1}}, "the unknown field options.new"),
    ],
)
def test_a_manifest_of_another_version_is_rejected_with_both_versions(fields, found, prepared):
    change(prepared / "manifest.json", version="99.0", **fields)
    with pytest.raises(DataError) as caught:
        open_tokens(str(prepared), tokenizer="bytes")
    assert str(caught.value).startswith(both_versions(prepared / "manifest.json", found))


@pytest.mark.parametrize("name", ["plan.json", "parts-all/parts.jsonl"])
@pytest.mark.parametrize(("fields", "found"), [({"format": 9}, "format 9"), ({"new": 1}, "the unknown field new")])
def test_a_preparation_of_another_version_is_rejected_with_both_versions(name, fields, found, interrupted, corpus):
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*.bin")}
    change(interrupted / name, version="99.0", **fields)
    with pytest.raises(DataError) as caught:
        prepare(str(corpus), interrupted.with_name("out"), START)
    assert str(caught.value).startswith(both_versions(interrupted / name, found))
    assert before == {path: path.stat().st_mtime_ns for path in interrupted.rglob("*.bin")}


def test_a_plan_of_a_version_without_files_of_tokenizers_is_read(interrupted):
    before, path = read_plan(interrupted), interrupted / "plan.json"
    plan = json.loads(path.read_text())
    assert plan.pop("tokenizer") is None
    path.write_text(json.dumps(plan))
    assert read_plan(interrupted) == before is not None


def test_an_unknown_field_of_a_finished_shard_is_rejected(interrupted, corpus):
    journal = interrupted / "parts-all/parts.jsonl"
    header, first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text(header + json.dumps({**json.loads(first), "new": 1}) + "\n" + "".join(rest))
    with pytest.raises(DataError, match=r"parts\.jsonl must have format 1, .*, got the unknown field new, written by"):
        prepare(str(corpus), interrupted.with_name("out"), START)


@pytest.mark.parametrize("name", ["plan.json", "parts-all/parts.jsonl", "parts-all/000000.bin"])
def test_a_pipe_in_the_working_folder_does_not_block(name, interrupted, corpus, capsys):
    path = interrupted / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    arguments = ["prepare", str(corpus), str(interrupted.with_name("out")), *BYTES, "--split", "start"]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert str(path) in err


@pytest.mark.parametrize("name", ["plan.json", "parts-all/parts.jsonl"])
def test_a_huge_file_in_the_working_folder_is_not_read_whole(name, interrupted, corpus):
    expected = prepare(str(corpus), interrupted.with_name("expected"), START, num_processes=1)
    os.truncate(interrupted / name, 1 << 42)
    assert prepare(str(corpus), interrupted.with_name("out"), START, num_processes=1) == expected


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_huge_manifest_is_rejected_without_reading_it_whole(command, prepared, capsys):
    os.truncate(prepared / "manifest.json", 1 << 42)
    assert main([command, str(prepared)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {prepared}/manifest.json must be a manifest of owt-data, got another or a damaged")
    assert "it has more than 268435456 bytes. Restore it" in err


@pytest.mark.parametrize("value", ["x" * 5000, "a\nb\r\nc", "\x1b[31m" + "y" * 5000, "1" * 400])
@pytest.mark.parametrize(
    "arguments",
    [
        ("prepare", "{}", "out"),
        ("prepare", "book.txt", "{}/out"),
        ("prepare", "train={}", "val=book.txt", "out"),
        ("prepare", "train={}", "out"),
        ("prepare", "book.txt", "out", "--text-column", "{}", "--num-processes", "0"),
        ("prepare", "rows.jsonl", "out", "--text-column", "{}"),
        ("verify", "{}"),
        ("inspect", "{}"),
        ("inspect", "{}.bin"),
        ("inspect", "s3://[{}/x.bin"),
        ("inspect", "rows.jsonl", "--rows", "2", "--text-column", "{}"),
    ],
)
def test_errors_are_short_and_on_one_line(arguments, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "book.txt").write_text("A text. " * 100)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 9)
    code = main([argument.replace("{}", value) for argument in arguments])
    err = capsys.readouterr().err
    if "{}/out" in arguments and code == 0:  # a folder may have a name of two lines
        return
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 1500
    assert err.removesuffix("\n").isprintable()


def test_a_deleted_working_folder_is_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for arguments in (("prepare", "a.txt", "out", *BYTES), ("verify", "out"), ("inspect", "out")):
        assert main(list(arguments)) == 2
        assert capsys.readouterr().err == (
            "error: The working folder has been deleted. Change to another folder, such as `cd ~`.\n"
        )
