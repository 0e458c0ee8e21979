"""The journal of finished shards, after damage."""

import dataclasses
from pathlib import Path

import pytest

from owt_data._json_types import parse_json
from owt_data._sources.documents import Cursor
from owt_data._tokens.journal import (
    JournalPlace,
    ShardRecord,
    append_record,
    read_journal,
    read_journal_after,
    repair_journal,
)

NAME = "parts.jsonl"


def records(*numbers: int) -> list[ShardRecord]:
    return [
        ShardRecord(
            num_documents=number,
            num_tokens=10 * number,
            num_bytes=100 * number,
            sha256=64 * "a",
            stop=Cursor(number, 0),
        )
        for number in numbers
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: b"\0" * (len(line) - 1) + b"\n",  # a block that never reached the disk
        lambda line: b"\0" * len(line),
        lambda line: line[:-20],
        lambda line: b"{}\n",
        lambda line: b"",
    ],
    ids=["zeros with a line break", "zeros", "cut", "another object", "missing"],
)
def test_records_after_a_damaged_line_are_written_again(damage, tmp_path: Path):
    first, second, third, new = records(1, 2, 3, 4)
    for record in (first, second, third):
        append_record(tmp_path, record)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join([*lines[:2], damage(lines[2])]))
    assert read_journal(tmp_path) == [first]
    assert repair_journal(tmp_path) == [first]
    append_record(tmp_path, new)
    assert read_journal(tmp_path) == [first, new]


@pytest.mark.parametrize("number", [0, 1], ids=["header", "first record"])
def test_records_after_damage_at_the_begin_are_written_again(number, tmp_path: Path):
    first, second, new = records(1, 2, 3)
    for record in (first, second):
        append_record(tmp_path, record)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    lines[number] = b"\0" * (len(lines[number]) - 1) + b"\n"
    (tmp_path / NAME).write_bytes(b"".join(lines))
    assert repair_journal(tmp_path) == []
    append_record(tmp_path, new)
    assert read_journal(tmp_path) == [new]


def test_only_new_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse(declared: type[ShardRecord], line: bytes) -> ShardRecord:
        parsed.append(line)
        return parse_json(declared, line)

    monkeypatch.setattr("owt_data._tokens.journal.parse_json", parse)
    place = JournalPlace()
    assert read_journal_after(tmp_path, place) == ([], place)
    for numbers in ((1,), (), (2, 3), (4,)):
        for record in records(*numbers):
            append_record(tmp_path, record)
        parsed.clear()
        found, place = read_journal_after(tmp_path, place)
        assert found == records(*numbers)
        assert len(parsed) == len(numbers)
    assert place.num_records == 4
    assert place.num_bytes == (tmp_path / NAME).stat().st_size


def test_the_record_of_a_shard_of_very_many_files_is_read(tmp_path: Path) -> None:
    first, second = records(1, 2)
    append_record(tmp_path, dataclasses.replace(first, files=[(number, 1) for number in range(100_000)]))
    append_record(tmp_path, second)
    assert (tmp_path / NAME).stat().st_size > 1 << 20
    assert repair_journal(tmp_path) == [first, second]
    assert len(read_journal(tmp_path)[0].files) == 100_000


def test_a_line_that_is_not_complete_is_read_later(tmp_path: Path) -> None:
    for record in records(1, 2):
        append_record(tmp_path, record)
    complete = (tmp_path / NAME).read_bytes()
    for num_bytes in range(len(complete)):
        (tmp_path / NAME).write_bytes(complete[:num_bytes])
        found, place = read_journal_after(tmp_path, JournalPlace())
        (tmp_path / NAME).write_bytes(complete)
        rest, last = read_journal_after(tmp_path, place)
        assert found + rest == records(1, 2)
        assert last.num_records == 2


@pytest.mark.parametrize("numbers", [(), (1,), (1, 4), (4, 2), (4, 5, 6)])
def test_another_journal_is_read_from_its_start(numbers: tuple[int, ...], tmp_path: Path) -> None:
    for record in records(1, 2):
        append_record(tmp_path, record)
    _, place = read_journal_after(tmp_path, JournalPlace())
    (tmp_path / NAME).unlink()
    for record in records(*numbers):
        append_record(tmp_path, record)
    found, new = read_journal_after(tmp_path, place)
    if numbers == (4, 2):  # its second line is that of the first journal, which no other text gives
        assert (found, new) == ([], place)
    else:
        assert (found, new.num_records) == (records(*numbers), len(numbers))
