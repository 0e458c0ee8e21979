"""Shards of documents, tokenized in parallel into shard files with checksums, and resumed after the last one."""

import dataclasses
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice, takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from owt_data._errors import DataError, file_errors, show_name
from owt_data._json_types import UnknownFieldError, parse_json, parse_record, reject_format
from owt_data._paths import open_regular
from owt_data._prepare.tokenize_worker import encode_shard
from owt_data._sources.documents import START, Chunk, Cursor, Documents
from owt_data._tokenizers import load_fast_tokenizer

_log = logging.getLogger("owt_data")

_FORMAT = 1
_JOURNAL_NAME = "parts.jsonl"

# Bytes of text in a shard: small enough to keep all processes busy, large enough for a short journal.
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 1 << 18, 1 << 24
_POLL_S = 0.05
_READ_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 20
# Names in the working folder of a preparation. Systems make hidden files, such as `.nfs000001`.
_STAGING_NAMES = ("plan.json*", "parts-*", "result", "wanted*", "running", "error.txt*", ".*")
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


Result = Future[dict[str, Any]]
"""Future result of `encode_shard`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Parallel encoder of shards."""

    submit: Callable[[Shard], Result]
    """Start to encode a shard."""

    num_workers: int
    """Number of shards that are encoded in parallel."""


@runtime_checkable
class Follower(Protocol):
    """Consumer that reads shards while later ones are tokenized."""

    def begin(self) -> None:
        """Start to read. Called once all shards of earlier starts are valid."""

    def num_wanted(self) -> int:
        """Return the number of shards that the consumer needs now. An exception stops the preparation."""
        ...


def staging_path(out: Path) -> Path:
    """Return the working folder of a preparation into the folder `out`."""
    return out.with_name(f".{out.name}.partial")


def check_staging(staging: Path) -> None:
    """Raise DataError if the working folder holds a file of somebody else: the end of the preparation deletes it."""
    for path in staging.iterdir():
        if not any(map(path.match, _STAGING_NAMES)):
            raise DataError(
                f"{show_name(staging)} must hold only files of prepare, got {show_name(path.name)}. Move it away."
            )


def shard_folder(staging: Path, split: str) -> Path:
    """Return the folder of the shards of a split, or of `all` splits together."""
    return staging / f"parts-{split}"


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of a shard file."""
    return folder / f"{index:06d}.bin"


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
    journal = folder / _JOURNAL_NAME
    records, num_bytes = read_journal(folder)
    if journal.exists():
        os.truncate(journal, num_bytes)
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
            raise DataError(f"{show_name(path)} must have the tokens of before its damage, got others. {remedy}")
        report(record, False)
    if follower is not None:
        follower.begin()
    new = _cut(documents, folder, starts[-1], len(records), shard_bytes)
    for record in _encode(new, encoder, follower):
        # A full disk can fail the journal before any shard, and its error names no file.
        with file_errors("writable", journal), open_regular(journal, "a") as file:
            if not file.tell():
                file.write(json.dumps({"format": _FORMAT, "version": version("owt-data")}) + "\n")
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        records.append(record)
        report(record, False)
    return records


def checksum(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it is missing."""
    if not path.exists():
        return None
    digest = hashlib.sha256()
    with open_regular(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_journal(folder: Path) -> tuple[list[ShardRecord], int]:
    """Return the valid records at the start of the journal, and their bytes. A kill or a power cut damages the rest.

    Raises:
        DataError: another version wrote the journal, or its name is that of a pipe or a device.
    """
    records, num_bytes = [], 0
    path = folder / _JOURNAL_NAME
    if not path.exists():
        return records, num_bytes
    with open_regular(path, "rb") as file:
        header = file.readline(_MOST_LINE_BYTES)
        # A line without its break would run into the next one.
        lines = [*takewhile(lambda line: line.endswith(b"\n"), iter(lambda: file.readline(_MOST_LINE_BYTES), b""))]
    if not header.endswith(b"\n"):
        return records, num_bytes
    writer = None
    try:
        writer = parse_record(JournalHeader, header, path, number=_FORMAT).version
        num_bytes = len(header)
        for line in lines:
            records.append(parse_json(ShardRecord, line))
            num_bytes += len(line)
    except UnknownFieldError as error:
        reject_format(path, _FORMAT, f"the unknown field {show_name(error)}", writer)
    except DataError:
        raise
    except ValueError:
        pass
    return records, num_bytes


def _cut(documents: Documents, folder: Path, start: Cursor, index: int, shard_bytes: int) -> Iterator[Shard]:
    """Cut the documents from `start` on into shards. The first shard has the number `index`."""
    held: list[pa.RecordBatch] = []
    held_bytes, stop = 0, start

    def shard() -> Shard:
        # A copy, because slices would keep their complete chunks in memory.
        batch = pa.Table.from_batches(held, SCHEMA).combine_chunks().to_batches()[0]
        return Shard(index=index, path=shard_path(folder, index), batch=batch, num_bytes=held_bytes, stop=stop)

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


def _encode(shards: Iterable[Shard], encoder: Encoder, follower: Follower | None = None) -> Iterator[ShardRecord]:
    """Encode shards in parallel and yield their records in order. The number of pending shards is bounded."""
    most_ahead = 2 * encoder.num_workers + 2  # enough to keep the workers busy
    pending: deque[tuple[Shard, Result]] = deque()
    # Enough text to keep the workers busy while more is read, little enough to hold in memory.
    max_bytes = (encoder.num_workers + 2) * MAX_SHARD_BYTES

    def oldest() -> ShardRecord:
        shard, future = pending.popleft()
        return ShardRecord(num_bytes=shard.num_bytes, stop=shard.stop, **future.result())

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


@contextmanager
def local_encoder(tokenizer: str, num_processes: int) -> Iterator[Encoder]:
    """Encode shards on this machine, in child processes. One process needs no child: this process encodes."""
    if num_processes == 1:
        encoding = load_fast_tokenizer(tokenizer)

        def encode(shard: Shard) -> Result:
            result: Result = Future()
            result.set_result(encode_shard(shard.batch, encoding, shard.path))
            return result

        yield Encoder(submit=encode, num_workers=1)
        return
    idle: SimpleQueue[_Process] = SimpleQueue()

    def encode_in_child(shard: Shard) -> dict[str, Any]:
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
        yield Encoder(submit=lambda shard: threads.submit(encode_in_child, shard), num_workers=num_processes)


class _Process:
    """Child process that runs `owt_data._prepare.tokenize_worker`. Ends when this process closes its pipe or dies."""

    def __init__(self, tokenizer: str) -> None:
        # In a new session only the parent receives Ctrl-C.
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
        with suppress(BrokenPipeError):  # then the answer is missing too
            self._stream.write_batch(shard.batch, custom_metadata={"path": os.fspath(shard.path)})
            self._stdin.flush()
        line = self._answers.readline()
        answer = json.loads(line) if line else {"error": self._ended()}
        if "error" in answer:
            raise DataError(answer["error"])
        return answer

    def _ended(self) -> str:
        return (
            f"Tokenizing processes must run to the end, got exit code {self._process.wait()} (-9: out of memory). Run "
            "the same command again to resume, after -9 with fewer --num-processes."
        )

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with suppress(BrokenPipeError):  # the buffer may hold text that is not needed any more
            self._stdin.close()
