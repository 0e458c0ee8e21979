"""Preparation of wikitext: an end-of-text token before each title, from files of every kind."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import (
    DataError,
    PrepareOptions,
    load_tokenizer,
    open_tokens,
    prepare,
    prepare_in_background,
    read_manifest,
    verify,
)
from owt_data._options import DocumentsKind

TITLES: DocumentsKind = "wikitext-titles"
END_OF_TEXT = 256
BY_POSITION = PrepareOptions(tokenizer="bytes", documents=TITLES, split="position")


def wikitext(num_articles, *, preface=""):
    """Made-up articles in wikitext's form, with empty rows, headings and lines that resemble titles."""
    rng = random.Random(0)
    rows = [preface, ""]
    for number in range(num_articles):
        rows += [f" = Article {number} = \n", "", " = = Section = = \n", ""]
        rows += [f" The {' '.join(rng.choices(['naïve', '=', '@-@', '<|endoftext|>', '.'], k=9))} \n" for _ in range(3)]
    return [*rows, " a = b \n", "", ""]


ROWS = wikitext(20)


@pytest.fixture(params=[".txt", ".parquet", ".jsonl"])
def source(request, tmp_path):
    """The rows as two files of one kind."""
    for number, rows in enumerate((ROWS[:101], ROWS[101:])):
        path = tmp_path / f"{number}{request.param}"
        if request.param == ".txt":
            path.write_text("".join(row or " \n" for row in rows))
        elif request.param == ".parquet":
            pq.write_table(pa.table({"text": rows}), path)
        else:
            path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(tmp_path / f"*{request.param}")


def plain_loop(rows, tokenizer, *, row_end=""):
    tokens = []
    for row in rows:
        if row.startswith(" = ") and not row.startswith(" = = ") and row.endswith(" = \n"):
            tokens.append(tokenizer.eot_token)
        tokens += tokenizer.encode_ordinary(row + row_end)
    return tokens


def read(folder):
    """Return all tokens of a folder, those of training first."""
    return np.concatenate([np.fromfile(folder / name, "<u2") for name in ("train.bin", "val.bin")])


def articles(tokens):
    """Return the tokens between each end-of-text token and the next one."""
    return [tuple(article) for article in np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT))[1:]]


@pytest.mark.parametrize("row_end", ["", "\n", "é"])
def test_an_end_of_text_token_precedes_each_title_and_nothing_else(source, row_end, tmp_path):
    options = PrepareOptions(tokenizer="bytes", documents=TITLES, split="position", row_end=row_end)
    manifest = prepare(source, tmp_path / "out", options)
    expected = plain_loop(ROWS, load_tokenizer("bytes"), row_end=row_end)
    np.testing.assert_array_equal(read(tmp_path / "out"), expected)
    assert expected.count(END_OF_TEXT) == 20
    train, val = (manifest.files[name].num_documents for name in ("train.bin", "val.bin"))
    assert (train + val, verify(tmp_path / "out")) == (21, [])  # the boundary cuts an article


def test_wikitext_itself(corpora, gpt2, tmp_path):
    source = corpora / "wikitext-2-valid.txt"
    rows = [row if row.strip() else "" for row in source.read_text().splitlines(keepends=True)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "rows.parquet")
    options = PrepareOptions(documents=TITLES, split="position", row_end="\n")
    for number, name in enumerate((str(source), str(tmp_path / "rows.parquet"))):
        prepare(name, tmp_path / str(number), options)
        np.testing.assert_array_equal(read(tmp_path / str(number)), plain_loop(rows, gpt2, row_end="\n"))


def test_the_split_takes_complete_articles(source, tmp_path):
    options = PrepareOptions(tokenizer="bytes", documents=TITLES, val_fraction=0.2)
    manifest = prepare(source, tmp_path / "out", options)
    parts = [np.fromfile(tmp_path / "out" / name, "<u2") for name in ("train.bin", "val.bin")]
    found = [articles(part) for part in parts]
    assert [len(part) for part in found] == [16, 4]
    assert [manifest.files[name].num_documents for name in ("train.bin", "val.bin")] == [16, 4]
    expected = articles(np.array(plain_loop(ROWS, load_tokenizer("bytes"))))
    assert Counter(found[0] + found[1]) == Counter(expected)
    assert verify(tmp_path / "out") == []


def test_text_before_the_first_title_stays_with_the_first_article(tmp_path):
    rows = wikitext(2, preface="A preface. \n")
    (tmp_path / "wiki.txt").write_text("".join(rows))
    options = PrepareOptions(tokenizer="bytes", documents=TITLES, val_fraction=0.5)
    prepare(str(tmp_path / "wiki.txt"), tmp_path / "out", options)
    expected = plain_loop(rows, load_tokenizer("bytes"))
    second = len(expected) - expected[::-1].index(END_OF_TEXT) - 1
    parts = [np.fromfile(tmp_path / "out" / name, "<u2").tolist() for name in ("train.bin", "val.bin")]
    assert sorted(parts) == sorted([expected[:second], expected[second:]])
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("split", "preface", "shard_bytes", "expected"),
    [
        ("start", "", 1, [20, 1]),  # the validation tokens are the first title
        ("start", "A preface. \n", 30, [20, 1]),  # the preface and the first title
        ("position", "A preface. \n", 1000, [10, 11]),  # the validation tokens begin inside the tenth article
    ],
)
def test_an_article_that_the_split_cuts_counts_in_both_files(
    split, preface, shard_bytes, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("owt_data._prepare.planning.MAX_SHARD_BYTES", shard_bytes)
    (tmp_path / "wiki.txt").write_text("".join(row or " \n" for row in wikitext(20, preface=preface)))
    val_fraction = None if split == "start" else 0.52
    options = PrepareOptions(tokenizer="bytes", documents=TITLES, split=split, val_fraction=val_fraction)
    manifest = prepare(str(tmp_path / "wiki.txt"), tmp_path / "out", options)
    assert [manifest.files[name].num_documents for name in ("train.bin", "val.bin")] == expected
    assert verify(tmp_path / "out") == []


def test_a_given_split_is_kept(tmp_path):
    for name, rows in (("a", ROWS), ("b", wikitext(3))):
        (tmp_path / f"{name}.txt").write_text("".join(row or " \n" for row in rows))
    options = PrepareOptions(tokenizer="bytes", documents=TITLES)
    manifest = prepare([f"train={tmp_path}/a.txt", f"val={tmp_path}/b.txt"], tmp_path / "out", options)
    assert [manifest.files[name].num_documents for name in ("train.bin", "val.bin")] == [20, 3]
    val = np.fromfile(tmp_path / "out/val.bin", "<u2")
    np.testing.assert_array_equal(val, plain_loop(wikitext(3), load_tokenizer("bytes")))


@pytest.mark.parametrize("limit_rows", [pytest.param(None, marks=pytest.mark.slow), 120])
def test_an_interruption_after_any_shard_neither_repeats_nor_loses_a_token(source, limit_rows, tmp_path, monkeypatch):
    options = PrepareOptions(tokenizer="bytes", documents=TITLES, split="position", limit_rows=limit_rows, row_end="\n")
    prepare(source, tmp_path / "expected", options)
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", 1)
    monkeypatch.setattr("owt_data._prepare.planning.MAX_SHARD_BYTES", 1)  # a shard ends after every row with text

    class Interruption(Exception):
        pass

    num_interruptions = 0

    def interrupt(progress):
        nonlocal num_interruptions
        if progress.stage == "tokenizing" and progress.num_tokens > tokens_before[-1]:
            tokens_before.append(progress.num_tokens)
            num_interruptions += 1
            raise Interruption

    tokens_before = [0]
    for _ in range(len(ROWS) + 1):
        with contextlib.suppress(Interruption):
            prepare(source, tmp_path / "out", options, num_processes=1, progress=interrupt)
            break
    assert num_interruptions == len(ROWS[:limit_rows])  # row_end leaves no row without text
    for name in ("train.bin", "val.bin", "manifest.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    expected = plain_loop(ROWS[:limit_rows], load_tokenizer("bytes"), row_end="\n")
    np.testing.assert_array_equal(read(tmp_path / "out"), expected)


@pytest.mark.fault
def test_a_preparation_of_wikitext_killed_at_random_moments_writes_the_same_bytes(
    tmp_path, record_property, wait_until, hold_at
):
    record_property("fault", "SIGKILL of a preparation of wikitext at five random moments")
    record_property("lost", "the shards in progress")
    (tmp_path / "wiki.txt").write_text("".join(row or " \n" for row in wikitext(10_000)))
    prepare(str(tmp_path / "wiki.txt"), tmp_path / "expected", BY_POSITION)
    code = """
import sys
import owt_data._prepare.planning as plan
from owt_data._cli import main
plan.MIN_SHARD_BYTES = plan.MAX_SHARD_BYTES = 2000
sys.exit(main(sys.argv[1:]))
"""
    held = hold_at("owt_data._prepare.prepare.rename_durably", 1)
    options = ["prepare", str(tmp_path / "wiki.txt"), str(tmp_path / "out")]
    options += ["--tokenizer", "bytes", "--documents", TITLES, "--split", "position", "--num-processes", "2"]
    staging, rng = tmp_path / ".out.partial", random.Random(2)
    journal, result = staging / "parts-all/parts.jsonl", staging / "result"
    for _ in range(5):
        before = journal.stat().st_size if journal.exists() else 0
        process = subprocess.Popen(
            [sys.executable, "-c", held + code, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        # If this machine is slow here, an earlier start may have tokenized everything.
        wait_until(
            lambda before=before: result.exists() or (journal.exists() and journal.stat().st_size > before), process
        )
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=False)
    record_property("recovery_s", round(time.monotonic() - began, 1))
    assert done.returncode == 0, done.stderr
    for name in ("train.bin", "val.bin", "manifest.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".txt"])
def test_a_limit_reads_the_first_rows_of_a_source(suffix, tmp_path):
    """Without titles, a .txt file is one row."""
    texts = [f"Document {number}." for number in range(20)]
    (tmp_path / "in").mkdir()
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "in/rows.parquet")
    elif suffix == ".jsonl":
        (tmp_path / "in/rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for number, text in enumerate(texts):
            (tmp_path / f"in/{number:02}.txt").write_text(text)
    options = PrepareOptions(tokenizer="bytes", split="position", limit_rows=7, row_end="!")
    prepare(str(tmp_path / "in"), tmp_path / "out", options)
    encoding = load_tokenizer("bytes")
    expected = [token for text in texts[:7] for token in [*encoding.encode_ordinary(text + "!"), END_OF_TEXT]]
    np.testing.assert_array_equal(read(tmp_path / "out"), expected)


def test_the_manifest_records_every_option(tmp_path):
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 20)
    prepare(str(tmp_path / "book.txt"), tmp_path / "out", PrepareOptions(tokenizer="bytes"))
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.options == {
        "tokenizer": "bytes", "split": "auto", "val_fraction": None, "split_seed": 2357, "text_column": "text",
        "documents": "rows", "row_end": "", "limit_rows": None,
    }  # fmt: skip
    with pytest.raises(DataError, match=r"holds token files of .*: documents 'rows' and 'wikitext-titles' differ"):
        prepare(str(tmp_path / "book.txt"), tmp_path / "out", PrepareOptions(tokenizer="bytes", documents=TITLES))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n" * 10, r"must hold rows with titles of wikitext, ' = Title = ', got no title. Choose --documents rows."),
        ("A line. \n" * 10, r"must hold rows with titles of wikitext"),
    ],
)
def test_text_without_titles_is_rejected(text, message, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare(str(tmp_path / "text.txt"), tmp_path / "out", BY_POSITION)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_wikitext_that_is_being_prepared_has_the_same_windows(source, tmp_path):
    options = PrepareOptions(tokenizer="bytes", documents=TITLES, row_end="\n")
    names = [f"train={source}", f"val={source}"]
    expected = np.array(plain_loop(ROWS, load_tokenizer("bytes"), row_end="\n"))
    with prepare_in_background(names, tmp_path / "out", options, num_processes=1) as growing:
        windows = growing.train.windows(np.arange(len(expected) // 65), seq_len=64, order="sequential", seed=0)
    np.testing.assert_array_equal(windows[:, :-1].ravel(), expected[: windows[:, :-1].size])


def test_prepared_wikitext_opens_as_other_token_files(tmp_path):
    (tmp_path / "wiki.txt").write_text("".join(ROWS))
    manifest = prepare(str(tmp_path / "wiki.txt"), tmp_path / "out", BY_POSITION)
    data = open_tokens(str(tmp_path / "out"), tokenizer="gpt2")
    assert (data.tokenizer, len(data.train)) == ("bytes", manifest.files["train.bin"].num_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_rows": 0}, "limit_rows must be an integer of at least 1, got 0"),
        ({"row_end": "\udcff"}, r"row_end must be UTF-8 text, got '\\udcff'."),
    ],
)
def test_bad_options_are_rejected(options, message):
    with pytest.raises(DataError, match=message):
        PrepareOptions(**options)
