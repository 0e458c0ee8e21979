"""Checks of the start of Ray, and of the ports that it needs."""

import contextlib
import os
import socket
import time
from typing import Any

from pretrain._doctor.finding import Finding, fail, ok, warn
from pretrain._surroundings.child import ChildError, call_in_child
from ray_jax_launch import Hardware

# Ray's defaults for `ray start --head`, whose other ports are free ones: ray/_private/ray_constants.py of Ray 2.60.
_PORTS = {6379: "control store", 8265: "dashboard", 10001: "client server"}
# A cluster on this machine, and the coordinator of jax.distributed, take free ports of the loopback address.
_NUM_FREE_PORTS, _CONNECT_WITHIN_S = 16, 2.0
# A start of Ray that takes 30 s is repeated twice: `connect` of ray-jax-launch.
_WITHIN_S, _TASK_WITHIN_S = 120.0, 60.0


def check_ports() -> list[Finding]:
    """Check that free ports exist on this machine, and that those of `ray start --head` are free."""
    name = "ports"
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(_NUM_FREE_PORTS):
                server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                stack.enter_context(socket.create_connection(server.getsockname(), timeout=_CONNECT_WITHIN_S))
    except OSError as error:
        found = f"no port of 127.0.0.1 can be used: {error.strerror or error}"
        return [fail(name, found, "Start the loopback interface: `ip link set lo up`.")]
    taken = [f"{port} ({what})" for port, what in _PORTS.items() if not _is_free(port)]
    if taken and not os.environ.get("RAY_ADDRESS"):
        found = f"in use: {', '.join(taken)}. A run on this machine takes other ports; `ray start --head` does not"
        return [warn(name, found, "If it is a cluster to train on, set RAY_ADDRESS.")]
    return [ok(name, "free" if not taken else f"in use: {', '.join(taken)}")]


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def check_ray(hardware: Hardware | None) -> list[Finding]:
    """Check that Ray starts, or that the cluster of `RAY_ADDRESS` answers, and has the devices of the hardware.

    Args:
        hardware: to use; None for `auto`.
    """
    name = "ray"
    if hardware is not None and hardware.kind == "local":
        return [ok(name, "not needed for --hardware local")]
    try:
        started = call_in_child(start_ray, None if hardware is None else str(hardware), within_s=_WITHIN_S)
    except ChildError as error:
        return [fail(name, str(error), "Or train on --hardware local, which needs no Ray.")]
    place = os.environ.get("RAY_ADDRESS") or "a cluster on this machine"
    findings = [ok(name, f"{place} ran a task after {started['seconds']:.0f} s")]
    if started["shortage"]:
        remedy = "Choose other --hardware, or set RAY_ADDRESS to a cluster that has it."
        return [*findings, fail("hardware", started["shortage"], remedy)]
    return [*findings, ok("hardware", started["hardware"])]


def start_ray(text: str | None) -> dict[str, Any]:
    """Start Ray or join a cluster, run a task, and find the devices; for a child process.

    Args:
        text: the hardware, or None for `auto`.

    Raises:
        LaunchError: Ray does not start, or the cluster does not answer.
        RayError: the task has failed.
    """
    import ray  # in the child alone: it takes a second

    from ray_jax_launch import LaunchError, auto, check_resources, connect, parse_hardware

    began_s = time.monotonic()
    hardware = None if text is None else parse_hardware(text)
    connect(hardware)

    @ray.remote(num_cpus=0)
    def pid() -> int:
        return os.getpid()

    ray.get(pid.remote(), timeout=_TASK_WITHIN_S)
    seconds, shortage = time.monotonic() - began_s, ""
    hardware = auto() if hardware is None else hardware
    try:
        check_resources(hardware, data_cpus=hardware.data_cpus)
    except LaunchError as error:
        shortage = str(error)
    return {"seconds": seconds, "hardware": str(hardware), "shortage": shortage}
