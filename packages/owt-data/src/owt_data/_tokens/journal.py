"""The working folder of a preparation: its name, its shard files, and their journal."""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from owt_data._errors import DataError, file_errors, show_name
from owt_data._json_types import UnknownFieldError, parse_json, parse_record, reject_format
from owt_data._paths import open_handle, open_regular
from owt_data._sources.documents import Cursor

_FORMAT = 1
_JOURNAL_NAME = "parts.jsonl"
# A huge file, which a power cut may leave, is not read whole. The record of a shard is shorter, even if each of its
# 16 MiB is a file.
_MOST_LINE_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalHeader:
    """First line of the journal."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    format: Literal[1]
    """Format of the journal and of the shards."""

    version: str
    """Version of owt-data that wrote the journal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """Journal entry of a finished shard file."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    num_bytes: int
    """Bytes of text."""

    num_tokens: int
    """Number of tokens."""

    num_documents: int
    """Number of documents that end in the shard, or with `wikitext-titles` begin in it."""

    sha256: str
    """Checksum of the file."""

    stop: Cursor
    """Start of the next shard."""

    files: list[tuple[int, int]] = field(default_factory=list, compare=False)
    """Numbers of the source's files whose documents are counted in the shard, and the number of these
    documents."""


def staging_path(out: Path) -> Path:
    """Return the working folder of a preparation into the folder `out`."""
    return out.with_name(f".{out.name}.partial")


def shard_folder(staging: Path, split: str) -> Path:
    """Return the folder of the shards of a split, or of `all` splits together."""
    return staging / f"parts-{split}"


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of a shard file."""
    return folder / f"{index:06d}.bin"


def checksum(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it is missing."""
    if not path.exists():
        return None
    with open(path, "rb", opener=open_handle) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JournalPlace(NamedTuple):
    """Place in a journal up to which it has been read."""

    num_records: int = 0
    """The records before the place."""

    num_bytes: int = 0
    """The bytes before the place."""

    line: bytes = b""
    """The line before the place."""


def read_journal(folder: Path) -> list[ShardRecord]:
    """Return the valid records at the start of the journal. A kill or a power cut damages the rest.

    Raises:
        DataError: another version wrote the journal, or its name is that of a pipe or a device.
    """
    return read_journal_after(folder, JournalPlace())[0]


def read_journal_after(folder: Path, place: JournalPlace) -> tuple[list[ShardRecord], JournalPlace]:
    """Return the valid records after a place, and the place after these records.

    If the line before the place is another one, the journal is another one, and all its records are returned. Hence
    the new place's `num_records` without the returned records is the number of earlier records that are still valid.

    Raises:
        DataError: as `read_journal`.
    """
    path = folder / _JOURNAL_NAME
    if not path.exists():
        return [], JournalPlace()
    with open_regular(path, "rb") as file:
        file.seek(place.num_bytes - len(place.line))
        if file.read(len(place.line)) != place.line:
            place = JournalPlace()
            file.seek(0)
        # A line without its break would run into the next one.
        lines = [*takewhile(lambda line: line.endswith(b"\n"), iter(lambda: file.readline(_MOST_LINE_BYTES), b""))]
    records, (num_records, num_bytes, last), writer = [], place, None
    try:
        for line in lines:
            if num_bytes:
                records.append(parse_json(ShardRecord, line))
            else:
                writer = parse_record(JournalHeader, line, path, number=_FORMAT).version
            num_bytes, last = num_bytes + len(line), line
    except UnknownFieldError as error:
        reject_format(path, _FORMAT, f"the unknown field {show_name(error)}", writer)
    except DataError:
        raise
    except ValueError:
        pass
    return records, JournalPlace(num_records + len(records), num_bytes, last)


def repair_journal(folder: Path) -> list[ShardRecord]:
    """Return the valid records at the start of the journal, and cut off the rest.

    Raises:
        DataError: as `read_journal`.
    """
    records, place = read_journal_after(folder, JournalPlace())
    if (folder / _JOURNAL_NAME).exists():
        os.truncate(folder / _JOURNAL_NAME, place.num_bytes)
    return records


def append_record(folder: Path, record: ShardRecord) -> None:
    """Append the record of a finished shard to the journal.

    Raises:
        DataError: the journal cannot be written.
    """
    path = folder / _JOURNAL_NAME
    # A full disk can fail the journal before any shard, and its error names no file.
    with file_errors("writable", path), open_regular(path, "a") as file:
        if not file.tell():
            file.write(json.dumps({"format": _FORMAT, "version": version("owt-data")}) + "\n")
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")
