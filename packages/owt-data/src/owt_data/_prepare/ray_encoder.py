"""Encoder that runs shards as tasks of a Ray cluster."""

import logging
import os
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Else every task repeats `uv run`. Ray reads this variable at its first import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pyarrow as pa
import ray
import ray.exceptions

from owt_data._errors import DataError, one_line, show_name
from owt_data._prepare.shards import Encoder, Shard
from owt_data._prepare.tokenize_worker import encode_shard
from owt_data._tokenizers import load_fast_tokenizer

_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 5, 20


@contextmanager
def ray_encoder(tokenizer: str, num_tasks: int | None = None) -> Iterator[Encoder]:
    """Encode shards as Ray tasks of one core each, on the connected cluster or the one at `RAY_ADDRESS`.

    Args:
        tokenizer: the tokenizer.
        num_tasks: number of concurrent tasks. Default: twice the CPUs of the cluster, which leaves none idle.

    Raises:
        DataError: there is no cluster, it cannot be reached, or a task failed.
    """
    connects = not ray.is_initialized()
    if connects:
        _connect()
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
        raise DataError(
            f"A task of Ray that tokenizes has failed: {one_line(reason)}. Run the same command again to resume."
        ) from error
    finally:
        if connects:
            ray.shutdown()


def _connect() -> None:
    """Connect to the cluster at `RAY_ADDRESS`."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        raise DataError(
            f"RAY_ADDRESS must name a Ray cluster, which tokenizes the text, got {address or 'nothing'}. Set it, or "
            "tokenize on this machine alone, without --on-cluster."
        )
    try:
        _check_answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    # Ray raises a bare Exception if a server of another kind answers.
    except Exception as error:
        reason = one_line(next(iter(str(error).splitlines()), type(error).__name__))
        raise DataError(
            f"RAY_ADDRESS must name a Ray cluster that answers, got {show_name(address)} ({reason}). Correct it, or "
            "tokenize on this machine alone, without --on-cluster."
        ) from error


def _check_answers(address: str) -> None:
    """Check that a cluster answers. Ray itself waits for minutes, or forever for a server that says nothing.

    Ray's client, for an address `ray://`, has a time limit of its own.
    """
    _, is_client, place = address.rpartition("://")
    host, has_port, port = place.rpartition(":")
    if has_port:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    if is_client:
        return
    command = [f"{sysconfig.get_path('scripts')}/ray", "status", "--address", address]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=_ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConnectionError(f"no answer for {_ANSWER_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        raise ConnectionError("`ray status` finds no cluster there") from error


def _encode(batch: pa.RecordBatch, tokenizer: str, path: Path) -> dict[str, Any]:
    return encode_shard(batch, load_fast_tokenizer(tokenizer), path)
