"""The devices that `--hardware` names for the command `plan`. They need not be in this machine."""

from dataclasses import dataclass
from typing import Any

import jax

from nnx_gpt2 import MemoryEstimate, absent_devices, device_memory
from pretrain._errors import UsageError
from pretrain._surroundings.typed_command import typed_arguments
from pretrain._training.device_memory import device_memory_bytes
from ray_jax_launch import Hardware, gpu_memory_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Devices to plan for."""

    devices: list[Any]
    usable_bytes: int | None
    """Memory of each device that jax can use; None if the compiler knows it alone."""

    def has(self, memory: MemoryEstimate) -> bool:
        """Return whether a step fits the memory of each device."""
        return self.usable_bytes is None or memory.peak_bytes <= self.usable_bytes

    def __str__(self) -> str:
        """Return the number and the kind of the devices."""
        return f"{len(self.devices)} x {self.devices[0].device_kind}"


def find_target(hardware: Hardware | None, *, only_here: bool) -> Target:
    """Return the devices of hardware, of an elastic group at its smallest.

    Args:
        hardware: the hardware; None is the devices of this machine.
        only_here: True if they must be in this machine.

    Raises:
        UsageError: the hardware is not in this machine, and must be, has no type, or no installed compiler knows it; or
            it is several slices of TPUs.
    """
    if hardware is None or hardware.kind == "local":
        return Target(devices=jax.devices(), usable_bytes=device_memory_bytes())
    num_devices = hardware.min_workers * hardware.devices_per_worker
    if hardware.kind == "cpu" or (hardware.kind == "gpu" and hardware.accelerator_type is None):
        return Target(devices=_present_devices(hardware, num_devices), usable_bytes=device_memory_bytes())
    if only_here:
        raise UsageError(
            f"--hardware must be devices of this machine with --measure, got {hardware}. Leave out one of the two."
        )
    # An absent GPU's compiler looks for a driver, unless jax is told to use the CPU.
    jax.config.update("jax_platforms", "cpu")
    name = _name_of_absent(hardware)
    memory_bytes = device_memory(name)
    usable_bytes = None if memory_bytes is None else int(gpu_memory_share() * memory_bytes)
    try:
        devices = absent_devices(name)
    except ValueError as error:
        extra = "tpu" if hardware.kind == "tpu" else "cuda12"
        raise UsageError(
            f"--hardware {hardware}: {error} In a clone: uv run --extra {extra} apps/pretrain {typed_arguments('plan')}"
        ) from error
    return Target(devices=devices, usable_bytes=usable_bytes)


def _present_devices(hardware: Hardware, num_devices: int) -> list[Any]:
    if hardware.kind == "cpu":
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", num_devices)
        except RuntimeError:  # jax has started, and keeps its devices
            pass
    try:
        devices = jax.devices(hardware.kind)
    except RuntimeError:
        devices = []
    if len(devices) < num_devices:
        remedy = f"Add the type, such as {hardware}:h100" if hardware.kind == "gpu" else "Start a new process"
        raise UsageError(
            f"--hardware must be devices of this machine, or of a type, in a plan, got {hardware} with "
            f"{len(devices)} such devices here. {remedy}."
        )
    return devices[:num_devices]


def _name_of_absent(hardware: Hardware) -> str:
    """Return the name for `absent_devices`, which knows one slice, and GPUs by their hosts."""
    if hardware.kind == "tpu":
        if hardware.min_workers > hardware.workers_per_slice:
            raise UsageError(f"--hardware must be one slice of TPUs in a plan, got {hardware}. Plan for one.")
        kind, name, topology, *_ = str(hardware).split(":")
        return f"{kind}:{name}:{topology}"
    assert hardware.accelerator_type is not None
    hosts = f"{hardware.min_workers}x" if hardware.devices_per_worker > 1 else ""
    gpus = hardware.devices_per_worker if hosts else hardware.min_workers
    return f"gpu:{hosts}{gpus}:{hardware.accelerator_type.lower()}"
