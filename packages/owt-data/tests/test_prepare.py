import gzip
import hashlib
import io
import math
import os
import threading
from importlib.metadata import version
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import (
    DataError,
    PrepareOptions,
    Source,
    find_source,
    load_tokenizer,
    open_tokens,
    prepare,
    read_manifest,
    source_digest,
    verify,
)
from owt_data._prepare.prepare import _staging_folder
from owt_data._tokenizers import tokenizer_digest

BYTES = PrepareOptions(tokenizer="bytes")


def parquet(texts, *, corrupt=False):
    """Return the bytes of a parquet file, with damaged data on request."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), buffer, use_dictionary=False)
    data = bytearray(buffer.getvalue())
    if corrupt:
        data[40:60] = b"\xff" * 20
    return bytes(data)


def read(path):
    return np.fromfile(path, dtype="<u2")


def plain_script(documents, tokenizer, folder, seed):
    """Write token files as a plain script does: split, encode each document, append end-of-text, concatenate."""
    splits = documents.train_test_split(test_size=0.0005, seed=seed, shuffle=True)
    folder.mkdir()
    for name, split in (("train.bin", splits["train"]), ("val.bin", splits["test"])):
        tokens = []
        for text in split["text"]:
            tokens += [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
        np.array(tokens, dtype=np.uint16).tofile(folder / name)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("bytes", 2357), ("bytes", 7), ("small_bpe", 2357), pytest.param("gpt2", 2357, marks=pytest.mark.shared_data)],
)
def test_token_files_are_those_of_a_plain_script(kind, seed, articles, tmp_path, request):
    tokenizer = load_tokenizer("bytes") if kind == "bytes" else request.getfixturevalue(kind)
    name = "bytes" if kind == "bytes" else "gpt2"
    documents = datasets.Dataset.from_json(str(articles))
    plain_script(documents, tokenizer, tmp_path / "plain", seed)
    options = PrepareOptions(tokenizer=name, split_seed=seed)
    manifest = prepare(str(articles), tmp_path / "out", options, num_processes=1)
    for file in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
        data = (tmp_path / "plain" / file).read_bytes()
        assert manifest.files[file].num_tokens == len(data) // 2
        assert manifest.files[file].sha256 == hashlib.sha256(data).hexdigest()
    assert manifest.files["train.bin"].num_documents + manifest.files["val.bin"].num_documents == 300
    assert read_manifest(tmp_path / "out") == manifest
    assert verify(tmp_path / "out") == []


def test_parquet_and_folders_of_files_hold_the_same_documents(articles, tmp_path):
    documents = datasets.Dataset.from_json(str(articles))
    documents.rename_column("text", "body").to_parquet(tmp_path / "articles.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    lines = articles.read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:100]))
    (folder / "b.jsonl").write_text("".join(lines[100:]))
    prepare(str(articles), tmp_path / "one", BYTES)
    prepare(str(folder), tmp_path / "two", BYTES)
    prepare(
        str(tmp_path / "articles.parquet"), tmp_path / "three", PrepareOptions(tokenizer="bytes", text_column="body")
    )
    for file in ("train.bin", "val.bin"):
        data = {(tmp_path / name / file).read_bytes() for name in ("one", "two", "three")}
        assert len(data) == 1


@pytest.mark.parametrize("name", ["shakespeare.txt", "wikitext-2-valid.txt"])
def test_complete_corpora_equal_those_of_a_plain_loop(name, corpora, gpt2, tmp_path):
    manifest = prepare(str(corpora / name), tmp_path / "out", PrepareOptions(tokenizer="gpt2"))
    plain = np.array([*gpt2.encode_ordinary((corpora / name).read_text()), gpt2.eot_token], dtype="<u2")
    boundary = round(0.9 * len(plain))
    for file, expected in (("train.bin", plain[:boundary]), ("val.bin", plain[boundary:])):
        assert manifest.files[file].num_tokens == len(expected)
        assert manifest.files[file].sha256 == hashlib.sha256(expected.tobytes()).hexdigest()
        assert (tmp_path / "out" / file).read_bytes() == expected.tobytes()


@pytest.mark.parametrize(("num_processes", "shard_bytes"), [(1, 100), (1, 1 << 20), (3, 2000)])
def test_neither_shards_nor_processes_change_a_byte(num_processes, shard_bytes, articles, tmp_path, monkeypatch):
    options = PrepareOptions(tokenizer="bytes", val_fraction=0.1)
    expected = prepare(str(articles), tmp_path / "expected", options)
    monkeypatch.setattr("owt_data._prepare.planning.MAX_SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("owt_data._prepare.write_splits._CHUNK_TOKENS", 50)
    assert prepare(str(articles), tmp_path / "out", options, num_processes=num_processes) == expected
    for file in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()


@pytest.mark.parametrize(
    ("source", "num_processes", "num_children"),
    [("corpus", 1, 0), ("corpus", 3, 3), ("articles", 3, 0)],  # the articles are less than a shard
)
def test_as_many_processes_tokenize_as_asked_and_none_is_left(
    source, num_processes, num_children, tmp_path, tokenizing_processes, request
):
    seen = []

    def look(progress):
        if progress.stage == "tokenizing" and not seen:
            # Each leads a group of its own, else Ctrl-C would reach it, too.
            seen.append([os.getpgid(child) == child for child in tokenizing_processes()])

    path = request.getfixturevalue(source)
    prepare(str(path), tmp_path / "out", BYTES, num_processes=num_processes, progress=look)
    assert seen == [[True] * num_children]
    assert tokenizing_processes() == []


def test_a_preparation_closes_its_files_and_ends_its_threads(
    articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 5000)
    monkeypatch.setattr("owt_data._prepare.planning.MAX_SHARD_BYTES", 5000)

    def held():
        return len(list(Path("/dev/fd").iterdir())), threading.active_count()

    torn = tmp_path / "torn.jsonl"
    torn.write_text(articles.read_text() + "torn")
    prepare(str(articles), tmp_path / "first", BYTES, num_processes=1)
    before = held()
    for number in range(3):
        prepare(str(articles), tmp_path / f"out-{number}", BYTES, num_processes=1)
        with pytest.raises(DataError, match="must hold JSON lines"):
            prepare(str(torn), tmp_path / "torn", BYTES, num_processes=1)
    assert held() == before


def test_the_builtin_corpus_is_pythons_source(tmp_path):
    manifest = prepare("builtin", tmp_path / "out", BYTES)
    assert manifest.files["train.bin"].num_documents > 300
    assert manifest.files["val.bin"].num_tokens > 50_000
    num_documents = sum(record.num_documents for record in manifest.files.values())
    assert manifest.files["val.bin"].num_documents == math.ceil(0.05 * num_documents)
    assert b"def __init__(self" in read(tmp_path / "out/train.bin").astype(np.uint8).tobytes()


def test_the_same_call_changes_nothing_and_another_is_rejected(articles, tmp_path):
    first = prepare(str(articles), tmp_path / "out", BYTES)
    before = (tmp_path / "out/train.bin").stat().st_mtime_ns
    assert prepare(str(articles), tmp_path / "out", BYTES) == first
    assert (tmp_path / "out/train.bin").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"holds token files of .*: split_seed 2357 and 1 differ"):
        prepare(str(articles), tmp_path / "out", PrepareOptions(tokenizer="bytes", split_seed=1))


def test_a_preparation_that_another_one_has_overtaken_changes_nothing(articles, tmp_path, monkeypatch):
    """It finds the folder complete once it has the lock."""
    done, lock = [], _staging_folder

    def lock_after_another(out):
        monkeypatch.setattr("owt_data._prepare.prepare._staging_folder", lock)
        done.append(prepare(str(articles), out, BYTES, num_processes=1))
        done.append((out / "train.bin").stat())
        return lock(out)

    monkeypatch.setattr("owt_data._prepare.prepare._staging_folder", lock_after_another)
    manifest = prepare(str(articles), tmp_path / "out", BYTES, num_processes=1)
    assert done == [manifest, (tmp_path / "out/train.bin").stat()]
    assert not (tmp_path / ".out.partial").exists()


def test_the_same_files_in_another_order_are_another_source(tmp_path):
    names = [str(tmp_path / f"{letter}.txt") for letter in "ab"]
    for name in names:
        Path(name).write_text(name * 50)
    prepare(names, tmp_path / "out", BYTES)
    with pytest.raises(DataError, match=r"holds token files of .*: contents differ"):
        prepare(names[::-1], tmp_path / "out", BYTES)


def test_progress_counts_documents_and_tokens(articles, tmp_path):
    calls = []
    manifest = prepare(str(articles), tmp_path / "out", BYTES, progress=calls.append)
    assert list(dict.fromkeys(call.stage for call in calls)) == ["reading", "tokenizing", "assembling"]
    assert (calls[-1].fraction, calls[-1].num_documents) == (1.0, 300)
    assert calls[-1].num_tokens == sum(record.num_tokens for record in manifest.files.values())
    assert calls[-1].num_bytes == calls[-1].num_tokens - 300


def test_the_share_that_is_done_grows_with_the_text_and_then_with_the_tokens(
    articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN", "MAX"):
        monkeypatch.setattr(f"owt_data._prepare.planning.{name}_SHARD_BYTES", 5000)
    calls = []
    prepare(str(articles), tmp_path / "out", BYTES, num_processes=1, progress=calls.append)
    tokenizing, assembling = ([call for call in calls if call.stage == stage] for stage in ("tokenizing", "assembling"))
    assert len(tokenizing) > 5
    size = articles.stat().st_size
    assert [call.fraction for call in tokenizing] == [call.num_bytes / size for call in tokenizing]
    # The first half checks the shards, the second half copies them.
    total = tokenizing[-1].num_tokens
    shares = [call.fraction for call in assembling]
    assert shares[: len(tokenizing)] == [call.num_tokens / (2 * total) for call in tokenizing]
    assert shares[len(tokenizing) :] == sorted(set(shares[len(tokenizing) :]))
    assert (shares[len(tokenizing)] > 0.5, shares[-1]) == (True, 1.0)


def test_the_manifest_names_its_source_tokenizer_and_version(articles: Path, tmp_path: Path) -> None:
    manifest = prepare(str(articles), tmp_path / "out", BYTES)
    tokenizer = load_tokenizer("bytes")
    assert (manifest.source, manifest.source_sha256) == (str(articles), find_source(str(articles)).digest())
    assert (manifest.tokenizer, manifest.vocab_size) == ("bytes", 257)
    assert (manifest.tokenizer_sha256, manifest.version) == (tokenizer_digest(tokenizer), version("owt-data"))
    assert (manifest.split, manifest.revisions) == ("documents", {})
    assert open_tokens(str(tmp_path / "out"), tokenizer="bytes").source_fingerprint == {
        "source_sha256": manifest.source_sha256,
        "options": BYTES.record(),
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "revisions": {},
    }


def test_names_may_begin_with_the_home_folder(articles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell replaces no `~` after `train=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare([f"train=~/{articles.name}", f"val=~/{articles.name}"], "~/out", BYTES)
    assert verify("~/out") == []
    assert open_tokens("~/out", tokenizer="bytes") == open_tokens(str(tmp_path / "out"), tokenizer="bytes")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "must hold text for both splits, got 0 tokens in 0 documents"),
        (
            "other.jsonl",
            '{"body": "x"}\n',
            r"The text column must be exactly one of the columns \['body'\] of .*, got 'text'",
        ),
        (
            "numbers.jsonl",
            '{"text": 5}\n',
            "The column 'text' of .* must hold text .*, got a number in line 1",
        ),
        (
            "nulls.jsonl",
            '{"text": "x"}\n{"text": null}\n',
            "The column 'text' of .*nulls.jsonl must hold text in every row, got none in line 2",
        ),
        ("rowless.parquet", parquet([]), "must hold text for both splits, got 0 tokens in 0 documents"),
        ("blank.txt", "", "must hold text for both splits, got 1 tokens in 1 documents"),
        ("blank.jsonl", '{"text": ""}\n' * 99, "must hold text for both splits, got 99 tokens in 99 documents"),
        (
            "mixed.jsonl",
            '{"text": "x"}\n{"text": 5}\n',
            "The column 'text' of .* must hold text in every row, got a number in line 2",
        ),
        ("lists.jsonl", '[1, 2]\n"x"\n', ".*lists.jsonl must hold JSON lines, .*: an array in line 1"),
        ("plain.jsonl.gz", '{"text": "x"}\n', ".*plain.jsonl.gz must hold JSON lines, .*: Not a gzipped file"),
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9],
            ".*cut.jsonl.gz must hold JSON lines, .*: Compressed file",
        ),
        ("cut.parquet", parquet(["x"] * 99, corrupt=True), ".*cut.parquet must hold parquet rows, .*: Corrupt snappy"),
        (
            "torn.jsonl",
            '{"text": "x"\n{"text": "y"}\n',
            r"torn.jsonl must hold .*: Expecting ',' delimiter in line 1\.",
        ),
        ("fake.parquet", "no parquet", "fake.parquet must hold parquet rows"),
        ("latin.txt", b"tea\xe9", "latin.txt must hold UTF-8 text, got other bytes at byte 3"),
        (
            "one.jsonl",
            '{"text": "x"}\n',
            "must hold text for both splits, got 2 tokens in 1 documents",
        ),
        ("notes.doc", "x", r"must be files of one kind \(.txt, .jsonl or .parquet\), got .doc"),
    ],
)
def test_sources_that_cannot_be_read_are_rejected(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = PrepareOptions(tokenizer="bytes", split="documents")
    with pytest.raises(DataError, match=message):
        prepare(str(path), tmp_path / "out", options)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [name]


def test_a_source_repaired_after_its_rejection_is_prepared(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x"}\n' * 50 + "torn")
    with pytest.raises(DataError, match=r"must hold JSON lines, .*: Expecting value in line 51"):
        prepare(str(path), tmp_path / "out", BYTES)
    path.write_text('{"text": "x"}\n' * 50)
    prepare(str(path), tmp_path / "out", BYTES)
    path.write_text('{"text": "y"}\n' * 50)
    with pytest.raises(DataError, match=r"holds token files of .*: contents differ"):
        prepare(str(path), tmp_path / "out", BYTES)


def test_an_interruption_before_the_first_shard_allows_any_restart(articles, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/plan.json").write_text('{"source": "other", "source_sha256": "0", "options": {}}')
    prepare(str(articles), tmp_path / "out", BYTES)
    assert verify(tmp_path / "out") == []


def test_invalid_names_are_rejected(articles, tmp_path):
    for sources, out, message in (
        ("", "out", "The source must have a name, got an empty text."),
        (["train=", f"val={articles}"], "out", "The source must have a name, got an empty text."),
        (str(articles), "", "The output must be a local or mounted folder, got ''"),
        (str(articles), articles, r"The output must be a folder, got .*articles.jsonl', which is something else"),
        (f"{tmp_path}/nowhere/", "out", r"nowhere must be a file or a folder of files, got a name that does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(sources, out and tmp_path / out, BYTES)
    prepare(str(articles), tmp_path / "out", BYTES)
    with pytest.raises(DataError, match="must hold text to prepare, got a folder of token files"):
        prepare(str(tmp_path / "out"), tmp_path / "again", BYTES)
    options = PrepareOptions(tokenizer="bytes", val_fraction=0.2)
    with pytest.raises(
        DataError, match=r"split and val_fraction must be absent with train=... and val=..., got 'auto' and 0.2"
    ):
        prepare([f"train={articles}", f"val={articles}"], tmp_path / "given", options)


def test_what_is_left_of_token_files_is_no_text(articles, tmp_path):
    out = tmp_path / "out"
    prepare(str(articles), out, BYTES)
    (out / "train.bin").unlink()
    with pytest.raises(DataError, match="must hold text to prepare, got a folder of token files"):
        prepare(str(out), tmp_path / "again", BYTES)
    (out / "val.bin").unlink()
    with pytest.raises(DataError, match=r"must name .txt, .jsonl or .parquet files, got no file"):
        prepare(str(out), tmp_path / "again", BYTES)


def test_paths_that_do_not_exist_are_rejected(tmp_path):
    with pytest.raises(
        DataError, match=r"nowhere.txt must be a file or a folder of files, got a name that does not exist"
    ):
        prepare(str(tmp_path / "nowhere.txt"), tmp_path / "out", BYTES)


def test_a_folder_of_other_files_is_rejected_and_left_unchanged(articles, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"holds files that prepare has not written"):
        prepare(str(articles), out, BYTES)
    assert [entry.name for entry in out.iterdir()] == ["thesis.tex"]


def test_a_file_of_somebody_else_in_the_working_folder_is_not_deleted(articles, tmp_path):
    staging = tmp_path / ".out.partial"
    staging.mkdir()
    (staging / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"out.partial holds notes.txt, which prepare has not written. Move it away."):
        prepare(str(articles), tmp_path / "out", BYTES)
    assert [(path.name, path.read_text()) for path in staging.iterdir()] == [("notes.txt", "mine")]
    (staging / "notes.txt").rename(staging / ".nfs0001")  # as a network file system names a deleted file that is open
    prepare(str(articles), tmp_path / "out", BYTES)
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["plan.json", "wanted", "error.txt", "tokenizer.json"])
def test_what_a_kill_leaves_of_a_file_is_no_file_of_somebody_else(articles, tmp_path, name):
    """A file is written under another name, and then gets its own."""
    staging = tmp_path / ".out.partial"
    staging.mkdir()
    (staging / f"{name}.0123abcd.tmp").write_text("half of it")
    prepare(str(articles), tmp_path / "out", BYTES)
    assert verify(tmp_path / "out") == []
    assert not staging.exists()


def test_a_source_that_cannot_be_read_is_named(articles, tmp_path):
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(
        DataError, match=r"loop.jsonl must be a file or a folder of files, got a link to a missing file or to itself"
    ):
        prepare(str(tmp_path / "loop.jsonl"), tmp_path / "out", BYTES)
    with pytest.raises(DataError, match=r"must be a regular file, got a folder"):
        Source(name="folder", kind="text", files=(tmp_path,)).digest()


def test_a_folder_that_cannot_be_made_is_rejected(articles, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/.out.partial must be readable and writable, got Not a directory"):
        prepare(str(articles), tmp_path / "file" / "out", BYTES)


def test_bad_options_are_rejected():
    with pytest.raises(DataError, match=r"val_fraction must be between 0 and 1, got 1.5"):
        PrepareOptions(val_fraction=1.5)
    with pytest.raises(DataError, match="split_seed must be an integer of at least 0, got -1"):
        PrepareOptions(split_seed=-1)


@pytest.mark.parametrize("names", ["a.jsonl", ["train=a.jsonl", "val=b.jsonl"]])
def test_the_digest_of_a_source_is_that_of_its_manifest(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {n}"}}\n' for n in range(50)))
    if isinstance(names, list):
        assert source_digest(names[::-1]) == source_digest(names)  # each name gives its split
    assert source_digest(names) == prepare(names, tmp_path / "out", PrepareOptions(tokenizer="bytes")).source_sha256
