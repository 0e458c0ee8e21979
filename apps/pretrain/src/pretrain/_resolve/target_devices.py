"""The devices that `--hardware` names, to compile for before a start. They need not be in this machine."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from nnx_gpt2 import DeviceFacts, MemoryEstimate, absent_devices, device_facts
from pretrain._errors import UsageError
from pretrain._resolve.devices import devices_of_worker
from pretrain._surroundings.typed_command import typed_arguments
from ray_jax_launch import Hardware, gpu_memory_share, tpu_flags

_COMPILERS = {"tpu": ["libtpu"], "gpu": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}
"""Modules that bring the compiler of a platform."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A device in a mesh of which shapes are asked, and for which nothing is compiled."""

    id: int
    process_index: int
    platform: str = "none"
    device_kind: str = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Devices to compile for."""

    devices: list[Any]
    """The devices, here or absent."""
    usable_bytes: int
    """Memory of each device that jax can use. The compiler of TPUs keeps a part of it."""
    facts: DeviceFacts | None = None
    """The facts about a device whose compiler is not installed; None if it is."""

    @property
    def device(self) -> Any:
        """One of the devices, with the attributes of those of jax."""
        return self.devices[0] if self.facts is None else self.facts

    def has(self, memory: MemoryEstimate | None) -> bool:
        """Return whether a step fits the memory of each device; None is one that the compiler rejects."""
        return memory is not None and memory.peak_bytes <= self.usable_bytes

    def __str__(self) -> str:
        """Return the number and the kind of the devices."""
        return f"{len(self.devices)} x {self.device.device_kind}"


def find_target(hardware: Hardware | None, *, only_here: bool) -> Target:
    """Return the devices of hardware, of an elastic group at its smallest.

    Args:
        hardware: the hardware; None is the devices of this machine.
        only_here: True if they must be in this machine.

    Raises:
        UsageError: the hardware is not in this machine, and must be, or has no known type; or it is several slices of
            TPUs.
    """
    if hardware is None or hardware.kind == "local":
        return Target(devices=jax.devices(), usable_bytes=device_memory_bytes())
    per_worker = devices_of_worker(hardware)
    num_devices = hardware.min_workers * per_worker
    if hardware.kind == "cpu" or (hardware.kind == "gpu" and hardware.accelerator_type is None):
        return Target(devices=_present_devices(hardware, num_devices), usable_bytes=device_memory_bytes())
    if only_here:
        raise UsageError(
            f"--hardware must be devices of this machine with --measure, got {hardware}. Leave out one of the two."
        )
    # An absent GPU's compiler looks for a driver, unless jax is told to use the CPU.
    jax.config.update("jax_platforms", "cpu")
    name = _name_of_absent(hardware)
    devices: list[Any]
    try:
        facts = device_facts(name)
        is_tpu = facts.platform == "tpu"
        usable_bytes = facts.memory_bytes if is_tpu else int(gpu_memory_share() * facts.memory_bytes)
        if not any(map(find_spec, _COMPILERS[facts.platform])):
            devices = [_Place(number, number // per_worker) for number in range(num_devices)]
            return Target(devices=devices, usable_bytes=usable_bytes, facts=facts)
        if is_tpu:  # the compiler starts with the flags of the workers
            os.environ["LIBTPU_INIT_ARGS"] = f"{tpu_flags()} {os.environ.get('LIBTPU_INIT_ARGS', '')}"
        devices = absent_devices(name)
    except ValueError as error:
        raise UsageError(f"--hardware {hardware}: {error}") from error
    return Target(devices=devices, usable_bytes=usable_bytes)


def device_memory_bytes() -> int:
    """Return the memory of this process's first device. CPU devices share the memory of the host."""
    device = jax.local_devices()[0]
    if stats := device.memory_stats():
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def extra_of(target: Target) -> str:
    """Return the name of the extra that has the compiler of an accelerator."""
    return "tpu" if target.device.platform == "tpu" else "cuda12"


def missing_compiler(target: Target) -> str:
    """Return a sentence about the compiler of devices, with the command that has it."""
    command = f"uv run --extra {extra_of(target)} apps/pretrain {typed_arguments('plan')}"
    return f"The compiler of these devices is not installed; on Linux, it comes with: {command}"


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
            f"--hardware must be devices of this machine, or of a type, to compile for them, got {hardware} with "
            f"{len(devices)} such devices here. {remedy}."
        )
    return devices[:num_devices]


def _name_of_absent(hardware: Hardware) -> str:
    """Return the name for `absent_devices`, which knows one slice, and GPUs by their hosts."""
    if hardware.kind == "tpu":
        if hardware.min_workers > hardware.workers_per_slice:
            raise UsageError(f"--hardware must be one slice of TPUs to compile for it, got {hardware}. Give one slice.")
        kind, name, topology, *_ = str(hardware).split(":")
        return f"{kind}:{name}:{topology}"
    assert hardware.accelerator_type is not None
    hosts = f"{hardware.min_workers}x" if hardware.devices_per_worker > 1 else ""
    gpus = hardware.devices_per_worker if hosts else hardware.min_workers
    return f"gpu:{hosts}{gpus}:{hardware.accelerator_type.lower()}"
