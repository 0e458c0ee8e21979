"""Connect to a Ray cluster or start one, and check its resources."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import AuthenticationError, RaySystemError

from ray_jax_launch._cluster_folder import ClusterFolder, mark_failed
from ray_jax_launch._cluster_security import check_answers, protect_token
from ray_jax_launch._errors import LaunchError, in_a_line
from ray_jax_launch._hardware import Hardware, check_hardware, cpu, gpu, tpu
from ray_jax_launch._lost_cluster import starting_ray
from ray_jax_launch._numbers import MAX_COUNT, check_flag, check_number, check_resources_per_worker
from ray_jax_launch._ray_internals.ray_cluster import (
    connected_node,
    dashboard_address,
    find_address,
    free_agent_port,
    lacks_dashboard,
    only_this_machine,
    own_processes,
    own_resources,
    polling_often,
    variables_to_join,
    without_idle_processes,
)
from ray_jax_launch._reaper import Reaper

# CPUs for Ray Data in a cluster started here, in addition to the workers' CPUs, if there are more than for its tasks.
# Ray Train reserves its CPUs first. Without another CPU, Ray Data would wait forever.
_LOCAL_DATA_CPUS = 2
_POLL_S = 1.0

_logger = logging.getLogger("ray_jax_launch")
# Jobs of Ray, one per connection, whose workers' output Ray does not print.
_silent_jobs: set[str] = set()

_NICENESS = "RAY_worker_niceness"
_UNITS = 10_000  # Ray's of a resource
# Ray gives a node one unit of a resource with the type of its accelerators, and each worker takes this share.
_TYPE_RESOURCE, _TYPE_SHARE = "accelerator_type:", 0.001
# Ray's limit for the start of a node is 30 s, and no setting changes it. Ray raises `Exception` itself, which no type
# tells from other failures of a start (`Node.__init__` in ray/_private/node.py of Ray 2.60): only its text does.
_TOO_SLOW, _NUM_TRIES = "timed out during startup", 3
# Of the cluster that this process started last.
_started: tuple[ClusterFolder, Reaper] | None = None
# Of the cluster that this process joined last.
_watcher: Reaper | None = None


def connect(hardware: Hardware | None = None, *, dashboard: bool = False) -> None:
    """Connect to the cluster that `RAY_ADDRESS` names, or start a cluster on this machine.

    A started cluster has enough logical CPUs for the workers and for Ray Data, even if the machine has fewer. Its
    workers have the priority of this process, unless `RAY_worker_niceness` is set. Its processes listen on the loopback
    address alone, and no other user can read its files. They are deleted after the end of this process. If this process
    is connected already, or for `local` hardware, nothing happens.

    Args:
        hardware: to launch; None if it is not known yet.
        dashboard: start Ray's dashboard with a cluster on this machine. See `dashboard_url`. Without it, such a cluster
            exports no metrics of Ray, and keeps no records of tasks (`ray.timeline`).

    Raises:
        LaunchError: the cluster does not answer, the dashboard is not installed, or Ray cannot start here.
    """
    if hardware is not None:
        check_hardware(hardware)
    check_flag("dashboard", dashboard)
    if ray.is_initialized() or (hardware is not None and hardware.kind == "local"):
        return
    try:
        Path.cwd()  # Ray's processes start in it
    except OSError as error:
        raise LaunchError(f"the working folder was deleted ({error.strerror}). Change to another folder.") from error
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    address = _cluster_address()
    if address is not None:
        _join(address)
    else:
        _start(hardware or cpu(1), dashboard=dashboard)


def _cluster_address() -> str | None:
    """Return the address of the cluster that `connect` joins, or None if it starts one."""
    address = os.environ.get("RAY_ADDRESS")
    return address if address and address != "local" else None


def _join(address: str) -> None:
    """Connect to a cluster."""
    global _watcher
    if _watcher is not None:  # of a cluster that this process has left by `ray.shutdown`
        _watcher.close()
    _watcher = Reaper(None)
    shown = repr(address) if len(address) < 200 else f"{address[:100]!r}... ({len(address)} characters)"
    try:
        url = urlsplit(address if "://" in address else f"//{find_address(address)}")
        check_answers(url.hostname or "", url.port or (10001 if url.scheme else 6379))
        with starting_ray():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        _silent_jobs.add(ray.get_runtime_context().get_job_id())
    except (OSError, ValueError, AuthenticationError) as error:
        # Ray names a rejected token only in the text of the error's cause.
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error.__cause__):
            raise LaunchError(
                f"RAY_ADDRESS must be a Ray cluster that admits this process, got {shown}, which requires a token. Set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if ~/.ray/auth_token has another token."
            ) from None
        reason = in_a_line((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."), 200)
        raise LaunchError(
            f"RAY_ADDRESS must be a Ray cluster that answers, got {shown} ({reason}). Start it, or unset RAY_ADDRESS "
            "to run on this machine alone."
        ) from error


def _start(hardware: Hardware, *, dashboard: bool, num_tries: int = _NUM_TRIES) -> None:
    """Start a cluster on this machine."""
    global _started
    if dashboard and lacks_dashboard():
        raise LaunchError(
            "dashboard must be False where Ray's dashboard is not installed, got True. Install it: pip install "
            "'ray[default]'."
        )
    # Ray's default is the niceness 15. Each short task of another process would then hold up a training step.
    os.environ.setdefault(_NICENESS, "0")
    if _started is not None:  # its cluster has ended by `ray.shutdown`
        ended, _started = _started, None
        for part in ended:
            part.close()
    protect_token()
    folder = ClusterFolder()
    reaper = Reaper(folder.path)
    _started = folder, reaper
    try:
        needed = contextlib.nullcontext() if dashboard else without_idle_processes()
        with (
            own_processes(reaper.watch),
            only_this_machine(),
            free_agent_port(),
            needed,
            polling_often(),
            starting_ray(),
        ):
            ray.init(
                address="local",
                num_cpus=_local_cpus(hardware),
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder.path),
                # Ray's control store keeps records of tasks, for its dashboard alone: 45 MB in 100,000 small steps.
                _system_config=None if dashboard else {"task_events_report_interval_ms": 0},
            )
    except Exception as error:  # Ray raises Exception itself here
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if _TOO_SLOW in reason and num_tries > 1:
            _logger.warning("Ray did not start within 30 s, as on a machine with too much work: starting it again")
            _start(hardware, dashboard=dashboard, num_tries=num_tries - 1)
            return
        # Ray's own settings are named so, such as RAY_memory_usage_threshold.
        given = ", ".join(sorted(name for name in os.environ if re.match("RAY_[a-z]", name) and name != _NICENESS))
        remedy = f"Unset {given}" if given else "Free its memory, disk and ports"
        raise LaunchError(
            f"Ray could not start on this machine: {reason}. {remedy}, or set RAY_ADDRESS to a cluster."
        ) from error
    _silent_jobs.add(ray.get_runtime_context().get_job_id())


def _local_cpus(hardware: Hardware) -> int:
    """Return the number of logical CPUs of a cluster on this machine."""
    return max(os.cpu_count() or 1, hardware.num_workers + max(_LOCAL_DATA_CPUS, hardware.data_cpus))


def dashboard_url() -> str | None:
    """Return the URL of the connected cluster's dashboard, or None if it has no dashboard or there is no cluster."""
    address = dashboard_address() if ray.is_initialized() else None
    return address if address is None or "://" in address else f"http://{address}"


def joining_variables() -> dict[str, str]:
    """Return the environment variables with which other processes of this machine join the connected cluster.

    A cluster that this process started listens on the loopback address, where Ray does not look otherwise.

    Raises:
        LaunchError: this process is not connected.
    """
    if not ray.is_initialized():
        raise LaunchError("no Ray cluster is connected. Call connect() first.")
    return variables_to_join(is_local=is_started_here())


def is_silent() -> bool:
    """Return whether Ray does not print what workers print, as `connect` has connected this process."""
    return ray.get_runtime_context().get_job_id() in _silent_jobs


def is_started_here() -> bool:
    """Return whether this process started the connected cluster, which then is this machine alone."""
    node = connected_node()
    return node is not None and node.head


def log_folder(*, of_failure: bool = False) -> str:
    """Return the folder of Ray's full logs on each node of the connected cluster.

    A cluster that this process started deletes them at its end, but not those of the newest failures.

    Args:
        of_failure: a launch has failed, and the logs must stay.
    """
    node = connected_node()
    if node is not None and node.head and _started is not None and of_failure:
        mark_failed(_started[0].path)
    return "" if node is None else node.get_logs_dir_path()


def auto() -> Hardware:
    """Return the best hardware of the connected cluster: a TPU slice, else all GPUs, else one CPU worker.

    One worker takes all GPUs of a node if all nodes have the same number; else each GPU has a worker. Ray labels the
    nodes of a TPU slice.

    Raises:
        LaunchError: this process is not connected.
    """
    nodes = _living_nodes()
    for node in nodes:
        labels = node.get("Labels", {})
        if "TPU" in node["Resources"] and "ray.io/tpu-topology" in labels:
            pod_type = labels["ray.io/tpu-pod-type"].split("-")[0]
            return tpu(pod_type, labels["ray.io/tpu-topology"])
    gpus = [int(node["Resources"]["GPU"]) for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    if gpus:
        return gpu(len(gpus), gpus[0]) if len(set(gpus)) == 1 else gpu(sum(gpus))
    return cpu(1)


def check_local_resources(hardware: Hardware) -> None:
    """Check that this machine has the devices, if `connect` would start a cluster on it. Takes a tenth of a second.

    The devices are counted as Ray counts them, without jax and without a start of Ray. Nothing is checked if
    `RAY_ADDRESS` names a cluster, or if this process is connected.

    Args:
        hardware: to launch.

    Raises:
        LaunchError: this machine has too few devices; the message has both numbers.
    """
    check_hardware(hardware)
    if hardware.kind == "local" or ray.is_initialized() or _cluster_address() is not None:
        return
    node = {**own_resources(), "CPU": _local_cpus(hardware)}
    shortage = _find_shortage("This machine", [node], hardware, _per_worker(hardware), hardware.data_cpus)
    if shortage is not None:
        raise LaunchError(f"{shortage}. Ask for other hardware, or set RAY_ADDRESS to a cluster that has it.")


def _per_worker(hardware: Hardware) -> dict[str, float]:
    """Return the Ray resources of a worker: its devices, and one CPU."""
    devices: dict[str, float] = {} if hardware.kind == "cpu" else {hardware.kind.upper(): hardware.devices_per_worker}
    if hardware.kind == "gpu" and hardware.accelerator_type is not None:
        devices[_TYPE_RESOURCE + hardware.accelerator_type] = _TYPE_SHARE
    return {"CPU": 1, **devices}


def check_resources(
    hardware: Hardware,
    *,
    data_cpus: int = 0,
    wait_for_resources_s: float = 0.0,
    resources_per_worker: Mapping[str, float] | None = None,
) -> None:
    """Check that the connected cluster has the resources for the smallest group, in total and on each node.

    Args:
        hardware: to launch. `local` hardware needs no cluster.
        data_cpus: CPUs for the tasks of Ray Data, in addition to the workers' CPUs.
        wait_for_resources_s: seconds to wait for missing nodes. They are requested from the cluster's autoscaler, if it
            has one.
        resources_per_worker: Ray resources of each worker; by default the hardware's devices, and one CPU.

    Raises:
        LaunchError: it has too few; the message has both numbers. Or an argument is invalid, or this process is not
            connected.
    """
    check_hardware(hardware)
    check_number("data_cpus", data_cpus, at_least=0, at_most=MAX_COUNT)
    check_number("wait_for_resources_s", wait_for_resources_s, at_least=0, whole=False)
    check_resources_per_worker(resources_per_worker)
    if hardware.kind == "local":
        return
    per_worker = _per_worker(hardware) if resources_per_worker is None else dict(resources_per_worker)

    def find_shortage() -> str | None:
        nodes = [node["Resources"] for node in _living_nodes()]
        return _find_shortage("The Ray cluster", nodes, hardware, per_worker, data_cpus)

    shortage = find_shortage()
    if shortage is not None and wait_for_resources_s > 0:
        _logger.warning("waiting up to %.0f s for more nodes: %s", wait_for_resources_s, shortage)
        request_resources(bundles=[per_worker] * hardware.min_workers + [{"CPU": 1}] * data_cpus)
        try:
            deadline_s = time.monotonic() + wait_for_resources_s
            while shortage is not None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                shortage = find_shortage()
        finally:
            request_resources(bundles=[])  # the workers' placement group is a request too
    if shortage is not None:
        remedy = "Ask for fewer workers, add nodes, or set RAY_ADDRESS to a cluster that has them"
        if is_started_here():
            remedy = "Ask for fewer workers, or start Ray with more: ray.init(num_cpus=...) sets logical CPUs"
        raise LaunchError(f"{shortage}. {remedy}.")


def _living_nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of the nodes of the connected cluster.

    Raises:
        LaunchError: this process is not connected.
    """
    try:
        return [node for node in ray.nodes() if node["Alive"]]
    except RaySystemError as error:
        if ray.is_initialized():
            raise
        raise LaunchError("no Ray cluster is connected. Call connect() first.") from error


def _find_shortage(
    place: str, nodes: list[dict[str, float]], hardware: Hardware, per_worker: Mapping[str, float], data_cpus: int
) -> str | None:
    """Return the resources that nodes lack, as an error without remedy; None if they lack nothing."""
    # The devices first: a cluster without them is the likely mistake. CPUs last, with those of Ray Data.
    for resource in sorted(per_worker, key=lambda name: (name == "CPU", name != hardware.kind.upper())):
        needed, held = _units(per_worker[resource]), [_units(resources.get(resource, 0)) for resources in nodes]
        what = resource
        if resource == "GPU" and hardware.accelerator_type is not None:
            what = f"{hardware.accelerator_type} GPU"
            type_resource = _TYPE_RESOURCE + hardware.accelerator_type
            held = [_units(resources.get(resource, 0)) if type_resource in resources else 0 for resources in nodes]
        if not needed or (resource == "CPU" and hardware.kind != "cpu"):
            continue
        if sum(held) < hardware.min_workers * needed:
            total = _shown(hardware.min_workers * needed)
            return f"{place} must have {total} {what}s for {hardware}, got {_shown(sum(held))}"
        # All devices of a worker are on one node.
        places = sum(count // needed for count in held)
        if places < hardware.min_workers:
            sizes = ", ".join(map(_shown, sorted(held, reverse=True)))
            return (
                f"{place} must have room for {hardware.min_workers} workers of {_shown(needed)} {what}s "
                f"each for {hardware}, got room for {places} on nodes of {sizes} {what}s"
            )
    # Ray gives each worker a CPU, on GPU and TPU nodes too.
    cpus = sum(_units(resources.get("CPU", 0)) for resources in nodes)
    worker_cpus = hardware.min_workers * _units(per_worker.get("CPU", 0))
    all_cpus = worker_cpus + _units(data_cpus)
    if cpus < all_cpus:
        return (
            f"{place} must have {_shown(all_cpus)} CPUs, {_shown(worker_cpus)} for the workers of {hardware} "
            f"and {data_cpus} for the tasks of Ray Data, got {_shown(cpus)}"
        )
    return None


def _units(amount: float) -> int:
    """Return an amount of a resource in ten-thousandths, as Ray counts it: sums of floats are not exact."""
    return round(amount * _UNITS)


def _shown(units: int) -> str:
    return f"{units / _UNITS:g}"
