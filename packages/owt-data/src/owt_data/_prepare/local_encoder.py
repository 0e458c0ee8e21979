"""Encoder that tokenizes shards on this machine, in child processes or in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

from owt_data._errors import DataError
from owt_data._prepare.shards import SCHEMA, Encoder, Result, Shard
from owt_data._prepare.tokenize_worker import encode_shard
from owt_data._tokenizers import load_fast_tokenizer


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
            [sys.executable, "-P", "-m", "owt_data._prepare.tokenize_worker", tokenizer],
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
        answer = json.loads(line) if line else {"error": self._wait_for_end()}
        if "error" in answer:
            raise DataError(answer["error"])
        return answer

    def _wait_for_end(self) -> str:
        """Wait for the end of the process, and return the sentence about it."""
        return (
            f"A tokenizing process has ended with exit code {self._process.wait()} (-9: out of memory). Run the same "
            "command again to resume, after -9 with fewer --num-processes."
        )

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with suppress(BrokenPipeError):  # the buffer may hold text that is not needed any more
            self._stdin.close()
