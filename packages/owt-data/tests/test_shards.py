"""Shards: where a text is cut, which shards are made again, and how many of them wait."""

import os
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import DataError, PrepareOptions, find_source
from owt_data._prepare.local_encoder import local_encoder
from owt_data._prepare.planning import Request, open_documents, write_plan
from owt_data._prepare.prepare import most_shards_of
from owt_data._prepare.shards import Encoder, Follower, _cut, tokenize
from owt_data._sources.documents import START, Documents
from owt_data._tokens.journal import checksum, read_journal, shard_path

ROWS = [chr(97 + number % 26) * (5 * number % 9) for number in range(29)]


@pytest.fixture
def documents(tmp_path, monkeypatch) -> Documents:
    """29 documents of 0 to 8 bytes in two files, which are read by threes."""
    monkeypatch.setattr("owt_data._sources.documents._ROWS_PER_READ", 3)
    write(tmp_path / "texts", ROWS)
    return Documents(find_source(str(tmp_path / "texts")))


def write(folder, rows):
    """Write the rows as two files."""
    folder.mkdir(exist_ok=True)
    for name, part in (("a", rows[:17]), ("b", rows[17:])):
        pq.write_table(pa.table({"text": part}), folder / f"{name}.parquet")


@pytest.mark.parametrize("shard_bytes", [1, 7, 9, 40, 10_000])
def test_a_shard_is_the_least_text_of_its_size_from_every_start(
    shard_bytes: int, documents: Documents, tmp_path: Path
) -> None:
    pieces = [
        (len(text), (chunk.file, offset))
        for chunk in documents.read()
        for text, offset in zip(chunk.texts.to_pylist(), chunk.offsets.tolist(), strict=True)
    ]
    expected, held = [], 0
    for number, (num_bytes, stop) in enumerate(pieces):
        held += num_bytes
        if held >= shard_bytes or number == len(pieces) - 1:
            expected.append((held, stop))
            held = 0
    shards = list(_cut(documents, tmp_path, START, 0, shard_bytes))
    assert [(shard.num_bytes, tuple(shard.stop)) for shard in shards] == expected
    assert [text for shard in shards if shard.batch is not None for text in shard.batch["text"].to_pylist()] == ROWS
    for number, shard in enumerate(shards):
        assert (shard.index, shard.path) == (number, shard_path(tmp_path, number))
        rest = _cut(documents, tmp_path, shard.stop, number + 1, shard_bytes)
        assert [(later.index, later.batch) for later in rest] == [
            (later.index, later.batch) for later in shards[number + 1 :]
        ]


def test_several_damaged_shards_are_made_again_before_a_reader_begins(documents: Documents, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    seen, valid = [], []

    def begin():
        records = read_journal(folder)
        valid[:] = [checksum(shard_path(folder, index)) == record.sha256 for index, record in enumerate(records)]

    def run():
        seen.clear()
        with local_encoder("bytes", 1) as encoder:
            return tokenize(
                documents, folder, shard_bytes=9, encoder=encoder, report=lambda *call: seen.append(call),
                follower=Follower(begin=begin, num_wanted=lambda: 100),
            )  # fmt: skip

    records = run()
    assert seen == [(record, False) for record in records]
    damaged = [0, 3, 4, len(records) - 1]
    whole = [shard_path(folder, index).read_bytes() for index in range(len(records))]
    shard_path(folder, 0).unlink()
    shard_path(folder, 3).write_bytes(whole[3][:-2])
    shard_path(folder, 4).write_bytes(whole[3])
    shard_path(folder, damaged[-1]).write_bytes(b"")
    (folder / "000001.bin.0123.tmp").write_bytes(b"of a start that was killed")
    assert run() == records
    kept = [record for index, record in enumerate(records) if index not in damaged]
    assert seen == [(record, True) for record in kept] + [(records[index], False) for index in damaged]
    assert valid == [True] * len(records)
    assert [shard_path(folder, index).read_bytes() for index in range(len(records))] == whole
    assert list(folder.glob("*.tmp")) == []


def test_a_damaged_shard_is_not_made_again_from_another_text(documents: Documents, tmp_path: Path) -> None:
    folder = tmp_path / "shards"

    def run():
        with local_encoder("bytes", 1) as encoder:
            return tokenize(documents, folder, shard_bytes=9, encoder=encoder, report=lambda *call: None)

    records = run()
    shard_path(folder, 3).unlink()
    write(tmp_path / "texts", [row.upper() for row in ROWS])
    with pytest.raises(DataError, match=r"000003\.bin is damaged, and the text gives other tokens than before"):
        run()
    write(tmp_path / "texts", ROWS)
    assert run() == records
    assert checksum(shard_path(folder, 3)) == records[3].sha256


def test_a_damaged_shard_of_a_long_text_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("owt_data._sources.documents._TEXT_BLOCK_BYTES", 1000)
    monkeypatch.setattr("owt_data._sources.documents._PIECE_CHARS", 40)
    (tmp_path / "book.txt").write_text("".join(f"naïve {'é' * (number % 17)}{number}\n" for number in range(999)))
    documents, folder = Documents(find_source(str(tmp_path / "book.txt"))), tmp_path / "shards"

    def run():
        with local_encoder("bytes", 1) as encoder:
            return tokenize(documents, folder, shard_bytes=700, encoder=encoder, report=lambda *call: None)

    records = run()
    assert len(records) > 20
    assert all(700 <= record.num_bytes < 900 for record in records[:-1])
    for index in range(0, len(records), 3):
        shard_path(folder, index).unlink()
    assert run() == records


class Late(Future):
    """Result of an encoder that is there once it is asked for."""

    def result(self, timeout=None):
        if not self.done():
            self.set_result({"num_tokens": 1, "num_documents": 1, "sha256": "0" * 64})
        return super().result(timeout)


class LateEncoder:
    """Encoder of late results, with the text that was submitted and is not reported."""

    def __init__(self) -> None:
        self.num_submitted, self.waiting, self.most = 0, 0, 0

    def submit(self, shard):
        self.num_submitted += 1
        self.waiting += shard.num_bytes
        self.most = max(self.most, self.waiting)
        return Late()

    def report(self, record, is_kept):
        self.waiting -= record.num_bytes


def test_the_text_that_waits_for_its_tokens_is_bounded(
    documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("owt_data._prepare.shards.MAX_SHARD_BYTES", 7)
    late = LateEncoder()
    encoder = Encoder(submit=late.submit, num_workers=3)
    records = tokenize(documents, tmp_path / "shards", shard_bytes=1, encoder=encoder, report=late.report)
    assert (late.num_submitted, late.waiting) == (len(records), 0)
    assert 5 * 7 <= late.most < 5 * 7 + 8  # one that exceeds the bound waits until another is ready


def test_each_worker_has_two_shards_ahead_of_the_reader(documents: Documents, tmp_path: Path) -> None:
    late = LateEncoder()

    class Stopped(Exception):
        pass

    def num_wanted() -> int:
        if late.num_submitted and not late.waiting:
            raise Stopped
        return 2

    encoder = Encoder(submit=late.submit, num_workers=3)
    with pytest.raises(Stopped):
        tokenize(
            documents, tmp_path / "shards", shard_bytes=1, encoder=encoder, report=late.report,
            follower=Follower(begin=lambda: None, num_wanted=num_wanted),
        )  # fmt: skip
    assert late.num_submitted == 2 + 2 * 3 + 2


def request_of(folder: Path, sizes: dict[str, int], limit_rows: int | None = None) -> Request:
    """A preparation of texts of these sizes."""
    for name, size in sizes.items():
        path = folder / f"{name}.txt"
        path.touch()
        os.truncate(path, size)  # it takes no space
    return Request(
        staging=folder,
        out=folder / "out",
        name="texts",
        digest="0" * 64,
        splits={name: find_source(str(folder / f"{name}.txt")) for name in sizes},
        options=PrepareOptions(tokenizer="bytes", limit_rows=limit_rows),
    )


@pytest.mark.parametrize(
    ("sizes", "limit_rows", "shard_bytes"),
    [
        ([1], None, 1 << 18),
        ([128 * 262_151 + 5], None, 262_151),
        ([128 * 300_000, 128 * 100_000 + 127], None, 400_000),
        ([1 << 40], None, 1 << 24),
        ([1 << 40], 3, 1 << 18),
    ],
)
def test_shards_are_a_128th_of_the_text_within_bounds(
    sizes: list[int], limit_rows: int | None, shard_bytes: int, tmp_path: Path
) -> None:
    names = ["all"] if len(sizes) == 1 else ["train", "val"]
    request = request_of(tmp_path, dict(zip(names, sizes, strict=True)), limit_rows)
    documents = open_documents(request, None, "1" * 64)
    plan = write_plan(request, documents, "1" * 64)
    assert plan.part_bytes == shard_bytes
    assert plan.num_bytes == (None if limit_rows else sum(sizes))
    assert (plan.source, plan.source_sha256, plan.tokenizer_sha256) == ("texts", "0" * 64, "1" * 64)
    assert documents.keys() == set(names)


@pytest.mark.parametrize("unknown", ["train", "val"])
def test_the_text_has_no_size_if_one_split_has_none(unknown: str, tmp_path: Path, monkeypatch) -> None:
    """The hub does not know the size of each dataset."""
    request = request_of(tmp_path, {"train": 300_000, "val": 400_000})
    documents = open_documents(request, None, "1" * 64)
    monkeypatch.setattr(documents[unknown], "num_bytes", lambda: None)
    plan = write_plan(request, documents, "1" * 64)
    assert (plan.num_bytes, plan.part_bytes) == (None, 1 << 24)


@pytest.mark.parametrize(
    ("sizes", "most"), [([], 1), ([0], 1), ([1 << 18], 1), ([1 << 18, 1], 2), ([None], 1 << 44), ([5, None], 1 << 44)]
)
def test_as_many_processes_encode_as_there_can_be_shards(sizes: list[int | None], most: int) -> None:
    """The size of a dataset on the hub is unknown: any number of processes can have a shard."""
    assert most_shards_of(sizes) >= most
    assert most_shards_of(sizes) <= most + 1
