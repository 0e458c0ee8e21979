"""Finding or starting the Ray cluster, and what it has."""

import logging
import os
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import AuthenticationError

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._hardware import Hardware, cpu, gpu, tpu
from ray_jax_launch._ray_internals import connected_node, own_process_groups
from ray_jax_launch._reaper import start_reaper

# CPUs that Ray Data gets beside the workers' own: at the least, and in a cluster started here. Train reserves its CPUs
# first, and with none left over Data would wait for ever.
DATA_CPUS, _LOCAL_DATA_CPUS = 1, 2
_CONNECT_TIMEOUT_S = 5
_POLL_S = 1.0

_logger = logging.getLogger("ray_jax_launch")


def connect(hardware: Hardware | None = None) -> None:
    """Connect to the cluster that `RAY_ADDRESS` names, or start one on this machine.

    The started one counts CPUs logically: enough for the workers asked for and for Ray Data, however
    few the machine has.

    Args:
        hardware: what will be launched; None where that is still to be found out.

    Raises:
        LaunchError: the cluster does not answer.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        try:
            _check_answers(address)
            ray.init(address=address, **quiet)
        except (OSError, ValueError, AuthenticationError) as error:
            # Ray tells of a refused token in the text of an error's cause alone.
            if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error.__cause__):
                raise LaunchError(
                    f"expected entry to the Ray cluster at {address} (RAY_ADDRESS), but it wants the token it was "
                    "started with: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if ~/.ray/auth_token has another"
                ) from None
            raise LaunchError(
                f"expected a Ray cluster at {address} (RAY_ADDRESS), but it does not answer ({error}): start it, or "
                "unset RAY_ADDRESS to run on this machine alone"
            ) from error
        return
    workers = hardware.num_workers if hardware is not None else 1
    try:
        with own_process_groups():
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, workers + _LOCAL_DATA_CPUS),
                include_dashboard=False,
                **quiet,
            )
    except Exception as error:  # Ray has no class of its own for this
        raise LaunchError(f"expected Ray to start on this machine, but it did not: {error}") from error
    node = connected_node()
    assert node is not None, "ray.init has started it"
    processes: Any = node.all_processes  # lists by kind; Ray declares it as empty
    start_reaper(info.process.pid for infos in processes.values() for info in infos)


def _check_answers(address: str) -> None:
    """Knock where the cluster should be: Ray itself would wait for minutes.

    Raises:
        OSError: nobody opens.
    """
    if address != "auto":
        where = urlsplit(address if "://" in address else f"ray://{address}")
        socket.create_connection((where.hostname or "", where.port or 6379), timeout=_CONNECT_TIMEOUT_S).close()


def is_started_here() -> bool:
    """Whether this process started the connected cluster, which then is this machine alone."""
    node = connected_node()
    return node is not None and node.head


def log_folder() -> str:
    """Where Ray keeps its full logs, on each node of the connected cluster."""
    node = connected_node()
    return "" if node is None else node.get_logs_dir_path()


def auto() -> Hardware:
    """The best that the connected cluster has: a TPU slice, else all GPUs, else one CPU worker.

    One worker takes all the GPUs of a node, if the nodes have equally many; else each GPU has a worker.
    A TPU slice is found by the labels that its nodes carry.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for node in nodes:
        labels = node.get("Labels", {})
        if "TPU" in node["Resources"] and "ray.io/tpu-topology" in labels:
            pod_type = labels["ray.io/tpu-pod-type"].split("-")[0]
            return tpu(pod_type, labels["ray.io/tpu-topology"])
    gpus = [int(node["Resources"]["GPU"]) for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    if gpus:
        return gpu(len(gpus), gpus[0]) if len(set(gpus)) == 1 else gpu(sum(gpus))
    return cpu(1)


def check_resources(hardware: Hardware, *, data_cpus: int = 0, wait_for_resources_s: float = 0.0) -> None:
    """Compare what is asked for, at the least, with what the connected cluster has, in all and on each node.

    Args:
        hardware: what will be launched.
        data_cpus: CPUs for the tasks of Ray Data, beside those of the workers.
        wait_for_resources_s: seconds to wait for nodes that the cluster lacks. They are requested from its autoscaler,
            if it has one.

    Raises:
        LaunchError: it has too little; the message has both numbers.
    """
    shortage = _find_shortage(hardware, data_cpus)
    if shortage is not None and wait_for_resources_s > 0:
        _logger.warning("waiting up to %.0f s for more nodes: %s", wait_for_resources_s, shortage)
        per_worker = {hardware.kind.upper(): hardware.devices_per_worker, "CPU": 1}
        request_resources(bundles=[per_worker] * hardware.min_workers + [{"CPU": 1}] * data_cpus)
        try:
            deadline_s = time.monotonic() + wait_for_resources_s
            while shortage is not None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                shortage = _find_shortage(hardware, data_cpus)
        finally:
            request_resources(bundles=[])  # the placement group of the workers is a request of its own
    if shortage is not None:
        remedy = "Ask for fewer workers, add nodes, or set RAY_ADDRESS to a cluster that has them"
        raise LaunchError(f"{shortage}. {remedy}")


def _find_shortage(hardware: Hardware, data_cpus: int) -> str | None:
    """What the connected cluster lacks, in a sentence without its end; None where it lacks nothing."""
    resource = hardware.kind.upper()
    per_worker = 1 if hardware.kind == "cpu" else hardware.devices_per_worker
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    held = [int(resources.get(resource, 0)) for resources in nodes]
    needed = hardware.min_workers * per_worker
    if sum(held) < needed:
        return f"The Ray cluster must have {needed} {resource}s for {hardware}, got {sum(held)}"
    # A worker lives on one node, whose devices another worker's do not complete.
    places = sum(count // per_worker for count in held)
    if places < hardware.min_workers:
        return (
            f"The Ray cluster must have room for {hardware.min_workers} workers of {per_worker} {resource}s each for "
            f"{hardware}, got room for {places} on nodes of {', '.join(map(str, sorted(held, reverse=True)))} "
            f"{resource}s"
        )
    # Ray gives a worker a CPU whatever else it computes on.
    cpus = sum(int(resources.get("CPU", 0)) for resources in nodes)
    if cpus < hardware.min_workers + data_cpus:
        return (
            f"The Ray cluster must have {hardware.min_workers + data_cpus} CPUs, {hardware.min_workers} for the "
            f"workers of {hardware} and {data_cpus} for the tasks of Ray Data, got {cpus}"
        )
    return None
