"""Backends of Ray Train that join the workers by `jax.distributed`, and the workers' environment."""

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train.backend import Backend
from ray.train.v2.jax.config import JaxConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_jax_launch._cluster import is_started_here
from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._hardware import Hardware, check_hardware, gpu_memory_share, gpu_memory_variable, tpu_flags
from ray_jax_launch._numbers import check_flag, check_number
from ray_jax_launch._ray_internals.ray_train import JaxBackend, WorkerGroupStartupFailedError

# XLA's CPU backend allocates the temporary arrays of each step again, and by default each step pays for their pages: a
# quarter of a small step (train_step_baby.md in benchmarks/results). With these settings glibc keeps arrays of up to
# 64 MiB, and uses huge pages. Other C libraries ignore them.
_GLIBC_TUNABLES = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}:glibc.malloc.hugetlb=1"

# Libraries that jax brings, as files of CUDA toolkits and of cuDNN.
_TOOLKIT = tuple(
    f"lib{name}.so"
    for name in (
        "cublas", "cublasLt", "cudart", "cudnn", "cufft", "cupti", "cusolver", "cusparse", "nccl", "nvJitLink", "nvrtc",
    )
)  # fmt: skip
_TASK_TIMEOUT_S = 60.0
_MAX_TIMEOUT_S = 2**31 - 1  # jax's are of 32 bits

# The node's address in a cluster on this machine alone.
_LOOPBACK = "127.0.0.1"


# An elastic group starts on the nodes that it saw. If one of them has just been lost, the start fails, and the next
# start sees the remaining nodes. A short timeout makes this fast.
_ELASTIC_START_TIMEOUT_S = 15
# Ray Train's controller asks each worker for its health and a report in each interval, by default every 2 s. A small
# group is asked more often: at most 32 workers a second, until the interval is Ray's own.
_REPORTS_EVERY_S, _RAYS_INTERVAL_S, _ASKED_PER_S = 0.5, 2.0, 32


@dataclass
class DistributedConfig(JaxConfig):
    """Joins the workers by `jax.distributed` on CPUs and GPUs alike.

    Ray 2.60's own backend (`ray/train/v2/jax/config.py`) leaves CPU workers unjoined, and on GPUs sets
    `CUDA_VISIBLE_DEVICES` to `range(GPUs per worker)`, which makes several workers on a node all use GPU 0 (noticed in
    the review of ray-project/ray#58322, which added it). This backend keeps the devices that Ray assigned.
    """

    initialization_timeout_s: int = 300
    """Seconds that a worker waits for the other workers to join."""

    heartbeat_timeout_s: int = 100
    """Seconds without a heartbeat before a worker counts as dead. Ray notices a dead process sooner."""

    shutdown_timeout_s: int = 30
    """Seconds that workers wait for each other at the end."""

    def __post_init__(self) -> None:
        """Check every field once.

        Raises:
            LaunchError: a timeout is not a whole number, or too small; or a flag is no bool.
        """
        for name, at_least in (("initialization_timeout_s", 1), ("heartbeat_timeout_s", 1), ("shutdown_timeout_s", 0)):
            check_number(name, getattr(self, name), at_least=at_least, at_most=_MAX_TIMEOUT_S)
        for name in ("use_tpu", "use_gpu"):  # of Ray's config
            check_flag(name, getattr(self, name))

    @property
    def backend_cls(self) -> Any:
        """Class of the backend."""
        return _DistributedBackend


class _DistributedBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        num_workers = len(worker_group)
        if num_workers == 1:
            return
        with _restartable(worker_group):
            coordinator = self.choose_coordinator(worker_group)
            ray.get(
                [
                    worker_group.execute_single_async(rank, _initialize, coordinator, num_workers, rank, backend_config)
                    for rank in range(num_workers)
                ]
            )

    def choose_coordinator(self, worker_group: Any) -> str:
        """Return the address of rank 0's node with a port that is free now."""
        return worker_group.execute_single(0, _free_address)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) > 1:
            ray.wait(worker_group.execute_async(_shutdown), timeout=backend_config.shutdown_timeout_s)


@dataclass
class TpuConfig(JaxConfig):
    """Ray's own backend for TPUs, which knows TPU slices, with restarts after a failed rendezvous."""

    use_tpu: bool = True

    @property
    def backend_cls(self) -> Any:
        """Class of the backend."""
        return _TpuBackend


class _TpuBackend(JaxBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        with _restartable(worker_group):
            super().on_start(worker_group, backend_config)


@contextlib.contextmanager
def _restartable(worker_group: Any) -> Iterator[None]:
    """Turn a failed rendezvous into a failed start, which `RestartPolicy` can retry. Ray Train would end the run.

    Another program may take the coordinator's port first, and workers may time out waiting for each other.
    """
    try:
        yield
    except (RayActorError, RayTaskError) as error:
        # Ray 2.60 drops a group that fails here without stopping its workers, which keep their resources.
        worker_group.get_worker_group_state().shutdown()
        why = repr(error.cause) if isinstance(error, RayTaskError) else "a worker died"
        raise WorkerGroupStartupFailedError(f"jax.distributed.initialize: {why}") from error


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host if host == _LOOPBACK else "", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _initialize(coordinator: str, num_processes: int, process_id: int, timeouts: DistributedConfig) -> None:
    import jax  # only in workers: on TPUs a driver that uses jax locks the chips

    is_alone = coordinator.startswith(f"{_LOOPBACK}:")
    if is_alone:
        _keep_gloo_on_loopback()
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        coordinator_bind_address=coordinator if is_alone else None,  # jax's own: all interfaces
        initialization_timeout=timeouts.initialization_timeout_s,
        heartbeat_timeout_seconds=timeouts.heartbeat_timeout_s,
        shutdown_timeout_seconds=timeouts.shutdown_timeout_s,
    )


def _keep_gloo_on_loopback() -> None:
    """Let gloo, the collectives of CPUs, listen on the loopback address. jax 0.10 has no option for its address.

    By default gloo listens on the address of the machine's name, which often is that of a network.
    """
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # compiled; see _initialize

    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=_LOOPBACK)


def _shutdown() -> None:
    import jax  # see _initialize

    jax.distributed.shutdown()


def backend_config(hardware: Hardware) -> JaxConfig:
    """Return the default backend for this hardware."""
    check_hardware(hardware)
    return TpuConfig() if hardware.kind == "tpu" else DistributedConfig()


def worker_environment(hardware: Hardware) -> dict[str, str]:
    """Return environment variables for the workers. They must be set before a worker imports jax.

    For GPUs of a connected cluster, this waits for a task on one of its nodes.
    """
    check_hardware(hardware)
    if hardware.kind == "local":
        return {}
    if hardware.kind == "cpu":
        devices = hardware.devices_per_worker
        return {
            "JAX_PLATFORMS": "cpu",
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _GLIBC_TUNABLES),
            # By default jax makes one device of all CPUs of a process.
            **({"JAX_NUM_CPU_DEVICES": str(devices)} if devices > 1 else {}),
        }
    if hardware.kind == "tpu":
        # Ray puts the value of the node there. Of a flag that is given twice, the last value counts.
        return {"JAX_PLATFORMS": "tpu", "LIBTPU_INIT_ARGS": f"{tpu_flags()} ${{LIBTPU_INIT_ARGS}}"}
    environment = {"JAX_PLATFORMS": "cuda", gpu_memory_variable(): str(gpu_memory_share())}
    if is_started_here() and "NCCL_SOCKET_IFNAME" not in os.environ and sys.platform == "linux":
        environment["NCCL_SOCKET_IFNAME"] = "lo"  # NCCL's own choice is an interface to other machines
    # jax has its own CUDA libraries. It would load others first.
    paths, without_cuda = _library_paths_of_a_gpu_node()
    return environment if without_cuda == paths else {**environment, "LD_LIBRARY_PATH": without_cuda}


def _library_paths_of_a_gpu_node() -> tuple[str, str]:
    """Return `_library_paths` of a node with GPUs of the connected cluster, else of this process.

    The workers inherit the environment of their node. The nodes with GPUs are taken to be alike.
    """
    nodes = [] if is_started_here() or not ray.is_initialized() else ray.nodes()
    for node in nodes:
        if node["Alive"] and node["Resources"].get("GPU", 0) >= 1:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(_library_paths).options(num_cpus=0, scheduling_strategy=there)
            with contextlib.suppress(RayError):  # it was just lost, or does not answer in time
                return ray.get(task.remote(), timeout=_TASK_TIMEOUT_S)
    return _library_paths()


def _library_paths() -> tuple[str, str]:
    """Return `LD_LIBRARY_PATH`, and the same without the folders of CUDA toolkits.

    A folder with the GPUs' driver, which containers of clusters mount, stays.
    """
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return ":".join(paths), ":".join(path for path in paths if not _holds_toolkit(Path(path)))


def _holds_toolkit(folder: Path) -> bool:
    try:
        names = os.listdir(folder)  # noqa: PTH208  # names alone: there can be thousands
    except OSError:
        return False
    return any(name.startswith(_TOOLKIT) for name in names) and "libcuda.so.1" not in names


def check_env_vars(runtime_env: Any) -> None:
    """Check the environment variables of a runtime environment.

    Raises:
        LaunchError: they are not texts by name, or a process cannot have them.
    """
    variables = (runtime_env or {}).get("env_vars") or {}
    if not isinstance(variables, Mapping) or not all(
        isinstance(text, str) for text in (*variables, *variables.values())
    ):
        raise LaunchError(f'env_vars must be texts by name, got {shown(variables)}. Write them as in {{"NAME": "1"}}.')
    for name, value in variables.items():
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise LaunchError(
                f"env_vars must have names without = and values without a null character, got those of {shown(name)}."
            )


@contextlib.contextmanager
def train_settings(hardware: Hardware) -> Iterator[None]:
    """Set environment variables of Ray Train that have no argument. The user's own values win."""
    interval_s = min(max(_REPORTS_EVERY_S, hardware.num_workers / _ASKED_PER_S), _RAYS_INTERVAL_S)
    settings: dict[str, str] = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(interval_s)}
    if hardware.is_elastic:
        settings["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(_ELASTIC_START_TIMEOUT_S)
    if is_started_here():
        # A cluster of this machine alone has no preemptions. The watcher is a process that takes seconds to start.
        settings["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
