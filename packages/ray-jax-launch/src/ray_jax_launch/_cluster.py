"""Finding or starting the Ray cluster, and what it has."""

import logging
import os
import socket
from urllib.parse import urlsplit

import ray
from ray._private import worker
from ray.exceptions import AuthenticationError

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._hardware import Hardware, cpu, gpu, tpu

# CPUs that Ray Data gets beside the workers' own: at the least, and in a cluster started here. Train reserves its CPUs
# first, and with none left over Data would wait for ever.
DATA_CPUS, _LOCAL_DATA_CPUS = 1, 2
_CONNECT_TIMEOUT_S = 5


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
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, workers + _LOCAL_DATA_CPUS),
            include_dashboard=False,
            **quiet,
        )
    except Exception as error:  # Ray has no class of its own for this
        raise LaunchError(f"expected Ray to start on this machine, but it did not: {error}") from error


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
    node = worker.global_worker.node
    return node is not None and node.head


def log_folder() -> str:
    """Where Ray keeps its full logs, on each node of the connected cluster."""
    node = worker.global_worker.node
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


def check_resources(hardware: Hardware, *, with_data: bool = False) -> None:
    """Compare what is asked for, at the least, with what the connected cluster has, in all and on each node.

    Args:
        hardware: what will be launched.
        with_data: whether Ray Data is to feed it, which needs a CPU beside the workers'.

    Raises:
        LaunchError: it has too little; the message has both numbers.
    """
    resource = hardware.kind.upper()
    per_worker = 1 if hardware.kind == "cpu" else hardware.devices_per_worker
    held = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    needed = hardware.min_workers * per_worker
    if sum(held) < needed:
        raise LaunchError(
            f"expected {needed} {resource}s in the Ray cluster, as {hardware} needs, found {sum(held)}: ask for "
            "fewer, or set RAY_ADDRESS to a cluster that has them"
        )
    # A worker lives on one node, whose devices another worker's do not complete.
    places = sum(count // per_worker for count in held)
    if places < hardware.min_workers:
        raise LaunchError(
            f"expected room for {hardware.min_workers} workers of {per_worker} {resource}s each, as {hardware} needs, "
            f"found room for {places} on nodes of {', '.join(map(str, sorted(held, reverse=True)))} {resource}s: ask "
            "for workers that fit the nodes"
        )
    cpus = sum(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    worker_cpus = 0 if hardware.kind == "tpu" else hardware.min_workers
    if with_data and cpus < worker_cpus + DATA_CPUS:
        raise LaunchError(
            f"expected {worker_cpus + DATA_CPUS} CPUs in the Ray cluster, {worker_cpus} for the workers of {hardware} "
            f"and {DATA_CPUS} for the tasks of Ray Data, found {cpus}: ask for fewer workers, or add a node of CPUs"
        )
