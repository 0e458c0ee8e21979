"""Encoder that runs shards as tasks of a Ray cluster."""

import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# Else every task repeats `uv run`. Ray reads this variable at its first import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pyarrow as pa
import ray
import ray.exceptions
import tiktoken

from owt_data._errors import DataError, one_line, show_name
from owt_data._prepare.shards import Encoder, Shard
from owt_data._prepare.tokenize_worker import encode_shard
from owt_data._tokenizers import load_fast_tokenizer

_CONNECT_TIMEOUT_S = 10


@cache
def _load_once(tokenizer: str) -> tiktoken.Encoding:
    return load_fast_tokenizer(tokenizer)


@contextmanager
def ray_encoder(tokenizer: str, num_tasks: int | None = None) -> Iterator[Encoder]:
    """Encode shards as Ray tasks of one core each, on the cluster at `RAY_ADDRESS` or a local one.

    Args:
        tokenizer: the tokenizer.
        num_tasks: number of concurrent tasks. Default: twice the CPUs of the cluster, which leaves none idle.

    Raises:
        DataError: the cluster cannot be reached, or a task failed.
    """
    started = not ray.is_initialized()
    if started:
        _start()
    encode = ray.remote(num_cpus=1)(_encode)
    num_tasks = num_tasks or 2 * int(ray.cluster_resources().get("CPU", 1))

    def encode_in_task(shard: Shard) -> dict[str, Any]:
        return ray.get(encode.remote(shard.batch, tokenizer, shard.path))

    try:
        with ThreadPoolExecutor(num_tasks) as threads:
            try:
                yield Encoder(submit=lambda shard: threads.submit(encode_in_task, shard), num_workers=num_tasks)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
    except ray.exceptions.RayError as error:
        # The last line has the message, the lines before it the traceback.
        reason = str(error).strip().splitlines()[-1]
        found = f"a failure: {one_line(reason)}"
        raise DataError(f"Ray must tokenize every shard, got {found}. Run the same command again to resume.") from error
    finally:
        if started:
            ray.shutdown()


def _start() -> None:
    """Connect to the cluster at `RAY_ADDRESS`, or start a local one."""
    address = os.environ.get("RAY_ADDRESS")
    constraint = "Ray must start a cluster on this machine, got a failure"
    remedy = "Run the same command again, or without --on-cluster."
    options: dict[str, Any] = {"address": "local", "include_dashboard": False}
    if address:
        constraint = f"RAY_ADDRESS must name a Ray cluster that answers, got {show_name(address)}"
        remedy = "Correct it, or unset it to start a cluster here."
        options = {"address": address}
    try:
        _check_address(address or "")
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    # Ray raises a bare Exception if its processes do not start in time.
    except Exception as error:
        reason = one_line(next(iter(str(error).splitlines()), type(error).__name__))
        raise DataError(f"{constraint} ({reason}). {remedy}") from error


def _check_address(address: str) -> None:
    """Check that a server answers at the address. Ray itself would retry for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _encode(batch: pa.RecordBatch, tokenizer: str, path: Path) -> dict[str, Any]:
    return encode_shard(batch, _load_once(tokenizer), path)
