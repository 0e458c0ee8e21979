"""The journal of finished shards, after damage."""

from pathlib import Path

import pytest

from owt_data._sources.documents import Cursor
from owt_data._tokens.journal import ShardRecord, append_record, read_journal, repair_journal

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
