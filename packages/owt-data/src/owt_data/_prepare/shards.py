"""Documents to shard files, on several processes, resumable: every shard is checksummed and recorded."""

import dataclasses
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from owt_data._errors import DataError
from owt_data._json_types import parse_json
from owt_data._prepare.tokenize_worker import encode_shard
from owt_data._sources.documents import START, Chunk, Cursor, Documents
from owt_data._tokenizers import load_tokenizer

_log = logging.getLogger("owt_data")

_JOURNAL_NAME = "parts.jsonl"

# Text in a shard: enough shards to keep every process busy, few enough to keep track of.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1 << 18, 1 << 24
SCHEMA = pa.schema([("text", pa.large_string()), ("ends", pa.bool_())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Text that is tokenized at once. Shards depend on the source and the size alone."""

    path: Path
    """The file that its tokens will be in."""

    batch: pa.RecordBatch | None
    """Its pieces, see `SCHEMA`; None once they are handed over."""

    num_bytes: int
    """Bytes of text."""

    stop: Cursor
    """Where the next shard begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A shard file that was finished."""

    num_bytes: int
    """Bytes of text it was made of."""

    num_tokens: int
    """Tokens in it."""

    num_documents: int
    """Documents that end in it."""

    sha256: str
    """Of the file."""

    stop: Cursor
    """Where the next shard begins."""


Result = Future[dict[str, Any]]
"""What `encode_shard` returns, once it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Something that encodes shards, several at once."""

    submit: Callable[[Shard], Result]
    """Begins to encode a shard."""

    num_workers: int
    """How many shards it encodes at once."""


def shard_path(folder: Path, index: int) -> Path:
    """The file of a shard."""
    return folder / f"{index:06d}.bin"


def tokenize(
    documents: Documents,
    folder: Path,
    *,
    shard_bytes: int,
    encoder: Encoder,
    report: Callable[[ShardRecord], None],
) -> list[ShardRecord]:
    """Tokenize documents into shard files, going on from those that the folder already has.

    Args:
        documents: what to tokenize.
        folder: where the shards are; made if missing.
        shard_bytes: text in a shard, at least; the last has less.
        encoder: does the work.
        report: called with each shard that is done, those of an earlier start first.

    Raises:
        RejectedDocumentsError: a document cannot be read, whoever reads it.
        DataError: something else kept a shard from being made. Those that are made stay.
        OSError: a shard could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    journal = folder / _JOURNAL_NAME
    records = _read_journal(journal)
    damaged = []
    for index, record in enumerate(records):
        path = shard_path(folder, index)
        if checksum(path) == record.sha256:
            report(record)
        else:
            _log.warning("%s is damaged or missing: tokenizing it again", path)
            damaged.append(index)
    starts = [START, *(record.stop for record in records)]
    again = (islice(_shards(documents, folder, starts[index], index, shard_bytes), 1) for index in damaged)
    new = _shards(documents, folder, starts[-1], len(records), shard_bytes)
    with journal.open("a") as file:
        for number, record in enumerate(_encode(chain(chain.from_iterable(again), new), encoder)):
            if number >= len(damaged):
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
                file.flush()
                records.append(record)
            elif record != records[damaged[number]]:
                raise DataError(
                    f"{shard_path(folder, damaged[number])} must have the tokens that it had before the damage, got other "
                    f"tokens: the source has changed, or the memory is failing. Delete {folder.parent} to begin again."
                )
            report(record)
    return records


def checksum(path: Path) -> str | None:
    """SHA-256 of a file, or None where it is missing."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_journal(path: Path) -> list[ShardRecord]:
    """The shards that were recorded, up to the first line that a kill or a power cut spoiled, which is cut off."""
    if not path.exists():
        return []
    records, num_bytes = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        record = _read_record(line)
        if record is None:
            break
        records.append(record)
        num_bytes += len(line)
    os.truncate(path, num_bytes)
    return records


def _read_record(line: bytes) -> ShardRecord | None:
    """The shard that a line of the journal records; None if it does not read as one."""
    if not line.endswith(b"\n"):
        return None
    try:
        return parse_json(ShardRecord, line)
    except ValueError:
        return None


def _shards(documents: Documents, folder: Path, start: Cursor, index: int, shard_bytes: int) -> Iterator[Shard]:
    """Cut what follows `start` into shards, the first being number `index`."""
    held: list[pa.RecordBatch] = []
    held_bytes, stop = 0, start

    def shard() -> Shard:
        # One batch of its own, so that a shard no longer holds the chunks it was cut from.
        batch = pa.Table.from_batches(held, SCHEMA).combine_chunks().to_batches()[0]
        return Shard(path=shard_path(folder, index), batch=batch, num_bytes=held_bytes, stop=stop)

    for chunk in documents.read(start):
        pieces = pa.record_batch([chunk.texts, pa.array(chunk.ends)], schema=SCHEMA)
        up_to = np.cumsum(_lengths(chunk), dtype=np.int64)
        begin = 0
        while begin < len(up_to):
            before = int(up_to[begin - 1]) if begin else 0
            last = int(np.searchsorted(up_to, before + shard_bytes - held_bytes))
            full = last < len(up_to)
            last = min(last, len(up_to) - 1)
            held.append(pieces.slice(begin, last + 1 - begin))
            held_bytes += int(up_to[last]) - before
            stop = Cursor(chunk.file, int(chunk.offsets[last]))
            begin = last + 1
            if full:
                yield shard()
                held, held_bytes, index = [], 0, index + 1
    if held:
        yield shard()


def _lengths(chunk: Chunk) -> np.ndarray:
    return pc.call_function("binary_length", [chunk.texts]).to_numpy()


def _encode(shards: Iterable[Shard], encoder: Encoder) -> Iterator[ShardRecord]:
    """Encode shards, a bounded number at once, and yield their records in order."""
    pending: deque[tuple[Shard, Result]] = deque()
    # Enough text to keep the workers busy while the next is read; little enough to hold.
    max_bytes = (encoder.num_workers + 2) * MAX_SHARD_BYTES

    def oldest() -> ShardRecord:
        shard, future = pending.popleft()
        result = future.result()
        if "errno" in result:
            raise OSError(result["errno"], result["reason"])
        if "rejected" in result:
            raise DataError(result["rejected"])
        return ShardRecord(num_bytes=shard.num_bytes, stop=shard.stop, **result)

    for shard in shards:
        pending.append((dataclasses.replace(shard, batch=None), encoder.submit(shard)))
        while pending and (pending[0][1].done() or sum(held.num_bytes for held, _ in pending) >= max_bytes):
            yield oldest()
    while pending:
        yield oldest()


@contextmanager
def local_encoder(tokenizer: str, num_processes: int) -> Iterator[Encoder]:
    """Encode shards on this machine: in processes of their own, or for a single one right here."""
    if num_processes == 1:
        encoding = load_tokenizer(tokenizer)

        def encode(shard: Shard) -> Result:
            result: Result = Future()
            result.set_result(encode_shard(shard.batch, encoding, shard.path))
            return result

        yield Encoder(submit=encode, num_workers=1)
        return
    idle: SimpleQueue[_Process] = SimpleQueue()

    def encode_elsewhere(shard: Shard) -> dict[str, Any]:
        process = idle.get()
        try:
            return process.encode(shard)
        finally:
            idle.put(process)

    with ExitStack() as stack:
        for _ in range(num_processes):
            process = _Process(tokenizer)
            stack.callback(process.close)
            idle.put(process)
        threads = stack.enter_context(ThreadPoolExecutor(num_processes))
        stack.callback(threads.shutdown, cancel_futures=True)
        yield Encoder(submit=lambda shard: threads.submit(encode_elsewhere, shard), num_workers=num_processes)


class _Process:
    """A process that runs `owt_data._prepare.tokenize_worker`. Ends with this one, whose pipe it reads."""

    def __init__(self, tokenizer: str) -> None:
        # A session of its own, so that Ctrl-C reaches only the process that can answer it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "owt_data._prepare.tokenize_worker", tokenizer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._answers = self._process.stdout
        self._stdin = self._process.stdin
        self._stream = pa.ipc.new_stream(self._stdin, SCHEMA)

    def encode(self, shard: Shard) -> dict[str, Any]:
        """Encode a shard."""
        with suppress(BrokenPipeError):  # the missing answer says the same
            self._stream.write_batch(shard.batch, custom_metadata={"path": os.fspath(shard.path)})
            self._stdin.flush()
        answer = self._answers.readline()
        if not answer:
            raise DataError(
                f"a tokenizing process ended with exit code {self._process.wait()}: if that is -9, memory was short; "
                "the same command again goes on from there, with fewer --num-processes if need be"
            )
        return json.loads(answer)

    def close(self) -> None:
        """End the process, which is doing nothing of use any more."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with suppress(BrokenPipeError):  # what the buffer still held is of no use to anyone
            self._stdin.close()
