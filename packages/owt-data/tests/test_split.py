"""Divide documents between training and validation."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from owt_data import (
    DataError,
    DocumentsKind,
    PrepareOptions,
    TokenSequence,
    load_tokenizer,
    open_tokens,
    prepare,
    verify,
)
from owt_data._cli import main
from owt_data._paths import LocalTokens
from owt_data._prepare.write_splits import _chunks, copy_ranges, split_documents
from owt_data._tokens.sequence import concatenate
from owt_data._tokens.summary import Summary

BYTES = PrepareOptions(tokenizer="bytes")


def read(path):
    return np.fromfile(path, dtype="<u2")


@pytest.mark.parametrize(
    ("num_documents", "fraction", "num_val"),
    [(300, 0.0005, 1), (2000, 0.0005, 1), (2001, 0.0005, 2), (3000, 0.0005, 2), (300, 0.101, 31), (10, 0.25, 3)],
)
def test_the_split_is_that_of_datasets_with_validation_documents_rounded_up(num_documents, fraction, num_val):
    rows = datasets.Dataset.from_dict({"number": range(num_documents)})
    for seed in (2357, 7):
        expected = rows.train_test_split(test_size=fraction, seed=seed, shuffle=True)
        ranges = split_documents(np.arange(1, num_documents + 1), fraction, seed)
        assert len(ranges["val"][0]) == num_val
        for split, (starts, stops) in zip(("train", "test"), (ranges["train"], ranges["val"]), strict=True):
            assert starts.tolist() == list(expected[split]["number"])
            assert (stops - starts == 1).all()


def test_splits_that_are_given_are_kept(articles, tmp_path):
    lines = articles.read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:250]))
    (tmp_path / "b.jsonl").write_text("".join(lines[250:]))
    sources = [f"train={tmp_path / 'a.jsonl'}", f"val={tmp_path / 'b.jsonl'}"]
    manifest = prepare(sources, tmp_path / "out", BYTES)
    tokenizer = load_tokenizer("bytes")
    for file, split in (("train.bin", lines[:250]), ("val.bin", lines[250:])):
        expected = [token for line in split for token in [*json.loads(line)["text"].encode(), tokenizer.eot_token]]
        assert read(tmp_path / "out" / file).tolist() == expected
        assert manifest.files[file].num_documents == len(split)
    assert prepare(sources, tmp_path / "out", BYTES) == manifest
    with pytest.raises(DataError, match="holds token files of"):
        prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", BYTES)
    swapped = [f"train={tmp_path / 'b.jsonl'}", f"val={tmp_path / 'a.jsonl'}"]
    with pytest.raises(DataError, match="holds token files of"):
        prepare(swapped, tmp_path / "out", BYTES)


@pytest.mark.parametrize("options", [{"split": "position"}, {"split": "start"}, {"val_fraction": 0.3}])
def test_options_of_a_split_are_rejected_where_the_split_is_given(
    options: dict[str, Any], articles: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"split and val_fraction must be absent with train=\.\.\. and val=\.\.\., got"):
        prepare([f"train={articles}", f"val={articles}"], tmp_path / "out", replace(BYTES, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "start", "val_fraction": 0.3}, "val_fraction must be absent with split start, got 0.3"),
        ({"val_fraction": 0}, "val_fraction must be between 0 and 1, got 0"),
        ({"val_fraction": 1.0}, "val_fraction must be between 0 and 1, got 1.0"),
    ],
)
def test_shares_that_no_split_has_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        PrepareOptions(tokenizer="bytes", **options)


@pytest.mark.parametrize("blank", ["train", "val"])
def test_a_split_without_text_is_rejected(blank: str, articles: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n' * 9)
    names = [f"{split}={tmp_path / 'blank.jsonl' if split == blank else articles}" for split in ("train", "val")]
    with pytest.raises(DataError, match=r"must hold text for both splits, .*\. Give text for both, train=\.\.\. and"):
        prepare(names, tmp_path / "out", BYTES)


def test_one_document_is_split_by_position(tmp_path):
    (tmp_path / "book.txt").write_text("abcdefghi" * 11)
    manifest = prepare(str(tmp_path / "book.txt"), tmp_path / "out", BYTES)
    assert (
        read(tmp_path / "out/train.bin").tobytes() == np.frombuffer(b"abcdefghi" * 10, np.uint8).astype("<u2").tobytes()
    )
    assert read(tmp_path / "out/val.bin").tolist() == [*b"abcdefghi", 256]
    assert [manifest.files[name].num_tokens for name in ("train.bin", "val.bin")] == [90, 10]
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize(("num_tokens", "num_train"), [(14, 13), (17, 15), (19, 17), (93, 84)])
def test_the_boundary_of_a_split_by_position_is_rounded(num_tokens: int, num_train: int, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a" * (num_tokens - 1))
    manifest = prepare(str(tmp_path / "book.txt"), tmp_path / "out", BYTES, num_processes=1)
    sizes = [manifest.files[name].num_tokens for name in ("train.bin", "val.bin")]
    assert sizes == [num_train, num_tokens - num_train]
    np.ones(num_tokens, "<u2").tofile(tmp_path / "one.bin")
    data = open_tokens(str(tmp_path / "one.bin"), tokenizer="bytes")
    assert [len(data.train), len(data.val)] == sizes


def test_one_document_of_2000_is_for_validation(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n' * 4001)
    manifest = prepare(str(tmp_path / "rows.jsonl"), tmp_path / "out", BYTES, num_processes=1)
    assert [manifest.files[name].num_documents for name in ("train.bin", "val.bin")] == [3998, 3]


def test_many_documents_can_be_split_by_position(articles, tmp_path):
    options = PrepareOptions(tokenizer="bytes", split="position", val_fraction=0.25)
    manifest = prepare(str(articles), tmp_path / "out", options)
    train, val = read(tmp_path / "out/train.bin"), read(tmp_path / "out/val.bin")
    assert len(val) == pytest.approx(0.25 * (len(train) + len(val)), abs=1)
    ends = np.flatnonzero(np.concatenate([train, val]) == 256) + 1
    assert len(ends) == 300
    assert manifest.files["train.bin"].num_documents == (ends < len(train)).sum() + 1
    assert manifest.files["val.bin"].num_documents == (ends > len(train)).sum()


@pytest.mark.parametrize(
    ("lengths", "options", "split", "share"),
    [
        ([1000] * 2, {}, "position", 0.1),
        ([1000] * 5, {}, "position", 0.1),
        ([1000] * 5, {"val_fraction": 0.2}, "documents", 0.2),
        ([1000] * 5, {"val_fraction": 0.05}, "position", 0.05),
        ([1000] * 5, {"split": "documents"}, "documents", 0.2),
        ([1000] * 20, {}, "documents", 0.05),
        ([10] * 30 + [100_000], {"val_fraction": 0.5}, "position", 0.5),
    ],
)
def test_few_documents_are_split_by_position(lengths, options, split, share, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for number, length in enumerate(lengths):
        (tmp_path / f"texts/{number:02}.txt").write_text("a" * (length - 1))
    options = PrepareOptions(tokenizer="bytes", **options)
    manifest = prepare(str(tmp_path / "texts"), tmp_path / "out", options, num_processes=1)
    assert manifest.split == split
    assert manifest.files["val.bin"].num_tokens == pytest.approx(share * sum(lengths), rel=0.01)
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("options", "train", "val"),
    [
        ([], "9,000 tokens (90 %)", "1,000 tokens (10 %)"),
        (["--val-fraction", "0.0425"], "9,575 tokens (95.8 %)", "425 tokens (4.25 %)"),
        (["--val-fraction", "0.0002"], "9,998 tokens (100 %)", "2 tokens (0.02 %)"),
    ],
)
def test_the_command_says_the_sizes_of_both_splits(options, train, val, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("a" * 9_999)
    command = ["prepare", str(tmp_path / "book.txt"), str(tmp_path / "out"), "--tokenizer", "bytes", *options]
    assert main([*command, "--num-processes", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "the text was split by position",
        f"{tmp_path}/out/train.bin: {train}, 1 documents",
        f"{tmp_path}/out/val.bin: {val}, 1 documents",
    ]


def test_the_command_says_how_the_text_was_split(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "{"a" * 2000}"}}\n' * 200)
    rows, options = str(tmp_path / "rows.jsonl"), ["--tokenizer", "bytes", "--num-processes", "1"]
    for number, (command, shown) in enumerate(
        [
            ([rows], "documents"),
            ([rows, "--split", "start"], "position, with validation at its start"),
            ([f"train={rows}", f"val={rows}"], "its sources"),
        ]
    ):
        names = [name for name in command if "jsonl" in name]
        assert main(["prepare", *names, str(tmp_path / str(number)), *command[len(names) :], *options]) == 0
        assert capsys.readouterr().err.splitlines()[0] == f"the text was split by {shown}"


def text_of_words(num_bytes: int) -> str:
    """Text of words of at most 12 bytes, some with characters of two bytes, in lines."""
    rng = np.random.default_rng(num_bytes)
    words = np.array(["a ", "naïve ", "reading\n", "books, ", "été.\n"])
    text = "".join(rng.choice(words, size=num_bytes // 3))
    return text.encode()[: num_bytes - 1].decode(errors="ignore") + "."


@pytest.mark.parametrize("documents", ["rows", "wikitext-titles"])
@pytest.mark.parametrize(
    ("num_bytes", "least"), [(300_000, 1 << 18), (1_050_000, 1 << 18), (2_500_000, 1 << 18), (2_500_000, 1 << 14)]
)
def test_the_start_of_a_text_is_its_first_128th_within_bounds(
    num_bytes: int, least: int, documents: DocumentsKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._prepare.planning.MIN_SHARD_BYTES", least)
    text = " = Title = \n" + text_of_words(num_bytes)
    (tmp_path / "book.txt").write_text(text)
    options = replace(BYTES, split="start", documents=documents)
    manifest = prepare(str(tmp_path / "book.txt"), tmp_path / "out", options, num_processes=1)
    val, train = (read(tmp_path / "out" / name).tolist() for name in ("val.bin", "train.bin"))
    expected = [256, *text.encode()] if documents == "wikitext-titles" else [*text.encode(), 256]
    assert val + train == expected
    wanted = max(len(text.encode()) // 128, least)
    assert wanted <= len(val) < wanted + 5_000
    assert manifest.split == "start"
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("num_bytes", [2, 200_000])
def test_a_text_that_validation_takes_completely_is_rejected(num_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("ab " * (num_bytes // 3) + "b" * (num_bytes % 3))
    with pytest.raises(
        DataError,
        match=r"book\.txt must hold more text than validation takes, its first 262144 bytes up to the end of a row or "
        rf"a word, got {num_bytes} bytes\. "
        r"Give more text, or name both splits, train=\.\.\. and val=\.\.\.\.$",
    ):
        prepare(str(tmp_path / "book.txt"), tmp_path / "out", replace(BYTES, split="start"))
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 11, 99, 1000])
def test_chunks_are_the_ranges_in_order(chunk_tokens: int) -> None:
    lengths = np.array([10, 0, 3, 30, 31, 0, 1, 9, 11, 10, 0])
    starts = np.random.default_rng(0).permutation(11) * 100
    chunks = list(_chunks((starts, starts + lengths), chunk_tokens))
    assert max(int((stops - begins).sum()) for begins, stops in chunks) <= chunk_tokens
    found = [np.arange(a, b) for begins, stops in chunks for a, b in zip(begins, stops, strict=True)]
    expected = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))


def test_documents_in_any_order_are_copied_with_one_read_of_each_shard_for_a_chunk(
    positions: Callable[..., TokenSequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = concatenate([positions(tmp_path / f"{first}.bin", first, first + 100) for first in range(0, 800, 100)])
    starts = np.random.default_rng(0).permutation(80) * 10
    opened: list[tuple[str, bool]] = []

    class NotedTokens(LocalTokens):
        def __init__(self, path: str, *, in_order: bool) -> None:
            opened.append((path, in_order))
            super().__init__(path, in_order=in_order)

    monkeypatch.setattr("owt_data._tokens.sequence.LocalTokens", NotedTokens)
    monkeypatch.setattr("owt_data._prepare.write_splits._NUM_CHUNKS", 2)
    summary = Summary(9, begins=False, continues=False)
    copy_ranges(shards, (starts, starts + 10), tmp_path / "out.bin", summary, lambda num_tokens: None)
    assert read(tmp_path / "out.bin").tolist() == (starts[:, None] + np.arange(10)).ravel().tolist()
    assert len(opened) == len({path for path, _ in opened}) * 2 == 16
    assert all(in_order for _, in_order in opened)


def test_a_document_longer_than_a_chunk_takes_memory_for_itself_alone() -> None:
    ends = np.cumsum(np.full(20_000, 10))
    ends[10_000:] += 1_000_000

    def peak_bytes(chunk_tokens: int) -> int:
        tracemalloc.start()
        for _ in _chunks((np.append(0, ends[:-1]), ends), chunk_tokens):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(100_000) < peak_bytes(10_000_000) + 20_000
