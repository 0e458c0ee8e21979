"""Every use of Ray's private modules, each with what Ray 2.60's public API lacks. The other modules import from here.

These names may change with any version of Ray: `pyproject.toml` bounds it. To import this file takes three seconds more
than `ray` alone, as Ray Train does; `launch` and its workers import Ray Train in any case.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ray._private import services, worker
from ray._private.node import Node
from ray.actor import ActorHandle

# Reserves CPUs for the tasks of Ray Data. `ray.autoscaler.sdk.request_resources` is one request for all of a cluster,
# and Ray Train does not take it into account when it sizes an elastic group.
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import (
    ResourceRequestPriority as ResourceRequestPriority,
)
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    DefaultAutoscalingCoordinator as DefaultAutoscalingCoordinator,
)

# A failed rendezvous has no public exception, and Ray Train retries after no other exception of a start.
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError as WorkerGroupStartupFailedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError as WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.context import get_train_context

# `FailureConfig` counts failures. It cannot tell permanent failures from others.
from ray.train.v2._internal.execution.failure_handling import FailureDecision as FailureDecision
from ray.train.v2._internal.execution.failure_handling import FailurePolicy as FailurePolicy
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import _JaxBackend

# It knows TPU slices. Ray has no public name for it: `JaxConfig` takes no other backend.
JaxBackend = _JaxBackend


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """Start Ray's processes in process groups of their own while the block runs.

    `timeout`, job schedulers and service managers send SIGTERM to the group of the command. The driver handles it and
    needs its cluster to do that. Ray has no option for this: it protects its processes from SIGINT alone.
    """
    start = services.ConsolePopen
    services.ConsolePopen = functools.partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start


def connected_node() -> Node | None:
    """Return the node that this process is connected to, or None.

    `ray.init` alone returns its log folder, and another library may have called it. Nothing public lists its processes
    or tells whether this process started it.
    """
    return worker.global_worker.node


def preemption_noticed() -> Callable[[], bool]:
    """Return a function, for any thread, that returns whether a node of this worker's group is about to be preempted.

    `ray.train.get_preemption_info` is a barrier of all ranks. Call this in the thread of the training loop: Ray finds a
    worker's context by its thread.
    """
    context = get_train_context().preemption_context
    return lambda: context.preemption_info is not None


class Trainer(JaxTrainer):
    """Ray's trainer with another failure policy and without Ray's handler of SIGINT.

    Ray's handler stops the workers at once, and no argument replaces it or the policy.

    Attributes:
        policy: decides whether a failed group starts again.
        on_start: called with Ray Train's controller, in the main thread alone.
    """

    policy: FailurePolicy
    on_start: Callable[[ActorHandle], None]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        return super()._initialize_and_run_controller(**arguments | {"failure_policy": self.policy})

    def _register_sigint_handler(self, controller: ActorHandle) -> None:
        self.on_start(controller)
