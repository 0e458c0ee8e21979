"""Documents of a source, read in order from any position, in chunks of bounded size."""

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from owt_data._errors import (
    DataError,
    check_column,
    check_integer,
    column_type_error,
    encoding_error,
    file_errors,
    format_error,
    one_line,
    show,
)
from owt_data._sources.json_lines import read_json_texts
from owt_data._sources.rows import StartsDocument, every_row, read_lines
from owt_data._sources.source import BUILTIN, HUB, HubLayout, Source, find_source

_ROWS_PER_READ = 1024
_TEXT_BLOCK_BYTES = 1 << 20

# The split pattern of gpt2 always ends a match between a non-space character and a blank. A text that is cut at this
# position keeps its tokens.
_CUT = re.compile(r"\S(?=[ \n])")
_PIECE_CHARS = 1 << 12


class Cursor(NamedTuple):
    """Position between two documents, or between two pieces of a document."""

    file: int
    """Index of the file, or of the hub dataset's shard."""

    offset: int
    """Number of rows before the position, or of bytes in a text file."""


START = Cursor(0, 0)


class Chunk(NamedTuple):
    """Consecutive pieces of text from one file."""

    texts: pa.Array
    """Documents, pieces of a long text file, or rows of a document, `large_string[N]`."""

    starts: NDArray[np.bool_]
    """True for a piece that an end-of-text token precedes, `[N]`."""

    ends: NDArray[np.bool_]
    """True for a piece that an end-of-text token follows, `[N]`."""

    file: int
    """Index of the file. `Cursor(file, offsets[i])` is the position right after piece `i`."""

    offsets: NDArray[np.int64]
    """Offsets in the file, `[N]`; see `file`."""

    def slice(self, start: int, stop: int) -> "Chunk":
        """Return the pieces `[start, stop)`."""
        part = slice(start, stop)
        return Chunk(self.texts[part], self.starts[part], self.ends[part], self.file, self.offsets[part])


class Documents:
    """Reader of the documents of a source, in order. A hub dataset is pinned to one revision: its rows never change.

    Args:
        source: the source.
        text_column: the column with the text, in JSON lines, parquet files and hub datasets.
        revision: the commit of a hub dataset, by default the newest.
        starts_document: predicate for rows that begin a document; each line of a text file is then a row. Default:
            each row is a document, and a text file is one row.
        row_end: text to append to each row.
        limit_rows: number of rows to read, by default all.

    Raises:
        DataError: the hub cannot be reached, or does not have the dataset.
    """

    def __init__(
        self,
        source: Source,
        *,
        text_column: str = "text",
        revision: str | None = None,
        starts_document: StartsDocument | None = None,
        row_end: str = "",
        limit_rows: int | None = None,
    ) -> None:
        self._source = source
        self._text_column = text_column
        self._starts_document = starts_document
        self._row_end = row_end
        self._limit_rows = limit_rows
        self._hub = None
        if source.kind == HUB:
            # The import of `datasets` takes more than a second, which files must not wait for.
            try:
                from owt_data._sources.hub import HubRows
            except ValueError as error:  # a variable such as HF_HUB_DOWNLOAD_TIMEOUT is no number
                raise DataError(
                    f"The variables HF_... must be values that the library `datasets` accepts, got {one_line(error)}. "
                    "Unset them."
                ) from error

            self._hub = HubRows(source, revision)

    @property
    def layout(self) -> HubLayout | None:
        """Order of a hub dataset's rows, which must not change before a resume; None for files."""
        return None if self._hub is None else self._hub.layout

    def num_bytes(self) -> int | None:
        """Return the approximate bytes of text; None if only reading would tell."""
        if self._limit_rows is not None:
            return None
        if self._hub is not None:
            return self._hub.num_bytes
        if self._source.kind == "parquet":
            return sum(_parquet_text_bytes(path, self._text_column) for path in self._source.files)
        return self._source.num_bytes

    def read(self, cursor: Cursor = START) -> Iterator[Chunk]:
        """Yield all chunks from a position on.

        Raises:
            RejectedDocumentsError: a file is damaged, or the text column is missing or does not hold text.
            DataError: a file or the hub cannot be read.
        """
        if self._source.kind in (BUILTIN, "text") and self._starts_document is None:
            yield from self._read_texts(cursor)
        elif self._limit_rows is None:
            yield from self._read_rows(cursor)
        else:
            # A cursor does not tell the number of rows before it, so they are counted.
            yield from _limit(self._read_rows(START), self._limit_rows, cursor)

    def _read_texts(self, cursor: Cursor) -> Iterator[Chunk]:
        errors = "replace" if self._source.kind == BUILTIN else "strict"
        for file, path in enumerate(self._source.files[: self._limit_rows]):
            if file < cursor.file:
                continue
            begin = cursor.offset if file == cursor.file else 0
            for texts, offsets, is_last in _read_pieces(path, begin, errors):
                if is_last:
                    texts = [texts[0] + self._row_end]
                neither = np.zeros(len(texts), bool)
                pieces = pa.array(texts, pa.large_string())
                yield Chunk(pieces, neither, neither | is_last, file + is_last, np.array(offsets))

    def _read_rows(self, cursor: Cursor) -> Iterator[Chunk]:
        num_files = len(self._source.files) if self._hub is None else self._hub.layout.num_shards
        read = self._read_lines if self._source.kind in (BUILTIN, "text") else self._read_table
        for file in range(cursor.file, num_files):
            for texts, offsets in read(file, cursor.offset if file == cursor.file else 0):
                yield self._rows(texts, file, offsets)

    def _rows(self, texts: pa.Array, file: int, offsets: NDArray[np.int64]) -> Chunk:
        """Return rows as a chunk."""
        if self._starts_document is None:
            starts, ends = np.zeros(len(texts), bool), np.ones(len(texts), bool)
        else:
            starts = np.array([self._starts_document(row) for row in texts.to_pylist()], bool)
            ends = np.zeros(len(texts), bool)
        if self._row_end:
            end = pa.scalar(self._row_end, pa.large_string())
            separator = pa.scalar("", pa.large_string())
            texts = pc.call_function("binary_join_element_wise", [texts, end, separator])
        return Chunk(texts, starts, ends, file, offsets)

    def _read_lines(self, file: int, begin: int) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
        """Yield the lines of a text file from an offset on, and the offset after each line."""
        errors = "replace" if self._source.kind == BUILTIN else "strict"
        for rows, offsets in read_lines(self._source.files[file], begin, errors):
            yield pa.array(rows, pa.large_string()), np.array(offsets)

    def _read_table(self, file: int, skip: int) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
        """Yield the rows of a file without the first ones, and the number of rows up to each row."""
        offset = 0
        for texts in self._texts_of(file):
            first, offset = max(0, skip - offset), offset + len(texts)
            if first < len(texts):
                rest = texts[first:]
                yield rest, np.arange(offset - len(rest), offset) + 1

    def _texts_of(self, file: int) -> Iterator[pa.Array]:
        """Yield the texts of all rows of a file, as arrays `large_string[N]`."""
        column = self._text_column
        if self._hub is not None:
            num_rows = 0
            for table in self._hub.read(file):
                yield _check_texts(table, column, self._source.name, num_rows)
                num_rows += len(table)
        elif self._source.kind == "json":
            yield from read_json_texts(self._source.files[file], column)
        else:
            yield from _read_parquet_texts(self._source.files[file], column)


def first_rows(name: str, num_rows: int, *, text_column: str = "text") -> list[str]:
    """Return the first rows of a source. Each line of a text file is a row.

    Raises:
        DataError: the source cannot be read, or `num_rows` is not positive.
    """
    num_rows = check_integer("rows", num_rows, least=1)
    documents = Documents(find_source(name), text_column=text_column, starts_document=every_row, limit_rows=num_rows)
    return [row for chunk in documents.read() for row in chunk.texts.to_pylist()]


def _limit(chunks: Iterator[Chunk], num_rows: int, cursor: Cursor) -> Iterator[Chunk]:
    """Yield the first rows of all chunks, without those before a position."""
    for chunk in chunks:
        stop = min(num_rows, len(chunk.offsets))
        past = [Cursor(chunk.file, offset) > cursor for offset in chunk.offsets[:stop].tolist()]
        if any(past):
            yield chunk.slice(past.index(True), stop)
        num_rows -= stop
        if num_rows == 0:
            return


def _check_texts(table: pa.Table, column: str, name: str, before: int) -> pa.Array:
    """Return the text column of a table, `before` rows into a file, as `large_string[N]`."""
    check_column(column, table.column_names, name)
    texts = table[column]
    if pa.types.is_dictionary(texts.type):
        texts = texts.cast(texts.type.value_type)
    found = None if texts.type in (pa.string(), pa.large_string(), pa.string_view()) else _type_name(texts.type)
    if texts.null_count:
        found = f"none in row {before + texts.is_null().index(True).as_py()}"
    if found is not None:
        raise column_type_error(column, found, name)
    combined = texts.cast(pa.large_string()).combine_chunks()
    try:
        combined.validate(full=True)  # checks UTF-8, which a file may declare wrongly
    except pa.ArrowInvalid as error:
        raise encoding_error(name, f"in the column {show(column)} ({one_line(error)})") from error
    return combined


def _type_name(dtype: pa.DataType) -> str:
    # datasets stores rows of several types as JSON.
    return "values of several types" if str(dtype).startswith("extension<arrow.json") else str(dtype)


def _read_parquet_texts(path: Path, column: str) -> Iterator[pa.Array]:
    with _parquet_errors(path), pyarrow.parquet.ParquetFile(path) as file:
        check_column(column, file.schema_arrow.names, path)
        num_rows = 0
        for batch in file.iter_batches(_ROWS_PER_READ, columns=[column]):
            yield _check_texts(pa.table(batch), column, str(path), num_rows)
            num_rows += len(batch)


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Distinguish a damaged file from a file that cannot be read now."""
    with file_errors("readable", path):
        try:
            yield
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            # Decompression raises an OSError without a number for damaged data.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise format_error(path, "parquet rows", error) from error


def _read_pieces(path: Path, begin: int, errors: str) -> Iterator[tuple[list[str], list[int], bool]]:
    """Yield a text file in groups of pieces. Where a piece ends depends only on the text from its start on.

    A piece has at least `_PIECE_CHARS` characters, and ends at the first position after them where the tokens do.

    Args:
        path: the file.
        begin: offset of the first piece, in bytes.
        errors: how to decode bytes that are not UTF-8, `strict` or `replace`.

    Yields:
        The pieces, the offset in bytes after each piece, and False. At last the rest of the file, 0 and True.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    parts, offset = [""], begin
    with file_errors("readable", path), path.open("rb") as file:
        file.seek(begin)
        while block := file.read(_TEXT_BLOCK_BYTES):
            last, new = parts[-1][-1:], _decode(decoder, block, path, file.tell())
            if new:
                parts.append(new)
            # Replaced characters hide the number of bytes. A text that no blank cuts is joined once, not at each block.
            if errors == "replace" or not _CUT.search(last + new):
                continue
            held = "".join(parts)
            texts, offsets, start = [], [], 0
            while cut := _CUT.search(held, start + _PIECE_CHARS - 1):
                texts.append(held[start : cut.end()])
                start = cut.end()
                offset += len(texts[-1].encode())
                offsets.append(offset)
            if texts:
                yield texts, offsets, False
            parts = [held[start:]]
        parts.append(_decode(decoder, b"", path, file.tell(), final=True))
    yield ["".join(parts)], [0], True


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, end: int, *, final: bool = False) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        position = end - len(error.object) + error.start
        raise encoding_error(path, f"at byte {position}") from error


def _parquet_text_bytes(path: Path, text_column: str) -> int:
    with _parquet_errors(path):
        metadata = pyarrow.parquet.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_column)
