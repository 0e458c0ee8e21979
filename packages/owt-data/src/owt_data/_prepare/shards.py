"""Documents cut into shards, which an encoder tokenizes in parallel, from the last finished shard on."""

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from owt_data._errors import DataError, show_name
from owt_data._sources.documents import START, Chunk, Cursor, Documents
from owt_data._tokens.journal import ShardRecord, append_record, checksum, repair_journal, shard_path

_log = logging.getLogger("owt_data")

# Bytes of text in a shard: small enough to keep all processes busy, large enough for a short journal.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1 << 18, 1 << 24
_POLL_S = 0.05
SCHEMA = pa.schema([("text", pa.large_string()), ("starts", pa.bool_()), ("ends", pa.bool_())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Text that one task tokenizes. Shards depend only on the source and on their size."""

    index: int
    """Number of the shard, from 0."""

    path: Path
    """The file for the tokens."""

    batch: pa.RecordBatch | None
    """The pieces of text, see `SCHEMA`; None once they are submitted."""

    num_bytes: int
    """Bytes of text."""

    stop: Cursor
    """Start of the next shard."""

    files: list[tuple[int, int]]
    """See `ShardRecord.files`."""


Result = Future[dict[str, Any]]
"""Future result of `encode_shard`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Parallel encoder of shards."""

    submit: Callable[[Shard], Result]
    """Start to encode a shard."""

    num_workers: int
    """Number of shards that are encoded in parallel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Consumer that reads shards while later ones are tokenized."""

    begin: Callable[[], None]
    """Called once all shards of earlier starts are valid: they can be read."""

    num_wanted: Callable[[], int]
    """Return the number of shards that the consumer needs now. An exception stops the preparation."""


def tokenize(
    documents: Documents,
    folder: Path,
    *,
    shard_bytes: int,
    encoder: Encoder,
    report: Callable[[ShardRecord, bool], None],
    follower: Follower | None = None,
) -> list[ShardRecord]:
    """Tokenize documents into shard files. Valid shard files in the folder are kept.

    Args:
        documents: the documents.
        folder: the folder for the shard files; made if missing.
        shard_bytes: least bytes of text in a shard; the last shard may have fewer.
        encoder: the encoder.
        report: called with the record of each finished shard, first of the kept ones, and with whether it was kept.
        follower: consumer of the shards. Shards far beyond those that it needs are not begun.

    Raises:
        RejectedDocumentsError: a document cannot be read.
        DataError: a shard cannot be made for another reason. Finished shards stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    records = repair_journal(folder)
    damaged = []
    for index, record in enumerate(records):
        path = shard_path(folder, index)
        if checksum(path) == record.sha256:
            report(record, True)
        else:
            _log.warning("%s is damaged or missing: tokenizing it again", path)
            damaged.append(index)
    starts = [START, *(record.stop for record in records)]
    again = (islice(_cut(documents, folder, starts[index], index, shard_bytes), 1) for index in damaged)
    for index, record in zip(damaged, _encode(chain.from_iterable(again), encoder), strict=True):
        if record != records[index]:
            path = shard_path(folder, index)
            remedy = f"Restore the source if it has changed, or delete {show_name(folder.parent)} to start again."
            raise DataError(f"{show_name(path)} is damaged, and the text gives other tokens than before. {remedy}")
        report(record, False)
    if follower is not None:
        follower.begin()
    new = _cut(documents, folder, starts[-1], len(records), shard_bytes)
    for record in _encode(new, encoder, follower):
        append_record(folder, record)
        records.append(record)
        report(record, False)
    return records


def _cut(documents: Documents, folder: Path, start: Cursor, index: int, shard_bytes: int) -> Iterator[Shard]:
    """Cut the documents from `start` on into shards. The first shard has the number `index`."""
    held: list[pa.RecordBatch] = []
    held_bytes, stop = 0, start
    files: Counter[int] = Counter()

    def shard() -> Shard:
        # A copy, because slices would keep their complete chunks in memory.
        batch = pa.Table.from_batches(held, SCHEMA).combine_chunks().to_batches()[0]
        return Shard(
            index=index,
            path=shard_path(folder, index),
            batch=batch,
            num_bytes=held_bytes,
            stop=stop,
            files=sorted(files.items()),
        )

    for chunk in documents.read(start):
        pieces = pa.record_batch([chunk.texts, pa.array(chunk.starts), pa.array(chunk.ends)], schema=SCHEMA)
        up_to = np.cumsum(_lengths(chunk), dtype=np.int64)
        begin = 0
        while begin < len(up_to):
            before = int(up_to[begin - 1]) if begin else 0
            last = int(np.searchsorted(up_to, before + shard_bytes - held_bytes))
            full = last < len(up_to)
            last = min(last, len(up_to) - 1)
            held.append(pieces.slice(begin, last + 1 - begin))
            taken = slice(begin, last + 1)
            num_documents = int(chunk.starts[taken].sum() + chunk.ends[taken].sum())
            if num_documents:
                # The last piece of a text file ends at the start of the next file.
                files[chunk.file - (int(chunk.offsets[last]) == 0)] += num_documents
            held_bytes += int(up_to[last]) - before
            stop = Cursor(chunk.file, int(chunk.offsets[last]))
            begin = last + 1
            if full:
                yield shard()
                held, held_bytes, index, files = [], 0, index + 1, Counter()
    if held:
        yield shard()


def _lengths(chunk: Chunk) -> np.ndarray:
    return pc.call_function("binary_length", [chunk.texts]).to_numpy()


def _encode(shards: Iterable[Shard], encoder: Encoder, follower: Follower | None = None) -> Iterator[ShardRecord]:
    """Encode shards in parallel and yield their records in order. The number of pending shards is bounded."""
    most_ahead = 2 * encoder.num_workers + 2  # enough to keep the workers busy
    pending: deque[tuple[Shard, Result]] = deque()
    # Enough text to keep the workers busy while more is read, little enough to hold in memory.
    max_bytes = (encoder.num_workers + 2) * MAX_SHARD_BYTES

    def oldest() -> ShardRecord:
        shard, future = pending.popleft()
        return ShardRecord(num_bytes=shard.num_bytes, stop=shard.stop, files=shard.files, **future.result())

    for shard in shards:
        while follower is not None and shard.index >= follower.num_wanted() + most_ahead:
            if pending:
                yield oldest()
            else:
                time.sleep(_POLL_S)
        pending.append((dataclasses.replace(shard, batch=None), encoder.submit(shard)))
        while pending and (pending[0][1].done() or sum(held.num_bytes for held, _ in pending) >= max_bytes):
            yield oldest()
    while pending:
        yield oldest()
