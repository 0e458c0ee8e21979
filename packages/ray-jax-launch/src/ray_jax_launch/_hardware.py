"""What to run on: how many workers, of how many devices each. Light to import, for command lines."""

import re
from dataclasses import dataclass
from typing import Literal

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._numbers import check_number

# Ray's names of the TPU generations, by the names that people type.
_TPU_TYPES = {
    "v2": "TPU-V2",
    "v3": "TPU-V3",
    "v4": "TPU-V4",
    "v5e": "TPU-V5LITEPOD",
    "v5litepod": "TPU-V5LITEPOD",
    "v5p": "TPU-V5P",
    "v6e": "TPU-V6E",
    "v7x": "TPU-V7X",
}
_CHIPS_PER_HOST = 4
# These generations have hosts of up to eight chips, which hold a small slice whole.
_SINGLE_HOST_TYPES = ("TPU-V5LITEPOD", "TPU-V6E")
_SINGLE_HOST_CHIPS = 8

_COUNT = "([0-9]{1,6})"
_FORMS = (
    "auto, cpu:WORKERS, cpu:WORKERSxDEVICES, gpu:WORKERS, gpu:WORKERSxGPUS, tpu:TYPE:TOPOLOGY or "
    "tpu:TYPE:TOPOLOGY:SLICES, where a range such as 1-4 in the place of WORKERS or SLICES is elastic"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A group of equal workers. Made by `cpu`, `gpu`, `tpu` or `parse_hardware`.

    >>> parse_hardware("gpu:4x8").num_devices
    32
    >>> list(parse_hardware("cpu:1-4").worker_counts)
    [1, 2, 3, 4]
    """

    kind: Literal["cpu", "gpu", "tpu"]
    """Platform that jax runs on."""

    num_workers: int
    """Worker processes; of an elastic group, the most that it grows to."""

    devices_per_worker: int
    """Devices that jax sees in each of them."""

    min_workers: int
    """The fewest workers that training goes on with; `num_workers` where the group is not elastic."""

    accelerator_type: str | None = None
    """Ray's name of the TPU generation."""

    topology: str | None = None
    """Of a TPU slice, such as 4x4."""

    workers_per_slice: int = 1
    """Hosts of a TPU slice: groups grow and shrink by whole slices."""

    @property
    def num_devices(self) -> int:
        """Devices of all workers."""
        return self.num_workers * self.devices_per_worker

    @property
    def is_elastic(self) -> bool:
        """The number of workers may change while training."""
        return self.min_workers < self.num_workers

    @property
    def worker_counts(self) -> range:
        """Every number of workers that the group may have, from the fewest to the most."""
        return range(self.min_workers, self.num_workers + 1, self.workers_per_slice)

    def __str__(self) -> str:
        """The text that `parse_hardware` reads."""
        size, smallest = self.num_workers // self.workers_per_slice, self.min_workers // self.workers_per_slice
        groups = f"{smallest}-{size}" if self.is_elastic else f"{size}"
        if self.kind == "tpu":
            name = next(name for name, type_ in _TPU_TYPES.items() if type_ == self.accelerator_type)
            return f"tpu:{name}:{self.topology}" + (f":{groups}" if groups != "1" else "")
        return f"{self.kind}:{groups}" + (f"x{self.devices_per_worker}" if self.devices_per_worker > 1 else "")


def cpu(num_workers: int, devices_per_worker: int = 1, *, min_workers: int | None = None) -> Hardware:
    """That many CPU processes, joined by jax.distributed.

    Args:
        num_workers: processes.
        devices_per_worker: jax devices that each process makes of its CPUs.
        min_workers: fewer, for an elastic group: see `Hardware.min_workers`.

    Raises:
        LaunchError: fewer than one of any, or more at the least than at the most.
    """
    devices_per_worker = check_number("the number of devices per worker", devices_per_worker, at_least=1)
    num_workers, min_workers = _check_range(num_workers, min_workers, "CPU workers")
    return Hardware(kind="cpu", num_workers=num_workers, devices_per_worker=devices_per_worker, min_workers=min_workers)


def gpu(num_workers: int, gpus_per_worker: int = 1, *, min_workers: int | None = None) -> Hardware:
    """That many workers of so many GPUs each.

    Args:
        num_workers: processes.
        gpus_per_worker: GPUs of each, on one node.
        min_workers: fewer, for an elastic group: see `Hardware.min_workers`.

    Raises:
        LaunchError: fewer than one of any, or more at the least than at the most.
    """
    gpus_per_worker = check_number("the number of GPUs per worker", gpus_per_worker, at_least=1)
    num_workers, min_workers = _check_range(num_workers, min_workers, "GPU workers")
    return Hardware(kind="gpu", num_workers=num_workers, devices_per_worker=gpus_per_worker, min_workers=min_workers)


def tpu(accelerator_type: str, topology: str, num_slices: int = 1, *, min_slices: int | None = None) -> Hardware:
    """TPU slices, one worker per host.

    A host has 4 chips, except that a v5e or v6e slice of at most 8 chips is one host.

    Args:
        accelerator_type: v2, v3, v4, v5e, v5p, v6e or v7x.
        topology: a slice's chips along its axes, such as 4x4 or 2x2x2.
        num_slices: equal slices.
        min_slices: fewer, for an elastic group, which grows and shrinks by whole slices.

    Raises:
        LaunchError: the type is unknown, or the topology is not one.
    """
    ray_type = _TPU_TYPES.get(str(accelerator_type).lower())
    if ray_type is None:
        raise LaunchError(f"expected a TPU type among {', '.join(_TPU_TYPES)}, got {accelerator_type!r}")
    if not re.fullmatch(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){1,2}", str(topology)):
        raise LaunchError(f"expected a TPU topology such as 4x4 or 2x2x2, got {topology!r}")
    num_slices, min_slices = _check_range(num_slices, min_slices, "TPU slices")
    chips = 1
    for length in topology.split("x"):
        chips *= int(length)
    single_host = ray_type in _SINGLE_HOST_TYPES and chips <= _SINGLE_HOST_CHIPS
    per_host = chips if single_host else min(chips, _CHIPS_PER_HOST)
    if chips % per_host:
        raise LaunchError(f"expected a topology of whole hosts of {per_host} chips, got {topology} with {chips} chips")
    return Hardware(
        kind="tpu",
        num_workers=chips // per_host * num_slices,
        devices_per_worker=per_host,
        min_workers=chips // per_host * min_slices,
        accelerator_type=ray_type,
        topology=topology,
        workers_per_slice=chips // per_host,
    )


def parse_hardware(text: str) -> Hardware:
    """Read `cpu:2`, `cpu:1-4` (elastic), `gpu:8`, `gpu:4x8` (four workers of eight), `tpu:v6e:4x4` or `tpu:v6e:4x4:2`.

    Raises:
        LaunchError: it is none of these.
    """
    if text == "auto":
        raise LaunchError("expected hardware that is known beforehand, got 'auto': call auto(), which asks the cluster")
    kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind in ("cpu", "gpu") and (match := re.fullmatch(rf"(?:{_COUNT}-)?{_COUNT}(?:x{_COUNT})?", rest)):
        make = cpu if kind == "cpu" else gpu
        return make(int(match[2]), int(match[3] or 1), min_workers=int(match[1]) if match[1] else None)
    if kind == "tpu" and (match := re.fullmatch(rf"([^:]+):([^:]+)(?::(?:{_COUNT}-)?{_COUNT})?", rest)):
        return tpu(match[1], match[2], int(match[4] or 1), min_slices=int(match[3]) if match[3] else None)
    raise LaunchError(f"expected hardware as {_FORMS}, got {text!r}")


def _check_range(number: int, smallest: int | None, what: str) -> tuple[int, int]:
    """The number of workers or slices, and the smallest that it may shrink to."""
    at_least = 1 if smallest is None else check_number(f"the smallest number of {what}", smallest, at_least=1)
    number = check_number(f"the number of {what}", number, at_least=at_least)
    return number, number if smallest is None else at_least
