"""Messages between the processes of a run, such as a result that one process computes for the others."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ray_jax_launch._errors import DamagedCheckpointError, DeletedCheckpointError, LaunchError, StorageFullError

_MIN_MESSAGE_BYTES = 1024
_ERRORS = {
    error.__name__: error for error in (DamagedCheckpointError, DeletedCheckpointError, LaunchError, StorageFullError)
}


def from_leader(compute: Callable[[], Any], leader: int = 0) -> Any:
    """Run a function in the leader process, and return its result in all processes that have this leader.

    A collective: every process must call it. There may be several leaders, such as one per node. An error of any leader
    is raised in all processes. Only one process lists a folder, because file systems may answer hosts differently for a
    while (NFS caches listings).

    Args:
        compute: the function. It returns JSON.
        leader: rank of the leader of this process. A process that is its own leader runs the function.
    """
    message, error = {}, None
    if leader == jax.process_index():
        try:
            message = {"result": compute()}
        except (OSError, ValueError, StorageFullError) as raised:
            message, error = {"error": type(raised).__name__, "text": str(raised)}, raised
    messages = gather(message)
    for rank, other in enumerate(messages):
        if error is None and "error" in other:
            error = _ERRORS.get(other["error"], LaunchError)(f"process {rank}: {other['text']}")
    if error is not None:
        raise error
    return messages[leader]["result"]


def gather(message: Any) -> list[Any]:
    """Return the messages of all processes by rank. Every process must call this, with a message that is JSON."""
    if jax.process_count() == 1:
        return [message]
    content = json.dumps([jax.process_index(), message]).encode()
    size = int(multihost_utils.process_allgather(np.int32(len(content))).max())
    # JSON may end in spaces. Each size is compiled once, so there are few of them.
    padded = content.ljust(max(_MIN_MESSAGE_BYTES, 1 << (size - 1).bit_length()))
    rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    # The rows are in the order of the devices, which is not that of the processes on every TPU slice.
    messages: dict[int, Any] = dict(json.loads(row.tobytes()) for row in rows)
    return [messages[rank] for rank in range(jax.process_count())]


def tell(key: str, text: str) -> None:
    """Tell the other processes a text. No collective, and no devices: any thread can call it, once for each key."""
    if jax.process_count() > 1:
        ocp.multihost.get_jax_distributed_client().key_value_set(key, text)


def ask(key: str, timeout_s: float) -> str:
    """Wait for a text that another process tells."""
    return ocp.multihost.get_jax_distributed_client().blocking_key_value_get(key, round(timeout_s * 1000))
