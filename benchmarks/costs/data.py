"""Costs of `owt-data`: reading of windows, token files in object storage, preparation, and starts."""

import contextlib
import logging
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
from ray import cloudpickle

from costs.measurement import Measurement
from owt_data import (
    Batches,
    PrepareOptions,
    TokenSequence,
    TokenSpan,
    open_tokens,
    prepare,
    read_steps,
    source_digest,
    step_windows,
)
from owt_data._prepare.write_splits import copy_ranges
from owt_data._sources.documents import Cursor
from owt_data._stream import ray_reader
from owt_data._tokens.growing_tokens import GrowingTokens
from owt_data._tokens.journal import ShardRecord, append_record, shard_folder, shard_path, staging_path
from owt_data._tokens.summary import Summary

_SEQ_LEN = 64
_SETTLED_S = 2.2
"""Seconds after which a digest of a written file may be kept."""


def _joined(num_spans: int, folder: Path) -> TokenSequence:
    """Return a sequence of spans of 100 tokens."""
    path = folder / "tokens.bin"
    np.arange(1 << 15, dtype="<u2").tofile(path)
    starts = np.random.default_rng(0).integers(0, (1 << 15) - 100, num_spans).tolist()
    return TokenSequence(tuple(TokenSpan(path=str(path), start=start, stop=start + 100) for start in starts))


def _span_calls(num_spans: int, folder: Path) -> float:
    """Count the calls of functions, of Python and of C, in a read of 32 windows."""
    tokens, num_calls = _joined(num_spans, folder), 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    tokens.windows(np.arange(32), seq_len=_SEQ_LEN, order="shuffle", seed=1)
    sys.setprofile(count)
    try:
        tokens.windows(np.arange(32), seq_len=_SEQ_LEN, order="shuffle", seed=1)
    finally:
        sys.setprofile(None)
    return num_calls


def _task_bytes(num_spans: int, folder: Path) -> float:
    """Return the bytes of the function that each task of a stream unpickles."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with mock.patch.object(ray_reader, "untyped", side_effect=lambda read: read) as made:
        step_windows(_joined(num_spans, folder), Batches(seq_len=64, global_batch_size=8), start_step=0, stop_step=9)
    return len(cloudpickle.dumps(made.call_args.args[0]))  # pyright: ignore[reportPrivateImportUsage] - undeclared


@contextlib.contextmanager
def _object_storage(data: bytes) -> Iterator[Counter[str]]:
    """Serve one object as every key of an S3 server on loopback. Yields the number of requests by method."""
    requests: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            requests["HEAD"] += 1
            self._send(data, 200)

        def do_GET(self) -> None:
            requests["GET"] += 1
            time.sleep(0.005)
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self._send(data[int(first) : int(last) + 1], 206)

        def _send(self, body: bytes, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with mock.patch.dict(os.environ, variables):
            yield requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _remote_requests(method: str, num_steps: int, batch_size: int, order: Any) -> float:
    tokens = np.arange(1 << 20).astype("<u2")
    with _object_storage(tokens.tobytes()) as requests:
        sequence = TokenSequence((TokenSpan(path="s3://bucket/tokens.bin", start=0, stop=len(tokens)),))
        batches = Batches(seq_len=_SEQ_LEN, global_batch_size=batch_size, order=order)
        for _ in read_steps(sequence, batches, start_step=0, stop_step=num_steps):
            pass
        return requests[method]


def _remote_opens(num_steps: int, _folder: Path) -> float:
    """Count the requests that open a file, while steps of 32 windows are read."""
    return _remote_requests("HEAD", num_steps, 32, "shuffle")


def _remote_reads(batch_size: int, _folder: Path) -> float:
    """Count the requests that read tokens, in a step of consecutive windows."""
    return _remote_requests("GET", 1, batch_size, "sequential")


def _text_without_breaks(num_mib: int, folder: Path) -> float:
    """Return the seconds of CPU time to prepare a text without line breaks and blanks."""
    letters = np.random.default_rng(0).choice(list(b"abcdefghijklmnopqrstuvwxyz0123456789.,"), num_mib << 20)
    (folder / "text.txt").write_bytes(letters.astype(np.uint8).tobytes())
    start = time.process_time()
    prepare(folder / "text.txt", folder / "out", PrepareOptions(tokenizer="bytes"), num_processes=1)
    return time.process_time() - start


def _peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _long_document_bytes(num_documents: int, folder: Path) -> float:
    """Return the additional memory to copy documents of which one is longer than a chunk."""

    def peak(longest: int) -> int:
        lengths = np.full(num_documents, 16)
        lengths[num_documents // 2] = longest
        ends = np.cumsum(lengths)
        np.zeros(ends[-1], "<u2").tofile(folder / "tokens.bin")
        sequence = TokenSequence((TokenSpan(path=str(folder / "tokens.bin"), start=0, stop=int(ends[-1])),))
        summary = Summary(0, begins=False, continues=False)
        ranges = (ends - lengths, ends)
        return _peak_bytes(lambda: copy_ranges(sequence, ranges, folder / "copy.bin", summary, lambda _: None))

    # A chunk is one 16th of all tokens: a little less than that, and a little more.
    rest = 16 * (num_documents - 1)
    return max(0, peak(rest // 15 + 64) - peak(rest // 15 - 64))


def _bytes_read(call: Callable[[], object]) -> int:
    """Return the number of bytes that this process reads from files during a call."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    count()
    before = count()
    overhead = count() - before
    before = count()
    call()
    return count() - before - overhead


def _journal_bytes(num_shards: int, folder: Path) -> float:
    """Return the bytes that a reader of growing tokens reads to find one more shard."""
    shards = shard_folder(staging_path(folder / "out"), "train")
    shards.mkdir(parents=True)

    def add(index: int) -> None:
        np.zeros(8, "<u2").tofile(shard_path(shards, index))
        append_record(
            shards,
            ShardRecord(num_bytes=8, num_tokens=8, num_documents=1, sha256=64 * "a", stop=Cursor(0, 8 * index)),
        )

    for index in range(num_shards):
        add(index)
    tokens = GrowingTokens(folder / "out", "train", is_one_source=False)
    assert len(tokens) == 8 * num_shards
    add(num_shards)
    num_bytes = _bytes_read(lambda: len(tokens))
    assert len(tokens) == 8 * num_shards + 8
    return num_bytes


def _again(folder: Path, call: Callable[[], object]) -> float:
    """Return the bytes that a call reads the second time, with an empty cache of digests at first."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        time.sleep(_SETTLED_S)
        call()
        return _bytes_read(call)


def _resume_bytes(num_files: int, folder: Path) -> float:
    """Return the bytes that the second digest of a source of small files reads."""
    (folder / "text").mkdir()
    for number in range(num_files):
        (folder / "text" / f"{number:06d}.txt").write_bytes(b"a text" * 1024)
    return _again(folder, lambda: source_digest(str(folder / "text")))


def _open_bytes(num_mib: int, folder: Path) -> float:
    """Return the bytes that the second opening of a token file without a manifest reads."""
    (np.arange(num_mib << 19) % 50_257).astype("<u2").tofile(folder / "tokens.bin")
    return _again(folder, lambda: open_tokens(str(folder / "tokens.bin"), tokenizer="gpt2"))


MEASUREMENTS = [
    Measurement(
        name="span-calls", what="a read of 32 windows", unit="calls of functions", size="spans",
        sizes=(1_000, 10_000, 100_000), short=(100, 1_000), cost=_span_calls, goal=0.1,
    ),
    Measurement(
        name="task-bytes", what="the tokens in a task of a stream", unit="bytes", size="spans",
        sizes=(1_000, 10_000, 100_000), short=(100, 1_000), cost=_task_bytes, goal=0.1,
    ),
    Measurement(
        name="remote-opens", what="openings of a file in object storage", unit="requests", size="steps",
        sizes=(1, 10, 100), short=(1, 10), cost=_remote_opens, goal=0.1,
    ),
    Measurement(
        name="remote-reads", what="reads of consecutive windows in object storage", unit="requests", size="windows",
        sizes=(16, 128, 1_024), short=(16, 128), cost=_remote_reads, goal=0.1,
    ),
    Measurement(
        name="text-without-breaks", what="preparation of a text without blanks", unit="CPU s", size="MiB",
        sizes=(4, 16, 64), short=(1, 4), cost=_text_without_breaks, goal=1.1,
    ),
    Measurement(
        name="long-document", what="additional memory for a document longer than a chunk", unit="bytes",
        size="documents", sizes=(1_000, 10_000, 100_000), short=(1_000, 10_000), cost=_long_document_bytes, goal=0.1,
    ),
    Measurement(
        name="journal-poll", what="reading of the journal to find one more shard", unit="bytes", size="shards",
        sizes=(100, 1_000, 10_000), short=(100, 1_000), cost=_journal_bytes, goal=0.1,
    ),
    Measurement(
        name="source-again", what="the second digest of a source of small files", unit="bytes", size="files",
        sizes=(300, 3_000, 30_000), short=(300, 3_000), cost=_resume_bytes, goal=0.1,
    ),
    Measurement(
        name="bare-file-again", what="the second opening of a file without a manifest", unit="bytes", size="MiB",
        sizes=(2, 16, 128), short=(2, 16), cost=_open_bytes, goal=0.1,
    ),
]  # fmt: skip
"""The measurements of this part."""
