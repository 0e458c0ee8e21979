"""Reading a source's documents in order, from any place in it, a bounded amount at a time."""

import codecs
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx
from numpy.typing import NDArray

from owt_data._errors import DataError, InterruptedWorkError
from owt_data._sources import BUILTIN, Source

_HUB_TIMEOUT_S = 10
_ROWS_PER_READ = 1024
_TEXT_BLOCK_BYTES = 1 << 20

# Between a character that is no white space and a blank, every pattern that gpt2 splits text with ends a match
# and begins the next: the tokens of both sides are those of the whole.
_CUT = re.compile(r"\S(?=[ \n])")
_CUT_SEARCH = 1 << 12


class Cursor(NamedTuple):
    """A place between two documents, or two pieces of one."""

    shard: int
    """Number of the file, or of the dataset's shard."""

    offset: int
    """Rows into it, or bytes into a text file."""


START = Cursor(0, 0)


class Chunk(NamedTuple):
    """Consecutive pieces of text."""

    texts: pa.Array
    """`large_string[N]`: documents, or pieces of a long text file."""

    ends: NDArray[np.bool_]
    """`[N]`, whether a document ends with the piece."""

    shard: int
    """Where they lie: `Cursor(shard, offsets[i])` is right after piece `i`."""

    offsets: NDArray[np.int64]
    """`[N]`, see `shard`."""


class Documents:
    """A source, opened. The hub's is pinned to a revision, so that a second reading sees the same.

    Args:
        source: what to read.
        text_column: the column with the text, in JSON lines, parquet and hub datasets.
        revision: of a hub dataset; by default the newest.

    Raises:
        DataError: the hub is out of reach, or has no such dataset.
    """

    def __init__(self, source: Source, *, text_column: str = "text", revision: str | None = None) -> None:
        self._source, self._text_column = source, text_column
        self.revision = revision
        self._hub = None
        if source.kind == "hub":
            self.revision, self._hub = _open_hub(source, revision)

    def num_bytes(self) -> int | None:
        """Bytes of text, roughly, where that can be known without reading it."""
        if self._hub is not None:
            return self._hub.info.dataset_size
        if self._source.kind == "parquet":
            return sum(_parquet_text_bytes(path, self._text_column) for path in self._source.files)
        return self._source.num_bytes

    def read(self, cursor: Cursor = START) -> Iterator[Chunk]:
        """Everything from a place on.

        Raises:
            DataError: a file is unreadable, or the text column is missing or holds something else.
        """
        if self._source.kind in (BUILTIN, "text"):
            yield from self._read_texts(cursor)
            return
        num_shards = len(self._source.files) if self._hub is None else self._hub.num_shards
        for shard in range(cursor.shard, num_shards):
            yield from self._read_rows(shard, cursor.offset if shard == cursor.shard else 0)

    def _read_texts(self, cursor: Cursor) -> Iterator[Chunk]:
        errors = "replace" if self._source.kind == BUILTIN else "strict"
        for shard in range(cursor.shard, len(self._source.files)):
            begin = cursor.offset if shard == cursor.shard else 0
            for text, offset in _read_pieces(self._source.files[shard], begin, errors):
                at = Cursor(shard + 1, 0) if offset is None else Cursor(shard, offset)
                texts, ends = pa.array([text], pa.large_string()), np.array([offset is None])
                yield Chunk(texts, ends, at.shard, np.array([at.offset]))

    def _read_rows(self, shard: int, skip: int) -> Iterator[Chunk]:
        name = self._source.name if self._hub is not None else os.fspath(self._source.files[shard])
        if self._hub is None and self._is_empty(name):
            return
        offset = 0
        try:
            rows = self._open_shard(shard)
            for table in rows.with_format("arrow").iter(_ROWS_PER_READ):
                first, offset = max(0, skip - offset), offset + len(table)
                if first >= len(table):
                    continue
                texts = self._texts(table, name, offset - len(table))[first:]
                yield Chunk(texts, np.ones(len(texts), bool), shard, np.arange(offset - len(texts), offset) + 1)
        except DataError:
            raise
        except (DatasetGenerationError, ValueError, EOFError, zlib.error) as error:
            raise self._unfit(name, error) from error
        except (httpx.HTTPError, OSError) as error:
            if self._hub is None and getattr(error, "errno", None) is None:
                raise self._unfit(name, error) from error  # what decompression finds wrong
            raise InterruptedWorkError(
                f"{name} could not be read: {error}: the same command again goes on from there"
            ) from error

    def _is_empty(self, name: str) -> bool:
        """Whether a file has no rows, which datasets stumbles over."""
        if os.path.getsize(name) == 0:
            return True
        return self._source.kind == "parquet" and _parquet_metadata(Path(name)).num_rows == 0

    def _unfit(self, name: str, error: Exception) -> DataError:
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        return DataError(f"expected {self._source.kind} rows in {name}, but {reason}: mend the file or leave it out")

    def _open_shard(self, shard: int) -> datasets.IterableDataset:
        if self._hub is not None:
            return self._hub.shard(self._hub.num_shards, shard)
        # Each file by itself: files may differ in the columns that do not matter here. And not by load_dataset,
        # which tells the hub of each.
        file = os.fspath(self._source.files[shard])
        if self._source.kind == "json":
            return datasets.IterableDataset.from_json([file])
        self._check_column(pyarrow.parquet.read_schema(file).names, file)
        return datasets.IterableDataset.from_parquet([file], columns=[self._text_column])

    def _check_column(self, columns: list[str], name: str) -> None:
        if self._text_column not in columns:
            raise DataError(
                f"expected a text column {self._text_column!r} in {name}, found {columns}: "
                "name the right one with --text-column"
            )

    def _texts(self, table: pa.Table, name: str, before: int) -> pa.Array:
        self._check_column(table.column_names, name)
        texts = table[self._text_column]
        if texts.null_count:
            row = before + texts.is_null().index(True).as_py()
            raise DataError(
                f"expected text in every row of {name}, found a row without, number {row} from 0: remove the rows that "
                "are null"
            )
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise DataError(
                f"expected text in the column {self._text_column!r} of {name}, found {_type_name(texts.type)}: name "
                "another column, or make it text in every row"
            )
        whole = texts.cast(pa.large_string()).combine_chunks()
        whole.validate(full=True)  # that it is UTF-8, which a file may claim wrongly
        return whole


def _type_name(dtype: pa.DataType) -> str:
    # What datasets makes of rows that differ in type.
    return "values of several types" if str(dtype).startswith("extension<arrow.json") else str(dtype)


def _read_pieces(path: Path, begin: int, errors: str) -> Iterator[tuple[str, int | None]]:
    """A text file in pieces of some megabytes, each with the byte after it, or None after the last."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    held, offset = "", begin
    with path.open("rb") as file:
        file.seek(begin)
        while block := file.read(_TEXT_BLOCK_BYTES):
            held += _decode(decoder, block, path, file.tell())
            # With errors replaced, bytes cannot be counted back from characters: such files are read whole.
            cut = _last_cut(held) if errors == "strict" else 0
            if cut:
                offset += len(held[:cut].encode())
                yield held[:cut], offset
                held = held[cut:]
        held += _decode(decoder, b"", path, file.tell(), final=True)
    yield held, None


def _last_cut(text: str) -> int:
    """Where the last cut of a text may be; 0 for nowhere."""
    near_the_end = max(0, len(text) - _CUT_SEARCH)
    for begin in (near_the_end, 0):
        cut = max((match.end() for match in _CUT.finditer(text, begin)), default=0)
        if cut:
            return cut
    return 0


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, end: int, *, final: bool = False) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        position = end - len(error.object) + error.start
        raise DataError(
            f"expected UTF-8 text in {path}, found another byte at {position}: convert it, for instance with iconv"
        ) from error


def _parquet_metadata(path: Path) -> pyarrow.parquet.FileMetaData:
    try:
        return pyarrow.parquet.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"expected parquet rows in {path}, but {error}: mend the file or leave it out") from error


def _parquet_text_bytes(path: Path, text_column: str) -> int:
    metadata = _parquet_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_column)


def _open_hub(source: Source, revision: str | None) -> tuple[str | None, Any]:
    repository, configuration, split = source.hub_address
    try:
        if HF_HUB_OFFLINE:
            copy = datasets.load_dataset(repository, configuration, split=split)
            return None, copy.to_iterable_dataset(num_shards=min(64, max(1, len(copy))))
        # One question first: load_dataset repeats its own for half a minute where there is no network.
        revision = HfApi().dataset_info(repository, revision=revision, timeout=_HUB_TIMEOUT_S).sha
        rows = datasets.load_dataset(repository, configuration, split=split, streaming=True, revision=revision)
        return revision, rows
    except (DatasetNotFoundError, HFValidationError, httpx.HTTPError, OSError, ValueError) as error:
        raise DataError(
            f"{source.name!r} is no file here, and as a dataset of the Hugging Face hub it could not be loaded "
            f"({type(error).__name__}: {_first_line(error)}): check the name and the network, or set HF_HUB_OFFLINE=1 "
            "to use a copy downloaded before"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
