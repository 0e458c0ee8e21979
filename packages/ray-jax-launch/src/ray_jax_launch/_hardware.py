"""Hardware presets: the number of workers, and of devices per worker. Imports neither Ray nor jax."""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._numbers import MAX_COUNT, check_choice, check_number, check_type

# Ray's names of the TPU generations, by the names that users type.
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
# These generations have hosts of up to eight chips: a small slice is one host.
_SINGLE_HOST_TYPES = ("TPU-V5LITEPOD", "TPU-V6E")
_SINGLE_HOST_CHIPS = 8

_COUNT = "([0-9]{1,6})"
_GPU_TYPE = "[A-Za-z][A-Za-z0-9-]{0,31}"
_FORMS = (
    "auto, cpu:WORKERS, cpu:WORKERSxDEVICES, gpu:WORKERS, gpu:WORKERSxGPUS, gpu:WORKERSxGPUS:TYPE, "
    "tpu:TYPE:TOPOLOGY, tpu:TYPE:TOPOLOGY:SLICES or local, where WORKERS or SLICES may be a range such as 1-4 (elastic)"
)

# The newer name comes first. jax rejects the two together.
_GPU_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# jax's default of 0.75 leaves a quarter unused. The rest is for CUDA's context and NCCL. NVIDIA's guide to jax on GPUs
# takes 0.8 to 0.9.
_GPU_MEMORY_SHARE = 0.9

# The sum of gradients over TPUs runs beside the backward pass that still computes others. By default the compiler joins
# all gradients into one all-reduce, which waits for the last of them. The first two flags are MaxText's for all-reduces
# (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py); 25 MiB are the buckets of PyTorch's
# DistributedDataParallel.
_TPU_FLAGS = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_jf_crs_combiner_threshold_in_bytes": str(25 << 20),
}

_KINDS = ("cpu", "gpu", "tpu", "local")
_WORKERS_PER_DATA_CPU = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Equal workers, and the devices of each. Made by `cpu`, `gpu`, `tpu`, `local` or `parse_hardware`.

    >>> parse_hardware("gpu:4x8").num_devices
    32
    >>> list(parse_hardware("cpu:1-4").worker_counts)
    [1, 2, 3, 4]
    """

    kind: Literal["cpu", "gpu", "tpu", "local"]
    """Platform that jax runs on; `local` if the loop runs in this process, on the devices that jax finds."""

    num_workers: int
    """Number of worker processes; the maximum if the group is elastic."""

    devices_per_worker: int
    """Number of jax devices in each worker; 1 for `local`, where jax knows the number."""

    min_workers: int
    """Minimum number of workers; `num_workers` if the group is not elastic."""

    accelerator_type: str | None = None
    """Ray's name of the TPU generation, or of the GPU; None for any GPU."""

    topology: str | None = None
    """Topology of a TPU slice, such as 4x4."""

    workers_per_slice: int = 1
    """Hosts of a TPU slice. Groups grow and shrink by slices."""

    allowed_counts: tuple[int, ...] | None = None
    """Numbers of workers that an elastic group may have, in ascending order; None for all between the bounds."""

    def __post_init__(self) -> None:
        """Check every field once.

        Raises:
            LaunchError: a field is not valid.
        """
        check_choice("kind", self.kind, _KINDS)
        for name in ("num_workers", "devices_per_worker", "min_workers", "workers_per_slice"):
            number = check_number(name, getattr(self, name), at_least=1, at_most=MAX_COUNT)
            object.__setattr__(self, name, number)
        check_number("num_workers", self.num_workers, at_least=self.min_workers)
        for name in ("accelerator_type", "topology"):
            check_type(name, getattr(self, name), str | None, "a text or None", "Leave it out, or make one by tpu(...)")
        if self.allowed_counts is not None:
            self._check_allowed_counts(self.allowed_counts)

    def _check_allowed_counts(self, counts: Any) -> None:
        every = range(self.min_workers, self.num_workers + 1, self.workers_per_slice)
        ends = (self.min_workers, self.num_workers)
        is_valid = isinstance(counts, tuple) and all(count in every for count in counts)
        if not is_valid or counts[:1] + counts[-1:] != ends or list(counts) != sorted(set(counts)):
            raise LaunchError(
                f"allowed_counts must be a tuple of ascending numbers of workers, from {ends[0]} to {ends[1]}, got "
                f"{shown(counts)}. Make it by restricted_to(...)."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices of all workers."""
        return self.num_workers * self.devices_per_worker

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change during training."""
        return self.min_workers < self.num_workers

    @property
    def data_cpus(self) -> int:
        """CPUs for the tasks of Ray Data, in addition to the workers' CPUs: one for each eight workers, at least one.

        Each worker that reads a dataset of its own runs its own executor. The executors take turns on a CPU, as a task
        ends when it has read its block. An elastic group has the CPUs of its smallest size.
        """
        return -(-self.min_workers // _WORKERS_PER_DATA_CPU)

    @property
    def worker_counts(self) -> Sequence[int]:
        """Numbers of workers that the group may have, in ascending order."""
        return self.allowed_counts or range(self.min_workers, self.num_workers + 1, self.workers_per_slice)

    def restricted_to(self, counts: Iterable[int]) -> "Hardware":
        """Return this hardware with some of its numbers of workers, such as those that can share a batch.

        Its text is that of the range between the smallest and the largest of them.

        >>> parse_hardware("cpu:1-5").restricted_to([1, 2, 4]).num_workers
        4

        Raises:
            LaunchError: there is none of these numbers, or the group cannot have one of them.
        """
        check_type("counts", counts, Iterable, "numbers of workers", "Give a list such as [1, 2, 4]")
        kept = tuple(sorted({check_number("a number of workers", count, at_least=1) for count in counts}))
        if not kept or not set(kept).issubset(self.worker_counts):
            raise LaunchError(
                f"the numbers of workers must be among those of {self}, at least one, got {shown(list(kept))}. Leave "
                "out the others."
            )
        if kept == tuple(self.worker_counts):
            return self
        return replace(self, min_workers=kept[0], num_workers=kept[-1], allowed_counts=kept)

    def __str__(self) -> str:
        """Return the text that `parse_hardware` reads."""
        if self.kind == "local":
            return "local"
        size, smallest = self.num_workers // self.workers_per_slice, self.min_workers // self.workers_per_slice
        groups = f"{smallest}-{size}" if self.is_elastic else f"{size}"
        if self.kind == "tpu" and self.topology is not None:
            name = next((name for name, type_ in _TPU_TYPES.items() if type_ == self.accelerator_type), "tpu")
            return f"tpu:{name}:{self.topology}" + (f":{groups}" if groups != "1" else "")
        name = f":{self.accelerator_type.lower()}" if self.kind == "gpu" and self.accelerator_type is not None else ""
        return f"{self.kind}:{groups}" + (f"x{self.devices_per_worker}" if self.devices_per_worker > 1 else "") + name


def cpu(num_workers: int, devices_per_worker: int = 1, *, min_workers: int | None = None) -> Hardware:
    """Return CPU workers, joined by jax.distributed.

    Args:
        num_workers: the number of processes.
        devices_per_worker: the number of jax devices that each process makes of its CPUs.
        min_workers: smaller than `num_workers` for an elastic group.

    Raises:
        LaunchError: a number is less than one, or `num_workers` less than `min_workers`.
    """
    devices_per_worker = _check_count("the number of devices per worker", devices_per_worker)
    num_workers, min_workers = _check_range(num_workers, min_workers, "CPU workers")
    return Hardware(kind="cpu", num_workers=num_workers, devices_per_worker=devices_per_worker, min_workers=min_workers)


def gpu(
    num_workers: int, gpus_per_worker: int = 1, *, min_workers: int | None = None, gpu_type: str | None = None
) -> Hardware:
    """Return GPU workers.

    Args:
        num_workers: the number of processes.
        gpus_per_worker: the number of GPUs of each process, all on one node.
        min_workers: smaller than `num_workers` for an elastic group.
        gpu_type: Ray's name of the GPU in any case, such as h100, a100 or l4, for a cluster of several types; None
            takes any GPU. See `ray.util.accelerators`.

    Raises:
        LaunchError: a number is less than one, `num_workers` less than `min_workers`, or the type is no name.
    """
    if gpu_type is not None and not (isinstance(gpu_type, str) and re.fullmatch(_GPU_TYPE, gpu_type)):
        raise LaunchError(f"the GPU type must be a name such as h100, got {shown(gpu_type)}. Correct it.")
    gpus_per_worker = _check_count("the number of GPUs per worker", gpus_per_worker)
    num_workers, min_workers = _check_range(num_workers, min_workers, "GPU workers")
    return Hardware(
        kind="gpu",
        num_workers=num_workers,
        devices_per_worker=gpus_per_worker,
        min_workers=min_workers,
        accelerator_type=None if gpu_type is None else gpu_type.upper(),
    )


def tpu(accelerator_type: str, topology: str, num_slices: int = 1, *, min_slices: int | None = None) -> Hardware:
    """Return the workers of TPU slices, one per host.

    A host has 4 chips, except that a v5e or v6e slice of at most 8 chips is one host.

    Args:
        accelerator_type: v2, v3, v4, v5e, v5p, v6e or v7x, or Ray's name such as TPU-V6E, in any case.
        topology: the chips of a slice along its axes, such as 4x4 or 2x2x2.
        num_slices: the number of equal slices.
        min_slices: smaller than `num_slices` for an elastic group.

    Raises:
        LaunchError: the type is unknown, the topology or a number is invalid.
    """
    ray_type = _TPU_TYPES.get(str(accelerator_type).lower().removeprefix("tpu-"))
    if ray_type is None:
        raise LaunchError(
            f"the TPU type must be one of {', '.join(_TPU_TYPES)}, got {shown(accelerator_type)}. Choose one."
        )
    num_slices, min_slices = _check_range(num_slices, min_slices, "TPU slices")
    is_shape = re.fullmatch(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){1,2}", str(topology))
    chips = math.prod(int(length) for length in topology.split("x")) if is_shape else 0
    single_host = ray_type in _SINGLE_HOST_TYPES and chips <= _SINGLE_HOST_CHIPS
    per_host = chips if single_host else min(chips, _CHIPS_PER_HOST)
    if not chips or chips % per_host:
        raise LaunchError(
            f"the TPU topology must be a shape such as 4x4 or 2x2x2, of whole hosts of {_CHIPS_PER_HOST} chips, got "
            f"{shown(topology)}. Choose another."
        )
    return Hardware(
        kind="tpu",
        num_workers=chips // per_host * num_slices,
        devices_per_worker=per_host,
        min_workers=chips // per_host * min_slices,
        accelerator_type=ray_type,
        topology=topology,
        workers_per_slice=chips // per_host,
    )


def local() -> Hardware:
    """Return one worker that is this process: no group of workers starts, and a debugger or profiler sees the loop."""
    return Hardware(kind="local", num_workers=1, devices_per_worker=1, min_workers=1)


def parse_hardware(text: str) -> Hardware:
    """Read the text of hardware.

    `cpu:2`, `cpu:1-4` (elastic), `gpu:4x8` (four workers of eight), `gpu:8:h100`, `tpu:v6e:4x4`, `tpu:v6e:4x4:2` (two
    slices) or `local`.

    Raises:
        LaunchError: the text has another form, or a number is invalid.
    """
    if not isinstance(text, str):
        raise LaunchError(f"hardware must be {_FORMS}, got {shown(text)}. Choose one of these forms.")
    if text == "auto":
        raise LaunchError("hardware must be known without a cluster, got 'auto'. Connect, and call auto().")
    if text == "local":
        return local()
    kind, _, rest = text.partition(":")
    workers = rf"(?:{_COUNT}-)?{_COUNT}(?:x{_COUNT})?"
    if kind in ("cpu", "gpu") and (match := re.fullmatch(rf"{workers}(?::({_GPU_TYPE}))?", rest)):
        sizes, smallest = (int(match[2]), int(match[3] or 1)), int(match[1]) if match[1] else None
        if kind == "gpu":
            return gpu(*sizes, min_workers=smallest, gpu_type=match[4])
        if match[4] is None:
            return cpu(*sizes, min_workers=smallest)
    if kind == "tpu" and (match := re.fullmatch(rf"([^:]+):([^:]+)(?::(?:{_COUNT}-)?{_COUNT})?", rest)):
        return tpu(match[1], match[2], int(match[4] or 1), min_slices=int(match[3]) if match[3] else None)
    raise LaunchError(
        f"hardware must be {_FORMS}, got {shown(text)}. Choose one of these forms, with numbers of at most 6 digits."
    )


def _check_range(number: int, smallest: int | None, what: str) -> tuple[int, int]:
    """Return the checked maximum and minimum number of workers or slices."""
    at_least = 1 if smallest is None else _check_count(f"the smallest number of {what}", smallest)
    number = _check_count(f"the number of {what}", number, at_least)
    return number, number if smallest is None else at_least


def _check_count(name: str, number: int, at_least: int = 1) -> int:
    return check_number(name, number, at_least=at_least, at_most=MAX_COUNT)


def gpu_memory_variable() -> str:
    """Return the name of the variable of this share: the one that is set here, or else the older one."""
    newer, older = _GPU_MEMORY_VARIABLES
    return newer if newer in os.environ else older


def gpu_memory_share() -> float:
    """Return the share of a GPU's memory that jax takes in a worker: 0.9, or that of `gpu_memory_variable()`.

    Raises:
        LaunchError: the variable is no number above 0 and at most 1.
    """
    name = gpu_memory_variable()
    given = os.environ.get(name)
    if given is None:
        return _GPU_MEMORY_SHARE
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise LaunchError(f"{name} must be a number above 0 and at most 1, got {given!r}. Correct it.")
    return share


def tpu_flags() -> str:
    """Return the flags of the compiler that TPU workers get in `LIBTPU_INIT_ARGS`, before those of their node."""
    return " ".join(f"--{name}={value}" for name, value in _TPU_FLAGS.items())


def check_hardware(hardware: Hardware) -> None:
    """Check that a caller has passed hardware, and not its text.

    Raises:
        LaunchError: it is something else.
    """
    check_type("hardware", hardware, Hardware, "a Hardware", "Make one, as by parse_hardware('gpu:8')")
