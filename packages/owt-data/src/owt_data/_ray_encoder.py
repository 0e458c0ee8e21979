"""Parts as tasks of a Ray cluster."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# `uv run` would otherwise be repeated by every task. Ray reads this when it is first imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pyarrow as pa
import ray
import ray.exceptions

from owt_data._errors import DataError, InterruptedWorkError
from owt_data._parts import Encoder, Part
from owt_data._tokenizers import load_tokenizer
from owt_data._worker import encode_part

_load_once = cache(load_tokenizer)


@contextmanager
def ray_encoder(tokenizer: str) -> Iterator[Encoder]:
    """Encode parts as Ray tasks, one core each, on the cluster that `RAY_ADDRESS` names or one started here.

    Raises:
        DataError: the cluster cannot be reached, or lost a task for good.
    """
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise DataError(f"expected a Ray cluster at {os.environ.get('RAY_ADDRESS')}: {error}") from error
    try:
        num_cpus = int(ray.cluster_resources().get("CPU", 1))
        yield Encoder(submit=lambda part: _submit(part, tokenizer), max_pending=2 * num_cpus)
    finally:
        if started:
            ray.shutdown()


def _submit(part: Part, tokenizer: str) -> Callable[[], dict[str, Any]]:
    result = _encode.remote(part.batch, tokenizer, part.path)

    def wait() -> dict[str, Any]:
        try:
            return ray.get(result)
        except ray.exceptions.RayError as error:
            raise InterruptedWorkError(f"the cluster could not tokenize {part.path.name}: {error}") from error

    return wait


@ray.remote(num_cpus=1)
def _encode(batch: pa.RecordBatch, tokenizer: str, path: Path) -> dict[str, Any]:
    return encode_part(batch, _load_once(tokenizer), path)
