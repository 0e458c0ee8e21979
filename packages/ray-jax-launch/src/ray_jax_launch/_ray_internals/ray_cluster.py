"""Every use of Ray's private modules that concerns clusters, each with what Ray 2.60's public API lacks."""

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import ray_constants, services, utils, worker
from ray._private.node import Node
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.state import GlobalState
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from ray_jax_launch._errors import LaunchError

_logger = logging.getLogger("ray_jax_launch")
_LOOK_EVERY_S, _LOOK_OFTEN_S = 0.02, 10.0


@contextlib.contextmanager
def own_processes(on_start: Callable[[int], None]) -> Iterator[None]:
    """Start Ray's processes in process groups of their own while the block runs, and kill them if it fails.

    `timeout`, job schedulers and service managers send SIGTERM to the group of the command. The driver handles it and
    needs its cluster to do that. Ray has no option for this: it protects its processes from SIGINT alone. It lets the
    processes of a start that failed live until the driver ends.

    Args:
        on_start: called with the pid of each process.
    """
    start, processes = services.ConsolePopen, []

    def start_and_tell(*args: Any, **kwargs: Any) -> Any:
        process = start(*args, **kwargs, process_group=0)
        on_start(process.pid)
        processes.append(process)
        return process

    services.ConsolePopen = start_and_tell
    try:
        yield
    except Exception:  # not Ctrl-C: Ray's C++ code would end this process, whose raylet is gone
        for process in processes:
            process.kill()
            process.wait()
        raise
    finally:
        services.ConsolePopen = start


@contextlib.contextmanager
def signals_in_python() -> Iterator[None]:
    """Handle the signals of a driver that starts while the block runs in Python alone.

    Ray's C++ code prints a stack at SIGTERM, and aborts a driver that then needs three seconds for its end. Ray reads
    the environment variable when it is imported, and its other processes must keep their handler.
    """
    before = ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        yield
    finally:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = before


@contextlib.contextmanager
def only_this_machine() -> Iterator[None]:
    """Give a cluster that starts while the block runs the loopback address, on which alone its processes then listen.

    This is Ray's default on macOS. `ray.init(_node_ip_address="127.0.0.1")` uses another address of the machine, and
    Ray reads the environment variable when it is imported.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    in_environment = os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[name] = "0"  # for the processes of the cluster
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]
        if in_environment is not None:
            os.environ[name] = in_environment


@contextlib.contextmanager
def polling_often() -> Iterator[None]:
    """Notice at once that the node is ready which `ray.init` starts while the block runs. Ray looks once a second."""
    get_node = services.get_node

    def get_soon(gcs_address: str, node_id: str) -> Any:
        nodes = GlobalState()
        nodes._initialize_global_state(services._get_gcs_client_options(gcs_address))
        until_s = time.monotonic() + _LOOK_OFTEN_S
        while not any(node["NodeID"] == node_id for node in nodes.node_table()) and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
        return get_node(gcs_address, node_id)

    services.get_node = get_soon
    try:
        yield
    finally:
        services.get_node = get_node


@contextlib.contextmanager
def free_agent_port() -> Iterator[None]:
    """Let the agent of the node which `ray.init` starts while the block runs listen at a free port.

    Ray gives each agent the port 52365, and `ray.init` has no argument for it. The agent of a second cluster on a
    machine tries for 3.5 s to get that port, and the start waits for it.
    """
    start = services.start_raylet

    def start_raylet(*args: Any, **kwargs: Any) -> Any:
        return start(*args, **kwargs | {"dashboard_agent_listen_port": 0})

    services.start_raylet = start_raylet
    try:
        yield
    finally:
        services.start_raylet = start


@contextlib.contextmanager
def without_idle_processes() -> Iterator[None]:
    """Start no process of Ray that would have nothing to do, for a cluster that starts while the block runs.

    On one machine, the autoscaler has no nodes to add. The log monitor sends what workers print to drivers that print
    it. Without a dashboard, its process counts the use of Ray alone, and its agent, for which each start waits,
    measures the node for nobody: Ray's minimal agent is enough, as in an installation without the dashboard. No
    argument of `ray.init` leaves them out.
    """
    changed: dict[str, tuple[Any, Callable[..., Any]]] = {
        "start_api_server": (Node, lambda node, **_: None),
        "start_log_monitor": (Node, lambda node, **_: None),
        "start_monitor": (Node, lambda node, **_: None),
        "get_dashboard_dependency_error": (utils, lambda: ImportError("no dashboard is needed")),
    }
    with contextlib.ExitStack() as stack:
        for name, (owner, replacement) in changed.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def variables_to_join(*, is_local: bool) -> dict[str, str]:
    """Return environment variables with which a process joins the connected cluster.

    Args:
        is_local: the cluster is one of `only_this_machine`: Ray would replace the loopback address by another one.
    """
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return address | ({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"} if is_local else {})


def own_resources() -> dict[str, float]:
    """Return the resources that a cluster which starts on this machine has. Nothing public tells them before its start.

    Raises:
        LaunchError: Ray cannot start with the variables of this process.
    """
    try:
        resources = ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict()
    except ValueError as error:  # such as RAY_OVERRIDE_RESOURCES with more GPUs than CUDA_VISIBLE_DEVICES
        raise LaunchError(
            f"Ray could not start on this machine: {str(error).rstrip('.')}. Change the environment variables that it "
            "names, or set RAY_ADDRESS to a cluster."
        ) from error
    return {name: float(amount or 0) for name, amount in resources.items()}


def find_address(address: str) -> str:
    """Return host and port at which Ray looks for the cluster of this address, which may be `auto`.

    For `auto` Ray reads a file that `ray start` has written. It replaces names of the loopback address.

    Raises:
        ValueError: it is no address.
        ConnectionError: there is no cluster for `auto`.
    """
    found = services.canonicalize_bootstrap_address(address)
    assert found is not None, "it is None for the address `local` alone"
    return found


def connected_node() -> Node | None:
    """Return the node that this process is connected to, or None.

    `ray.init` alone returns its log folder, and another library may have called it. Nothing public lists its processes
    or tells whether this process started it.
    """
    return worker.global_worker.node


def hide_cluster_messages() -> None:
    """Log at level DEBUG what Ray prints in the driver of deaths in the cluster.

    For each process that dies, Ray prints several hundred characters, and for a raylet its last log. No option of
    `ray.init` prevents this: `log_to_driver=False` does not. The driver says itself what matters of these deaths.
    """
    worker.print_to_stdstream = lambda data, ignore_prefix=False: _logger.debug("%s", data.get("lines"))


def abandon_cluster() -> None:
    """Kill the processes of a cluster that this process started, and prevent that Ray disconnects when it exits."""
    atexit.unregister(worker.shutdown)
    node = connected_node()
    if node is not None and node.head:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def placement_groups() -> set[str]:
    """Return the ids of this driver's placement groups. An id ends with that of its job."""
    job = ray.get_runtime_context().get_job_id()
    return {id for id, row in placement_group_table().items() if row["state"] != "REMOVED" and id.endswith(job)}


def remove_placement_groups(ids: set[str]) -> None:
    """Remove placement groups, with the actors in them.

    Ray removes the group of a dead controller only when the driver has ended too. Nothing public makes a handle of an
    id.
    """
    for id in ids:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(id))))


def dashboard_address() -> str | None:
    """Return the host and port of the connected cluster's dashboard, or None. Ray's public name is deprecated."""
    return getattr(connected_node(), "webui_url", None) or None


def lacks_dashboard() -> bool:
    """Return whether packages of the dashboard are missing. Ray says so only in its own log."""
    return utils.get_dashboard_dependency_error() is not None
