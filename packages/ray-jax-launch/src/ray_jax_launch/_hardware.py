"""What to run on: how many workers, of how many devices each. Light to import, for command lines."""

import re
from dataclasses import dataclass
from typing import Literal

from ray_jax_launch._errors import LaunchError

# Ray's names of the TPU generations, by the names that people type.
_TPU_TYPES = {
    "v4": "TPU-V4",
    "v5e": "TPU-V5LITEPOD",
    "v5litepod": "TPU-V5LITEPOD",
    "v5p": "TPU-V5P",
    "v6e": "TPU-V6E",
}
_CHIPS_PER_HOST = 4
# These generations have hosts of up to eight chips, which hold a small slice whole.
_SINGLE_HOST_TYPES = ("TPU-V5LITEPOD", "TPU-V6E")
_SINGLE_HOST_CHIPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A group of equal workers. Made by `cpu`, `gpu`, `tpu` or `parse_hardware`.

    >>> parse_hardware("gpu:4x8").num_devices
    32
    """

    kind: Literal["cpu", "gpu", "tpu"]
    """Platform that jax runs on."""

    num_workers: int
    """Worker processes."""

    devices_per_worker: int
    """Devices that jax sees in each of them."""

    accelerator_type: str | None = None
    """Ray's name of the TPU generation."""

    topology: str | None = None
    """Of a TPU slice, such as 4x4."""

    @property
    def num_devices(self) -> int:
        """Devices of all workers."""
        return self.num_workers * self.devices_per_worker

    def __str__(self) -> str:
        """The text that `parse_hardware` reads."""
        if self.kind == "cpu":
            return f"cpu:{self.num_workers}"
        if self.kind == "gpu":
            each = f"x{self.devices_per_worker}" if self.devices_per_worker > 1 else ""
            return f"gpu:{self.num_workers}{each}"
        name = next(name for name, type_ in _TPU_TYPES.items() if type_ == self.accelerator_type)
        return f"tpu:{name}:{self.topology}"


def cpu(num_workers: int) -> Hardware:
    """That many CPU processes of one jax device each, joined by jax.distributed.

    Raises:
        LaunchError: fewer than one.
    """
    _at_least_one(num_workers, "CPU workers")
    return Hardware(kind="cpu", num_workers=num_workers, devices_per_worker=1)


def gpu(num_workers: int, gpus_per_worker: int = 1) -> Hardware:
    """That many workers of so many GPUs each.

    Raises:
        LaunchError: fewer than one of either.
    """
    _at_least_one(num_workers, "GPU workers")
    _at_least_one(gpus_per_worker, "GPUs per worker")
    return Hardware(kind="gpu", num_workers=num_workers, devices_per_worker=gpus_per_worker)


def tpu(accelerator_type: str, topology: str) -> Hardware:
    """A TPU slice, one worker per host.

    A host has 4 chips, except that a v5e or v6e slice of at most 8 chips is one host.

    Args:
        accelerator_type: v4, v5e, v5p or v6e.
        topology: the slice's chips along its axes, such as 4x4 or 2x2x2.

    Raises:
        LaunchError: the type is unknown, or the topology is not one.
    """
    ray_type = _TPU_TYPES.get(accelerator_type.lower())
    if ray_type is None:
        raise LaunchError(f"expected a TPU type among {', '.join(_TPU_TYPES)}, got {accelerator_type!r}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise LaunchError(f"expected a TPU topology such as 4x4 or 2x2x2, got {topology!r}")
    chips = 1
    for length in topology.split("x"):
        chips *= int(length)
    single_host = ray_type in _SINGLE_HOST_TYPES and chips <= _SINGLE_HOST_CHIPS
    per_host = chips if single_host else min(chips, _CHIPS_PER_HOST)
    if chips % per_host:
        raise LaunchError(f"expected a topology of whole hosts of {per_host} chips, got {topology} with {chips} chips")
    return Hardware(
        kind="tpu",
        num_workers=chips // per_host,
        devices_per_worker=per_host,
        accelerator_type=ray_type,
        topology=topology,
    )


def parse_hardware(text: str) -> Hardware:
    """Read `cpu:2`, `gpu:8`, `gpu:4x8` (four workers of eight) or `tpu:v6e:4x4`.

    Raises:
        LaunchError: it is none of these.
    """
    kind, _, rest = text.partition(":")
    if kind == "cpu" and rest.isascii() and rest.isdigit():
        return cpu(int(rest))
    if kind == "gpu" and (match := re.fullmatch(r"(\d+)(?:x(\d+))?", rest, re.ASCII)):
        return gpu(int(match[1]), int(match[2] or 1))
    if kind == "tpu" and rest.count(":") == 1:
        return tpu(*rest.split(":"))
    raise LaunchError(
        f"expected hardware as auto, cpu:WORKERS, gpu:WORKERS, gpu:WORKERSxGPUS or tpu:TYPE:TOPOLOGY, got {text!r}"
    )


def _at_least_one(number: int, what: str) -> None:
    if number < 1:
        raise LaunchError(f"expected at least 1 for the number of {what}, got {number}")
