"""The devices that a program is compiled for.

A step is compiled for the devices of its mesh. These need not be devices of this machine: the compilers of TPUs and
GPUs run on any host, and a step for a CPU can be made on the host of a GPU.
"""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, use_abstract_mesh


@dataclass(frozen=True, slots=True)
class Target:
    """The devices of a program."""

    device: Any
    """One of them. They are of one kind."""

    num_devices: int | None
    """Their number. None is unknown: the program is traced outside a step, on a host of several devices."""

    @property
    def platform(self) -> str:
        """Name of the platform, such as `cpu`, `gpu` or `tpu`."""
        return self.device.platform


_TARGET: ContextVar[Target] = ContextVar("nnx_gpt2_target")


def default_device() -> Any:
    """Return the device of arrays that have no other place, which `jax.default_device` sets."""
    config: Any = jax.config
    chosen = config.jax_default_device
    return jax.local_devices(backend=chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def target_of(mesh: Mesh | None) -> Target:
    """Return the devices of a step over a mesh. Without a mesh it is the default device."""
    return Target(default_device(), 1) if mesh is None else Target(mesh.devices.flat[0], mesh.size)


@contextlib.contextmanager
def compiled_for(mesh: Mesh | None) -> Iterator[None]:
    """Set the devices, and the mesh that `constrain` and the loss use, while jit traces a step."""
    with (
        _compiled_for(target_of(mesh)),
        contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield


@contextlib.contextmanager
def compiled_for_each(mesh: Mesh) -> Iterator[None]:
    """Set the device while jit traces a program that runs on each device of a mesh alone."""
    with _compiled_for(Target(mesh.devices.flat[0], 1)):
        yield


@contextlib.contextmanager
def _compiled_for(target: Target) -> Iterator[None]:
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_for(x: Any) -> Target:
    """Return the devices of the code that computes with an array, which jit may be tracing."""
    if (target := _TARGET.get(None)) is not None:
        return target
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        devices = x.devices()
        return Target(next(iter(devices)), len(devices))
    return Target(default_device(), 1 if jax.device_count() == 1 else None)


# Ampere is NVIDIA's first generation with bfloat16: CUDA C++ Programming Guide, "Compute Capabilities".
_FIRST_CAPABILITY = 8.0


def compute_capability(device: Any) -> float | None:
    """Return the compute capability of an NVIDIA GPU, such as 7.5, or None for another device.

    Args:
        device: a device of jax.
    """
    # AMD's GPUs have a name here, such as gfx90a. Other devices lack the attribute.
    text = getattr(device, "compute_capability", "")
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else None


def has_bfloat16(device: Any) -> bool:
    """Return whether a device computes bfloat16 in hardware: every device but NVIDIA GPUs below compute capability 8.

    The older GPUs emulate it, and cuDNN has no flash attention for them.

    Args:
        device: a device of jax.
    """
    capability = compute_capability(device)
    return capability is None or capability >= _FIRST_CAPABILITY
