"""`train.docs` and `val.docs`: the documents of a token file, and the row of a source that each one comes from.

An index is a parquet file beside its token file, with one row for each document in the order of the tokens: `end`, one
past its last token; `file` and `row`, its place in the source, null if unknown. It holds the SHA-256 of its token file,
so that the index of a replaced file is not used. It is read by groups of rows.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow.fs import FileType

from owt_data._complete_files import write_file
from owt_data._errors import DataError, UnreadableError, one_line, show_name
from owt_data._json_types import parse_record
from owt_data._paths import connect, look_up, read_blocks
from owt_data._tokens.layout import Layout

_log = logging.getLogger("owt_data")

_FORMAT = 1
_KEY = b"owt_data"
_SUFFIX = ".docs"
_GROUP_DOCUMENTS = 1 << 16
_CACHED_GROUPS = 64
_SCHEMA = pa.schema(
    [("end", pa.uint64()), ("file", pa.dictionary(pa.int32(), pa.large_string())), ("row", pa.uint64())]
)

Place = tuple[str | None, int | None]
"""A file of the source and a row in it, from 0; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """Record of an index about itself and its token file."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    format: Literal[1]
    version: str
    num_tokens: int
    sha256: str


class DocumentEnds:
    """Ends of consecutive documents, one past the last token of each, in chunks that are loaded when they are needed.

    Args:
        bounds: an end of each chunk in tokens, ascending, `int64[C]`. Its ends and those before are at most this one,
            and those after it are not smaller.
        counts: number of ends in each chunk, `int64[C]`.
        load: returns the ends of a chunk, ascending `int64[N]`.
        num_tokens: number of all tokens. A last document may have no end of its own.
    """

    def __init__(
        self,
        bounds: NDArray[np.int64],
        counts: NDArray[np.int64],
        load: Callable[[int], NDArray[np.int64]],
        num_tokens: int,
    ) -> None:
        self._bounds = bounds
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._load: Callable[[int], NDArray[np.int64]] = functools.lru_cache(_CACHED_GROUPS)(load)
        self._num_tokens = num_tokens

    def find(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the document of each token, `int64[N]`."""
        chunks = np.searchsorted(self._bounds, positions, side="right")
        numbers = self._firsts[chunks]
        for chunk in sorted(set(chunks[chunks < len(self._bounds)].tolist())):
            here = chunks == chunk
            numbers[here] += np.searchsorted(self._load(chunk), positions[here], side="right")
        return numbers

    def ends(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ends of documents, `int64[N]`. That of the document -1 is 0."""
        ends = np.where(numbers < 0, 0, self._num_tokens)
        chunks = np.searchsorted(self._firsts, numbers, side="right") - 1
        chunks[(numbers < 0) | (numbers >= self._firsts[-1])] = -1
        for chunk in sorted(set(chunks.tolist()) - {-1}):
            here = chunks == chunk
            ends[here] = self._load(chunk)[numbers[here] - self._firsts[chunk]]
        return ends


@dataclass(frozen=True, slots=True)
class FileDocuments:
    """The documents of a token file, by their numbers in it."""

    ends: DocumentEnds
    """Their ends."""

    places: Callable[[NDArray[np.int64]], list[Place]]
    """Returns the places of documents in the source."""


def ends_of_marks(marks: NDArray[np.int64], num_tokens: int, *, begins: bool, continues: bool) -> NDArray[np.int64]:
    """Return the ends of the documents of a token file, `int64[N]`. The last one is `num_tokens`.

    Args:
        marks: positions of the end-of-text tokens, ascending, `int64[M]`.
        num_tokens: number of tokens.
        begins: whether the token begins a document. Text before the first one belongs to the first document.
        continues: whether the file may begin inside a document; with `begins`, text before the first token is then a
            document.
    """
    if begins:
        is_first = len(marks) > 0 and (not continues or int(marks[0]) == 0)
        ends = marks[1:] if is_first else marks
    else:
        ends = marks + 1
    return np.append(ends, num_tokens) if num_tokens and (not len(ends) or ends[-1] < num_tokens) else ends


def find_marks(
    path: str, layout: Layout, end_of_text: int, advance: Callable[[int], None]
) -> tuple[NDArray[np.int64], int, str]:
    """Return the positions of the end-of-text tokens of a file, `int64[N]`, and the number and SHA-256 of its tokens.

    The file is read once.

    Args:
        path: the token file.
        layout: its layout.
        end_of_text: the token.
        advance: called with the number of tokens of each block.

    Raises:
        DataError: the file cannot be read.
    """
    marks, start, digest = [np.empty(0, np.int64)], 0, hashlib.sha256()
    for block in read_blocks(path, layout.offset):
        digest.update(block)
        tokens = np.frombuffer(block, dtype=layout.dtype)
        marks.append(np.flatnonzero(tokens == end_of_text) + start)
        start += len(tokens)
        advance(len(tokens))
    return np.concatenate(marks), start, digest.hexdigest()


def index_name(path: str) -> str:
    """Return the name of the index of a token file."""
    place, mark, query = path.partition("?")
    return f"{place.removesuffix('.bin')}{_SUFFIX}{mark}{query}"


def write_index(
    path: Path,
    ends: NDArray[np.int64],
    places: tuple[Sequence[str], NDArray[np.int64], NDArray[np.int64]] | None,
    *,
    sha256: str,
    durable: bool = False,
) -> None:
    """Write the index of a token file.

    Args:
        path: the index.
        ends: see `ends_of_marks`.
        places: names of the files of the source, and the number of the file and the row of each document, `int64[N]`
            each; None if the source is not known.
        sha256: SHA-256 of the token file.
        durable: whether to wait until the index is on disk.

    Raises:
        OSError: the index cannot be written.
    """
    num_tokens = int(ends[-1]) if len(ends) else 0
    header = _Header(format=_FORMAT, version=version("owt-data"), num_tokens=num_tokens, sha256=sha256)
    schema = _SCHEMA.with_metadata({_KEY: json.dumps(asdict(header)).encode()})
    names, files, rows = places if places is not None else ([], None, None)
    dictionary = pa.array(names, pa.large_string())
    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {
        "use_dictionary": ["file"],
        "column_encoding": {"end": "DELTA_BINARY_PACKED", "row": "DELTA_BINARY_PACKED"},
        "write_page_checksum": True,
    }
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for begin in range(0, len(ends), _GROUP_DOCUMENTS):
            part = slice(begin, begin + _GROUP_DOCUMENTS)
            nothing = [None] * len(ends[part])
            numbers = pa.array(nothing if files is None else files[part], pa.int32())
            columns = [
                pa.array(ends[part], pa.uint64()),
                pa.DictionaryArray.from_arrays(numbers, dictionary),
                pa.array(nothing if rows is None else rows[part], pa.uint64()),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=_GROUP_DOCUMENTS)
    write_file(path, memoryview(sink.getvalue()), durable=durable)


class DocumentIndex:
    """Opened index of a token file.

    Args:
        name: the index, a path or a URI.

    Raises:
        ValueError: it is damaged, or of another version.
        OSError: it cannot be read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        filesystem, path = connect(name)
        self._file = pq.ParquetFile(filesystem.open_input_file(path), page_checksum_verification=True)
        header = parse_record(_Header, (self._file.schema_arrow.metadata or {}).get(_KEY, b""), name, number=_FORMAT)
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        bounds = np.array([group.column(0).statistics.max for group in groups], np.int64)
        counts = np.array([group.num_rows for group in groups], np.int64)
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._read_places: Callable[[int], pa.Table] = functools.lru_cache(_CACHED_GROUPS)(
            lambda group: self._read(group, ["file", "row"])
        )
        self.sha256 = header.sha256
        """SHA-256 of the token file."""
        self.documents = FileDocuments(DocumentEnds(bounds, counts, self._load_ends, header.num_tokens), self._places)
        """The documents. Their ends and places raise a `DataError` if the index is damaged."""

    def check(self, num_tokens: int) -> str | None:
        """Read the index of a file of so many tokens, and return a sentence about its damage, if any."""
        try:
            last = 0
            for group in range(self._file.num_row_groups):
                ends = self._load_ends(group)
                if int(ends[0]) <= last or (np.diff(ends) <= 0).any():
                    return "expected ascending ends"
                last = int(ends[-1])
                self._read(group, ["file", "row"])
        except DataError as error:
            return str(error)
        return None if last == num_tokens else f"expected a last end {num_tokens}, found {last}"

    def _places(self, numbers: NDArray[np.int64]) -> list[Place]:
        groups = np.searchsorted(self._firsts, numbers, side="right") - 1
        found: list[Place] = []
        for group, number in zip(groups.tolist(), (numbers - self._firsts[groups]).tolist(), strict=True):
            table = self._read_places(group)
            found.append((table["file"][number].as_py(), table["row"][number].as_py()))
        return found

    def _load_ends(self, group: int) -> NDArray[np.int64]:
        return self._read(group, ["end"])["end"].to_numpy().astype(np.int64)

    def _read(self, group: int, columns: list[str]) -> pa.Table:
        try:
            return self._file.read_row_group(group, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableError(
                f"{show_name(self._name)} is damaged: {one_line(error)}. Delete it: it is made again from the tokens."
            ) from error


def open_index(path: str, sha256: str) -> DocumentIndex | None:
    """Open the index of a token file. Return None if it has none, or that of other tokens, or a damaged one.

    Args:
        path: the token file.
        sha256: its SHA-256.

    Raises:
        DataError: the storage cannot be reached.
    """
    name = index_name(path)
    if look_up(name).type is not FileType.File:
        return None
    try:
        index = DocumentIndex(name)
    except (pa.ArrowException, ValueError, OSError, AttributeError) as error:
        _log.warning("%s is not used: %s", show_name(name), one_line(error))
        return None
    return index if index.sha256 == sha256 else None
