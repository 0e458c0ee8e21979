"""Bad input through the command line: exit code 2, one sentence that names the culprit, and nothing left behind."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import PrepareOptions, is_prepared, open_tokens, prepare
from owt_data._cli import main

OPTIONS = PrepareOptions(tokenizer="bytes")
LONG = "x" * 300
BYTES = ("--tokenizer", "bytes", "--num-processes", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder of a command, with sources of many kinds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 20)
    (tmp_path / "two-bytes.txt").write_text("ab")
    (tmp_path / "latin.txt").write_bytes("ab é".encode("latin-1"))
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.bin")
    for name in ("with-link", "with-folder", "with-pipe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("a text")
    (tmp_path / "with-link/b.txt").symlink_to("nowhere")
    (tmp_path / "with-folder/b.txt").mkdir()
    os.mkfifo(tmp_path / "with-pipe/b.txt")
    (tmp_path / "blank.jsonl").write_text('\n{"text": "a"}\n\n\n{"text": 5}\n')
    twice = pa.Table.from_arrays([pa.array(["a"] * 9)] * 2, names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.full(2000, 300, "<u2").tofile(tmp_path / "ids.bin")
    return tmp_path


def contents(folder):
    """All names below a folder, and what the files hold."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def rejected(capsys, folder, *arguments):
    """Run a command that must reject its input and change no file; return its sentence."""
    before = contents(folder)
    assert main(list(arguments)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert contents(folder) == before
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Outputs.
        (
            ("prepare", "book.txt", "s3://bucket/x"),
            "must be a local or mounted folder, got 's3://bucket/x'. Prepare into",
        ),
        (
            ("prepare", "book.txt", "gs://bucket/x"),
            "must be a local or mounted folder, got 'gs://bucket/x'. Prepare into",
        ),
        (
            ("prepare", "book.txt", "file://host/x"),
            "The URI of a file must be file:///PATH, got file://host/x. Write this, or the path alone.",
        ),
        (("prepare", "book.txt", LONG), f"{LONG[:100]}/manifest.json must be readable, got "),
        (("prepare", "book.txt", LONG[:250]), "x.partial must be readable and writable, got File name too long. Cor"),
        (("prepare", "book.txt", "book.txt/out"), "book.txt/.out.partial must be readable and writable, got Not a dir"),
        (
            ("prepare", "book.txt", "pipe.bin"),
            "The output must be a folder, got 'pipe.bin', which is something else.",
        ),
        (
            ("prepare", "book.txt", "loop.txt"),
            "The output must be a folder, got 'loop.txt', which is something else.",
        ),
        (("prepare", "book.txt", "~no-such-user/x"), "~no-such-user/x must begin with ~ or the ~name of a user, got"),
        (
            ("prepare", "book.txt", "."),
            "holds files that prepare has not written. Choose another folder.",
        ),
        (("prepare", "book.txt", "out\udce9"), "out\\udce9/manifest.json must be UTF-8 text, got other bytes."),
        # Sources.
        (("prepare", f"{LONG}.txt", "out"), f"{LONG[:100]}.txt must be readable, got File name too long. Correct that"),
        (("prepare", LONG, "out"), f"{LONG[:100]} must be readable, got File name too long. Correct that"),
        (("prepare", "pipe.txt", "out"), "pipe.txt must be a file or a folder of files, got a pipe, a device"),
        (("prepare", "/dev/zero", "out"), "/dev/zero must be a file or a folder of files, got a pipe, a device"),
        (("prepare", "loop.txt", "out"), "loop.txt must be a file or a folder of files, got a link to a missing file"),
        (
            ("prepare", "x*.txt", "out"),
            "x*.txt must name .txt, .jsonl or .parquet files, got no file.",
        ),
        (("prepare", "with-link", "out"), "with-link/b.txt must be a file or a folder of files, got a link to a miss"),
        (("prepare", "with-folder", "out"), "with-folder/b.txt must be a file or a folder of files, got a folder."),
        (("prepare", "with-folder/*", "out"), "with-folder/b.txt must be a file or a folder of files, got a folder."),
        (("prepare", "with-pipe", "out"), "with-pipe/b.txt must be a file or a folder of files, got a pipe, a device"),
        (("prepare", "~no-such-user/x.txt", "out"), "must begin with ~ or the ~name of a user, got no such user."),
        (("prepare", "\udce9", "out"), "\\udce9 must be UTF-8 text, got other bytes."),
        (("prepare", "latin.txt", "out"), "latin.txt must hold UTF-8 text, got other bytes at byte 3. Convert it"),
        (
            ("prepare", "two-bytes.txt", "out"),
            "two-bytes.txt must hold text for both splits, got 3 tokens in 1 documents. Give",
        ),
        (
            ("prepare", "two-bytes.txt", "out", "--split", "start"),
            "more text than validation takes, its first 262144 bytes up to the end of a row or a word, got 2 bytes.",
        ),
        (("prepare", "twice.parquet", "new/deep/out"), "must be exactly one of the columns ['text', 'text'] of twice"),
        (("prepare", "blank.jsonl", "new/deep/out"), "must hold text in every row, got a number in line 5. Name"),
        (("prepare", "blank.jsonl", "out"), "must hold text in every row, got a number in line 5. Name another column"),
        (("prepare", "twice.parquet", "out"), "must be exactly one of the columns ['text', 'text'] of twice.parquet"),
        (("prepare", "book.txt", "out", "--split-seed", "-1"), "split_seed must be an integer of at least 0, got -1."),
        (("prepare", "book.txt", "out", "--val-fraction", "nan"), "val_fraction must be between 0 and 1, got nan."),
        (("prepare", "", "out"), "The source must have a name, got an empty text."),
        # Token files.
        (("verify", LONG), f"{LONG[:100]} must be readable, got "),
        (("verify", "pipe.bin"), "pipe.bin must be a folder that owt-data prepared, got a pipe, a device"),
        (("verify", "~no-such-user/x"), "must begin with ~ or the ~name of a user, got no such user. Write ./~"),
        (("verify", "\udce9"), "\\udce9 must be UTF-8 text, got other bytes."),
        (("verify", "s3://"), "The name must be a path, s3://bucket/... or gs://bucket/..., got s3:"),
        (("verify", "file://host/x"), "The URI of a file must be file:///PATH, got file://host/x. Write this, or"),
        (("verify", "hdfs://host/x"), "The name must be a path, s3://bucket/... or gs://bucket/..., got hdfs://host/x"),
        (("inspect", LONG), f"{LONG[:100]} must be readable, got "),
        (("inspect", f"{LONG}*.bin"), "must be readable, got File name too long. Correct that"),
        (("inspect", "pipe.bin"), "pipe.bin must be a token file, got a pipe, a device or a socket."),
        (
            ("inspect", "book.txt"),
            "book.txt must be a folder of token files or a .bin file, got a file. Prepare text with owt-data prepare",
        ),
        (("inspect", "odd.bin"), "odd.bin must have an even number of bytes, two per token, got 3."),
        (
            ("inspect", "ids.bin"),
            "ids.bin must be below 257, the vocabulary of the tokenizer, got 300 at token 0. Name",
        ),
        (
            ("inspect", "s3://[x/y.bin"),
            "The name must be a path, s3://bucket/... or gs://bucket/..., got s3://[x/y.bin",
        ),
    ],
)
def test_names_and_sources_that_cannot_be_used(arguments, message, folder, capsys):
    options = {"prepare": BYTES, "inspect": BYTES[:2], "verify": ()}[arguments[0]]
    assert message in rejected(capsys, folder, *arguments, *options)


@pytest.mark.parametrize("seed", [2**31, 2**62 - 1])
def test_a_large_split_seed_splits(seed, articles, tmp_path):
    assert main(["prepare", str(articles), str(tmp_path / "out"), *BYTES, "--split-seed", str(seed)]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_file_uri_is_the_path(folder, capsys):
    uri = f"file://{folder}"
    assert main(["prepare", f"{uri}/book.txt", f"{uri}/out%20one", *BYTES]) == 0
    assert main(["prepare", "book.txt", f"file://localhost{folder}/out%20one", *BYTES]) == 0
    assert main(["verify", f"{uri}/out%20one"]) == 0
    assert main(["inspect", f"{uri}/out%20one/val.bin", *BYTES[:2]]) == 0
    assert capsys.readouterr().err.count("Traceback") == 0
    assert is_prepared(f"{uri}/out%20one")
    opened = open_tokens(f"{uri}/out%20one", tokenizer="bytes")
    assert opened == open_tokens(str(folder / "out one"), tokenizer="bytes")
    assert not (folder / "file:").exists()


def test_a_link_to_an_empty_folder_is_written_through(folder):
    (folder / "elsewhere/disk").mkdir(parents=True)
    (folder / "link").symlink_to("elsewhere/disk")
    assert main(["prepare", "book.txt", "link", *BYTES]) == 0
    assert sorted(path.name for path in (folder / "elsewhere").rglob("*")) == [
        "disk", "manifest.json", "train.bin", "train.docs", "val.bin", "val.docs",
    ]  # fmt: skip
    assert (folder / "link").is_symlink()


# Every field of a manifest, as another type.
FIELDS = {
    **dict.fromkeys(("tokenizer", "tokenizer_sha256", "dtype", "files", "source", "source_sha256", "version"), 5),
    "vocab_size": "257",
    "options": [],
    "format": "1",
    "split": "half",
    "revisions": {"all": 1},
}
RECORD = {"num_tokens": 1.5, "num_documents": True, "sha256": None}


def with_field(manifest, name, value):
    return json.dumps({**manifest, name: value})


def with_record(manifest, name, value):
    files = manifest["files"]
    return with_field(manifest, "files", {**files, "val.bin": {**files["val.bin"], name: value}})


MANIFESTS = {
    "empty": lambda m: "",
    "cut": lambda m: json.dumps(m)[:100],
    "null": lambda m: "null",
    "a list": lambda m: "[]",
    "not UTF-8": lambda m: b'{"tokenizer": "\xe9"}',
    "infinite": lambda m: with_field(m, "vocab_size", float("inf")),
    "a huge number": lambda m: with_record(m, "num_tokens", 10**400),
    "a huge float": lambda m: json.dumps(m).replace("null", "1e300"),
    "another tokenizer": lambda m: with_field(m, "tokenizer", "bites"),
    "no ids": lambda m: with_field(m, "vocab_size", 0),
    "nested objects": lambda m: '{"a":' * 200_000,
    "zeros": lambda m: bytes(100),
    "nested deeply": lambda m: "[" * 200_000,
    "other files": lambda m: with_field(m, "files", {**m["files"], "../../x": m["files"]["val.bin"]}),
    "a missing file": lambda m: with_field(m, "files", {"val.bin": m["files"]["val.bin"]}),
    **{
        f"without {name}": lambda m, name=name: json.dumps({k: v for k, v in m.items() if k != name})
        for name in FIELDS
        if name != "revisions"
    },
    **{f"{name} of another type": lambda m, n=name, v=value: with_field(m, n, v) for name, value in FIELDS.items()},
    **{f"{name} of another type": lambda m, n=name, v=value: with_record(m, n, v) for name, value in RECORD.items()},
}


@pytest.mark.parametrize("damage", ["a folder", "a pipe", *MANIFESTS])
def test_an_invalid_manifest(damage, folder, capsys):
    prepare("book.txt", "out", OPTIONS)
    path = folder / "out/manifest.json"
    manifest = json.loads(path.read_text())
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "a pipe":
        os.mkfifo(path)
    else:
        data = MANIFESTS[damage](manifest)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    for arguments in (("verify", "out"), ("inspect", "out", *BYTES[:2]), ("prepare", "book.txt", "out", *BYTES)):
        err = rejected(capsys, folder, *arguments)
        found = {"a folder": "a folder. ", "a pipe": "a pipe, a device"}.get(damage, "another or a damaged one: ")
        if damage in ("without format", "format of another type"):
            assert f"{path} must have format 1, which owt-data " in err
            continue
        assert f"{path} must be a manifest of owt-data, got {found}" in err
        assert err.endswith(" Restore it from a copy, or delete the folder and prepare it again.\n")


def test_a_damaged_folder_is_not_reported_as_prepared(folder, capsys):
    prepare("book.txt", "out", OPTIONS)
    (folder / "out/val.bin").write_bytes(b"")
    err = rejected(capsys, folder, "prepare", "book.txt", "out", *BYTES)
    assert err.startswith(f"error: {folder}/out/val.bin must have 140 bytes as in manifest.json, got 0. Restore it")
    assert main(["verify", "out"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "out: 1 difference"


def test_inspect_names_an_id_outside_the_vocabulary(folder, capsys):
    prepare("book.txt", "out", OPTIONS)
    tokens = np.fromfile("out/val.bin", "<u2")
    tokens[0] = 60_000
    tokens.tofile("out/val.bin")
    message = (
        f"The ids in {folder}/out/val.bin must be below 257, the vocabulary of the tokenizer, got 60000 at token 0."
    )
    assert message in rejected(capsys, folder, "inspect", "out")


@pytest.fixture
def interrupted(folder) -> Path:
    """The working folder of a preparation that was interrupted after two shards."""
    rows = [{"text": f"{number} " * 5000} for number in range(120)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def stop(progress):
        if progress.num_documents > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("rows.jsonl", "out", OPTIONS, num_processes=1, progress=stop)
    assert len(list((folder / ".out.partial/parts-all").glob("*.bin"))) >= 2
    return folder / ".out.partial"


def without(record, name):
    return {key: value for key, value in record.items() if key != name}


PLANS = {
    "a list": lambda p: [],
    "a number": lambda p: 5,
    "without part_bytes": lambda p: without(p, "part_bytes"),
    **{f"part_bytes {value}": lambda p, v=value: {**p, "part_bytes": v} for value in (0, -5, "9", 1.5, None)},
    "num_bytes of another type": lambda p: {**p, "num_bytes": "9"},
    "options of another type": lambda p: {**p, "options": 5},
    "layouts of another type": lambda p: {**p, "layouts": []},
    "a layout of another type": lambda p: {**p, "layouts": {"all": {"offline": 1, "revision": "x", "num_shards": 2}}},
    "tokenizer_sha256 of another type": lambda p: {**p, "tokenizer_sha256": 1},
}
RECORDS = {
    "a list": lambda r: [1],
    "a number": lambda r: 5,
    "num_bytes of another type": lambda r: {**r, "num_bytes": "9"},
    "num_documents of another type": lambda r: {**r, "num_documents": None},
    "without sha256": lambda r: without(r, "sha256"),
    "sha256 of another type": lambda r: {**r, "sha256": 1},
    "stop of another type": lambda r: {**r, "stop": "ab"},
    "stop of another length": lambda r: {**r, "stop": [0, 1, 2]},
    "stop of other types": lambda r: {**r, "stop": [0, "1"]},
}


def assert_completes(folder):
    """Assert that the same command writes the files of an undisturbed one."""
    assert main(["prepare", "rows.jsonl", "out", *BYTES]) == 0
    assert main(["prepare", "rows.jsonl", "undisturbed", *BYTES]) == 0
    for file in ("train.bin", "val.bin", "manifest.json"):
        assert (folder / "out" / file).read_bytes() == (folder / "undisturbed" / file).read_bytes()


@pytest.mark.parametrize("damage", [*PLANS, "not UTF-8", "nested deeply"])
def test_an_invalid_plan_restarts_the_preparation(damage, interrupted, folder):
    path = interrupted / "plan.json"
    if damage in PLANS:
        path.write_text(json.dumps(PLANS[damage](json.loads(path.read_text()))))
    else:
        path.write_bytes(b"\xe9" if damage == "not UTF-8" else b"[" * 200_000)
    assert_completes(folder)


@pytest.mark.parametrize("damage", [*RECORDS, "empty", "nested deeply"])
def test_an_invalid_shard_record_loses_only_that_shard(damage, interrupted, folder):
    path = interrupted / "parts-all/parts.jsonl"
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    if damage in RECORDS:
        second = json.dumps(RECORDS[damage](json.loads(second))).encode() + b"\n"
    else:
        second = b"" if damage == "empty" else b"[" * 200_000 + b"\n"
    path.write_bytes(b"" if damage == "empty" else b"".join([first, second, *rest]))
    assert_completes(folder)


@pytest.mark.parametrize("name", ["plan.json", "parts-all/parts.jsonl", "parts-all/000001.bin", "parts-all"])
def test_a_folder_or_a_file_in_the_place_of_the_other_is_named(name, interrupted, folder, capsys):
    path = interrupted / name
    if name == "parts-all":
        shutil.rmtree(path)
        path.write_text("")
        (interrupted / "parts-val").mkdir()
        (interrupted / "parts-val/000000.bin").write_text("")
    else:
        path.unlink()
        path.mkdir()
    err = rejected(capsys, folder, "prepare", "rows.jsonl", "out", *BYTES)
    found = "must be a regular file, got a folder. Rename or remove it."
    if name == "parts-all":
        found = "must be a folder, got something else. Move it away."
    assert err == f"error: {path} {found}\n"
