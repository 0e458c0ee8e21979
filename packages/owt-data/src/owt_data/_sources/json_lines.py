"""JSON lines, read for the text column only. Other fields may be missing or hold any JSON in any row."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from owt_data._errors import (
    RejectedDocumentsError,
    check_column,
    column_type_error,
    encoding_error,
    file_errors,
    format_error,
    surrogate_error,
)

_BLOCK_BYTES = 4 << 20
_MAX_ARROW_BYTES = (1 << 31) - 1  # Arrow holds the length of a block in a C int

_SPACE = re.compile(r"[ \t\r\n]*")
_BOM = b"\xef\xbb\xbf"

# `int` rejects numbers of more than 4300 digits. Numbers are not used, so `float` serves.
_DECODER = json.JSONDecoder(parse_int=float)
_NAMES: dict[type, str] = {
    str: "a string",
    float: "a number",
    bool: "a boolean",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def read_json_texts(path: Path, column: str) -> Iterator[pa.Array]:
    """Yield the texts of a JSON lines file in order, in arrays `large_string[N]` of a few megabytes.

    A file with a single JSON array is also accepted and read as one block. Its items are objects or texts.

    Args:
        path: the file, compressed if its name ends with `.gz`.
        column: the field with the text.

    Raises:
        RejectedDocumentsError: the file is not JSON, or a row has no text.
        DataError: the file cannot be read.
    """
    with file_errors("readable", path):
        rows = _Rows(path, column)
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                yield from rows.read(file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise rows.format_error(str(error)) from error


class _Rows:
    """Rows of one file, with a count of rows and lines for errors."""

    def __init__(self, path: Path, column: str) -> None:
        self._path = path
        self._column = column
        self._num_rows = 0
        self._num_lines = 0
        schema = pa.schema([(column, pa.large_string())])
        self._options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def read(self, file: io.BufferedIOBase) -> Iterator[pa.Array]:
        block = file.read(len(_BOM)).removeprefix(_BOM) + file.read(_BLOCK_BYTES)
        array = block.lstrip().startswith(b"[")
        while block:
            block += file.read() if array else file.readline()
            following = file.read(_BLOCK_BYTES)
            texts = None if array else self._parse(block)
            held = b""
            if texts is None:
                texts, held = self._decode(block, array=array, last=not following)
            self._num_rows += len(texts)
            self._num_lines += block.count(b"\n") - held.count(b"\n")
            if len(texts):
                yield texts
            block = held + following

    def format_error(self, reason: str) -> RejectedDocumentsError:
        """Return the error for text that is not JSON lines."""
        return format_error(self._path, "JSON lines, one object in each", reason)

    def _parse(self, block: bytes) -> pa.Array | None:
        """Return the texts of a block by Arrow, which is fast; None if Arrow fails or finds a row without text."""
        # Arrow 26 crashes at a row `null` before the first object.
        if len(block) > _MAX_ARROW_BYTES or not block.lstrip().startswith(b"{"):
            return None
        read_options = pyarrow.json.ReadOptions(block_size=len(block), use_threads=False)
        try:
            table = pyarrow.json.read_json(io.BytesIO(block), read_options=read_options, parse_options=self._options)
            texts = table[self._column].combine_chunks()
            texts.validate(full=True)  # checks UTF-8
        except pa.ArrowInvalid:
            return None
        return None if texts.null_count else texts

    def _decode(self, block: bytes, *, array: bool, last: bool) -> tuple[pa.Array, bytes]:
        """Return the texts of a block, row by row, and the start of an object that ends in a later block.

        Raises:
            RejectedDocumentsError: a row is not JSON, or has no text.
        """
        # Other fields may hold bytes that are not UTF-8.
        decoded = block.decode("utf-8", "surrogateescape")
        texts: list[str] = []
        line = self._num_lines + 1
        end = len(decoded.rstrip())
        before, position = 0, _skip_space(decoded, 0)
        while position < end:
            line, before = line + decoded.count("\n", before, position), position
            try:
                row, after = _DECODER.raw_decode(decoded, position)
            except json.JSONDecodeError as error:
                if not last and error.pos >= end - 1:
                    return pa.array(texts, pa.large_string()), decoded[position:].encode("utf-8", "surrogateescape")
                # The parser reports the character after the error, which may be several lines below.
                noticed = position + len(decoded[position : error.pos].rstrip())
                last_line = line + decoded.count("\n", position, noticed)
                row = "" if array or last_line == line else f" of the row that begins in line {line}"
                raise self.format_error(f"{error.msg.removesuffix(' at')} in line {last_line}{row}") from error
            except RecursionError as error:
                raise self.format_error(f"the row in line {line} is nested too deeply") from error
            if array and isinstance(row, list) and not texts and not decoded[after:].strip():
                for number, item in enumerate(row):
                    text = {self._column: item} if isinstance(item, str) else item
                    texts.append(self._text(text, f"item {number}", first=number == 0))
            else:
                texts.append(self._text(row, f"line {line}", first=self._num_rows + len(texts) == 0))
            position = _skip_space(decoded, after)
        return pa.array(texts, pa.large_string()), b""

    def _text(self, row: Any, place: str, *, first: bool) -> str:
        """Return the text of a row, given its place in the file and whether it is the first row."""
        if not isinstance(row, dict):
            raise self.format_error(f"{_NAMES[type(row)]} in {place}")
        if first:
            check_column(self._column, list(row), self._path)
        text = row.get(self._column)
        if not isinstance(text, str):
            found = "none" if text is None else _NAMES[type(text)]
            raise column_type_error(self._column, f"{found} in {place}", self._path)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            if not "\udc80" <= half <= "\udcff":  # else it may stand for a byte
                raise surrogate_error(self._path, half, place) from error
            raise encoding_error(self._path, f"or half a surrogate pair in {place}") from error
        return text


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
