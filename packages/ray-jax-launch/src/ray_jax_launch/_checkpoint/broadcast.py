"""Answers that only the first process finds out, for all processes."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ray_jax_launch._errors import DamagedCheckpointError, DeletedCheckpointError, LaunchError

_SMALLEST_MESSAGE = 1024
_ERRORS = {error.__name__: error for error in (DamagedCheckpointError, DeletedCheckpointError, LaunchError)}


def from_first_process(find: Callable[[], Any]) -> Any:
    """What a function returns in the first process, in every process. An error there is raised in all of them.

    File systems answer different hosts differently for a while (NFS keeps listings), so only one of them is asked.

    Args:
        find: called in the first process alone. Its result is JSON.
    """
    error: Exception | None = None
    result = None
    if jax.process_index() == 0:
        try:
            result = find()
        except (OSError, ValueError) as raised:
            error = raised
    if jax.process_count() > 1:
        message = {"result": result} if error is None else {"error": type(error).__name__, "text": str(error)}
        answer = json.loads(_broadcast(json.dumps(message).encode()))
        result = answer.get("result")
        if error is None and "error" in answer:
            error = _ERRORS.get(answer["error"], LaunchError)(f"process 0: {answer['text']}")
    if error is not None:
        raise error
    return result


def _broadcast(message: bytes) -> bytes:
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    # Each shape is compiled once: there are few of them.
    padded = np.zeros(max(_SMALLEST_MESSAGE, 1 << (size - 1).bit_length()), np.int32)
    if jax.process_index() == 0:
        padded[:size] = np.frombuffer(message, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded))[:size].astype(np.uint8).tobytes()
