"""Devices of accelerators that are not in this machine, to compile programs for.

The compilers of TPUs and NVIDIA GPUs run on any Linux host. A program for these devices has its real memory, kernels
and collectives, and cannot run here.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from nnx_gpt2._errors import check_type, require, shown

_TPUS = {"v5e": ("TPU v5 lite", 16), "v5p": ("TPU v5", 95), "v6e": ("TPU v6 lite", 32), "v7x": ("TPU7x", 96)}
"""Name in jax, and GiB of memory of a device (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm). A chip of
v7x is two devices. Without a TPU, the compiler takes a chip of v4 for two devices, which it is not."""
_TPU = rf"tpu:({'|'.join(_TPUS)}):([1-9]\d{{0,2}}(?:x[1-9]\d{{0,2}}){{1,2}})"
# What libtpu would ask the metadata server of a TPU's host.
_TPU_VARIABLES = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpu:
    """A GPU as its data sheet describes it for XLA, as in openxla/xla, target_config/specs."""

    name: str
    capability: tuple[int, int]
    cores: int
    units_per_core: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    cache_bytes: int
    threads_per_core: int = 2048
    core_bytes: int = 233_472

    def text(self) -> str:
        """Return the text of XLA's message `GpuTargetConfigProto`."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.cores} fpus_per_core: {self.units_per_core} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes} memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache_bytes}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {self.threads_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {self.core_bytes}
  shared_memory_per_block_optin: {self.core_bytes - 1024}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.name}"
"""


_GPUS = {
    "t4": _Gpu(
        name="Tesla T4", capability=(7, 5), cores=40, units_per_core=64, clock_ghz=1.59, memory_bytes=15_828_320_256,
        bandwidth=320_064_000_000, cache_bytes=4 << 20, threads_per_core=1024, core_bytes=65_536,
    ),
    "l4": _Gpu(
        name="NVIDIA L4", capability=(8, 9), cores=58, units_per_core=128, clock_ghz=2.04, memory_bytes=23_664_721_920,
        bandwidth=300_096_000_000, cache_bytes=48 << 20, threads_per_core=1536, core_bytes=102_400,
    ),
    "a100": _Gpu(
        name="NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, units_per_core=64, clock_ghz=1.41,
        memory_bytes=85_100_068_864, bandwidth=2_039_040_000_000, cache_bytes=40 << 20, core_bytes=167_936,
    ),
    "h100": _Gpu(
        name="NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132, units_per_core=128, clock_ghz=1.98,
        memory_bytes=84_942_979_072, bandwidth=3_352_320_000_000, cache_bytes=50 << 20,
    ),
    "h200": _Gpu(
        name="NVIDIA H200", capability=(9, 0), cores=132, units_per_core=128, clock_ghz=1.98,
        memory_bytes=151_397_597_184, bandwidth=4_800_000_000_000, cache_bytes=50 << 20,
    ),
    "b200": _Gpu(
        name="NVIDIA B200", capability=(10, 0), cores=148, units_per_core=128, clock_ghz=1.965,
        memory_bytes=191_514_411_008, bandwidth=7_672_320_000_000, cache_bytes=132_644_864,
    ),
}  # fmt: skip
_GPU = rf"gpu:(?:([1-9]\d{{0,4}})x)?([1-9]\d{{0,4}}):({'|'.join(_GPUS)})"


def absent_devices(name: str) -> list[Any]:
    """Return devices to compile for, which need not be in this machine: pass them to `make_mesh`.

    The compilers are those of the extras `tpu` and `cuda12`, for Linux. On a host without a GPU, the one of GPUs needs
    the environment variable `JAX_PLATFORMS=cpu`.

    >>> mesh = make_mesh(devices=absent_devices("gpu:2x8:h100"), fsdp=8)  # doctest: +SKIP
    >>> estimate_memory(gpt2_xl(), global_batch_size=64, mesh=mesh).peak_bytes  # doctest: +SKIP

    Args:
        name: `tpu:TYPE:TOPOLOGY` with a type of v5e, v5p, v6e or v7x, such as `tpu:v6e:4x4`; or `gpu:GPUS:TYPE` or
            `gpu:HOSTSxGPUS:TYPE` with a type of t4, l4, a100, h100, h200 or b200, such as `gpu:2x8:h100`.

    Raises:
        ValueError: the name has another form, there is no such slice, or the compiler is not installed.
    """
    from jax.experimental import topologies  # takes half a second

    tpu, gpu = _parsed(name)
    try:
        if tpu is not None:
            with _defaults(_TPU_VARIABLES):
                of_compiler = ":".join(tpu.groups()).replace("v7x", "tpu7x")
                return topologies.get_topology_desc(of_compiler, "tpu", **_one_host(*tpu.groups())).devices
        assert gpu is not None
        hosts = gpu[1] or 1
        gpus = gpu[2]
        kind = gpu[3]
        options = {"topology": f"1x{hosts}x{gpus}", "target_config": _GPUS[kind].text()}
        return topologies.get_topology_desc(kind, "cuda", **options).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        remedy = "Install nnx-gpt2[tpu] or nnx-gpt2[cuda12] on Linux, or choose another topology."
        require(False, "devices", "be known to an installed compiler", f"{name}: {error}", remedy)
        raise


def _one_host(kind: str, topology: str) -> dict[str, Any]:
    """Return the option that makes a slice one host, if it is one: the compiler's hosts have 2x2 chips.

    A v5e or v6e slice of at most eight chips is a host (https://cloud.google.com/tpu/docs/v6e).
    """
    shape = [int(length) for length in topology.split("x")]
    is_one_host = kind in ("v5e", "v6e") and math.prod(shape) <= 8
    return {"chips_per_host_bounds": (*shape, *[1] * (3 - len(shape)))} if is_one_host else {}


@contextlib.contextmanager
def _defaults(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that have no value, for a while."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device of `absent_devices` by its data sheet, for which no compiler needs to be installed."""

    platform: str
    """`tpu` or `gpu`, as in jax."""

    device_kind: str
    """Its name in jax."""

    compute_capability: str
    """That of a GPU, such as `9.0`; empty for a TPU."""

    memory_bytes: int
    """Its memory."""


def device_facts(name: str) -> DeviceFacts:
    """Return what is known of one device of `absent_devices`.

    Args:
        name: see `absent_devices`.

    Raises:
        ValueError: the name has another form.
    """
    tpu, gpu = _parsed(name)
    if tpu is not None:
        kind, gib = _TPUS[tpu[1]]
        return DeviceFacts(platform="tpu", device_kind=kind, compute_capability="", memory_bytes=gib << 30)
    assert gpu is not None
    found = _GPUS[gpu[3]]
    major, minor = found.capability
    return DeviceFacts(
        platform="gpu",
        device_kind=found.name,
        compute_capability=f"{major}.{minor}",
        memory_bytes=found.memory_bytes,
    )


def _parsed(name: str) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """Return the match of a name of TPUs or of GPUs; the other one is None."""
    check_type("name", name, str)
    tpu, gpu = re.fullmatch(_TPU, name), re.fullmatch(_GPU, name)
    forms = f"tpu:TYPE:TOPOLOGY ({', '.join(_TPUS)}) or gpu:HOSTSxGPUS:TYPE ({', '.join(_GPUS)})"
    require(tpu is not None or gpu is not None, "devices", f"be {forms}", shown(name))
    return tpu, gpu


def compiler_options(device: Any) -> dict[str, Any] | None:
    """Return the options that the compiler of a device needs: without the GPU, XLA cannot time its kernels."""
    is_here = any(device is other for other in jax.devices())
    return {"xla_gpu_autotune_level": 0} if device.platform == "gpu" and not is_here else None
