"""Loss of the Ray cluster of a launch, and an interrupted start of Ray: the process then exits without Ray's own end.

After the death of the control store, Ray waits for it for a minute, and then ends the process in C++, without an
exception. After that of the node's raylet, a driver may wait forever. At the exit of the process, Ray waits and aborts
again. Therefore the driver waits for Ray Train in Python, looks at the cluster every second, and exits without Ray.

If an exception breaks off Ray's start, threads of its C++ part may run on, and crash when Python is gone.
"""

import atexit
import concurrent.futures
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ray_jax_launch._errors import TrainingFailed
from ray_jax_launch._ray_internals.ray_cluster import abandon_cluster, connected_node, signals_in_python

_LOOK_EVERY_S, _CONNECT_TIMEOUT_S = 1.0, 5.0
# The control store of another cluster may be started again within Ray's minute.
_UNREACHABLE_LIMIT_S = 30.0
_NODE_ENDED = "its raylet on this node has ended"
_FAILED, _INTERRUPTED = 1, 130

_is_lost = False


class ClusterLostError(TrainingFailed):
    """The launch has lost its cluster. This process cannot use Ray any more."""


class ClusterWatch:
    """Looks whether the connected cluster still answers."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def loss(self, *, is_suspected: bool = False) -> str | None:
        """Return what the cluster has lost, or None.

        Args:
            is_suspected: an actor of the launch has died, perhaps with its node. Then the control store is asked: a
                raylet whose agent has died still answers while it ends.
        """
        node = connected_node()
        if node is None:  # a Ray Client has neither socket
            return None
        if not _answers(socket.AF_UNIX, node.raylet_socket_name):
            return _NODE_ENDED
        host, _, port = node.gcs_address.rpartition(":")
        if _answers(socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))):
            self._since_s = None
            here = ray.get_runtime_context().get_node_id() if is_suspected else ""
            is_dead = is_suspected and not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == here)
            return _NODE_ENDED if is_dead else None
        self._since_s = time.monotonic() if self._since_s is None else self._since_s
        if node.head or time.monotonic() - self._since_s > _UNREACHABLE_LIMIT_S:
            return f"its control store {node.gcs_address} does not answer"
        return None


def wait_for(called: ray.ObjectRef) -> Any:
    """Return the result of a call of an actor. A signal interrupts the wait.

    Raises:
        ClusterLostError: the cluster has ended. From now on the process exits without Ray, with the exit code 1.
        Exception: that of the call.
    """
    future, watch = called.future(), ClusterWatch()
    while True:
        concurrent.futures.wait([future], timeout=_LOOK_EVERY_S)
        error = future.exception() if future.done() else None
        if future.done() and error is None:
            return future.result()
        if (loss := watch.loss(is_suspected=isinstance(error, RayError))) is not None:
            _abandon()
            raise ClusterLostError(f"the Ray cluster is gone: {loss}", None, "", "")
        if future.done():
            return future.result()


def is_lost() -> bool:
    """Return whether the launch has lost its cluster. Calls of actors may then wait forever."""
    return _is_lost


def end_actor(actor: ActorHandle) -> None:
    """Kill an actor, if its cluster is not lost."""
    if not _is_lost:
        ray.kill(actor)


def _answers(family: int, address: Any) -> bool:
    with socket.socket(family) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(address)
        except OSError:
            return False
    return True


def _abandon() -> None:
    global _is_lost
    if not _is_lost:
        _is_lost = True
        abandon_cluster()
        atexit.register(_exit_without_ray, _FAILED)


@contextlib.contextmanager
def starting_ray() -> Iterator[None]:
    """Start Ray in the block. If a signal interrupts it, the process later exits with the code 130 at its end."""
    try:
        with signals_in_python():
            yield
    except (KeyboardInterrupt, SystemExit):
        atexit.register(_exit_without_ray, _INTERRUPTED)
        raise
    atexit.unregister(_exit_without_ray)  # of a start before this one


def _exit_without_ray(code: int) -> None:
    atexit.unregister(_exit_without_ray)
    atexit._run_exitfuncs()  # those of other libraries
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)
