"""Backends of Ray Train that join the workers by `jax.distributed`, and the workers' environment."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.train.backend import Backend
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._hardware import Hardware
from ray_jax_launch._ray_internals import JaxBackend, WorkerGroupStartupFailedError

# XLA's CPU backend allocates the temporary arrays of each step again, and by default each step pays for their pages: a
# quarter of a small step (train_step_baby.md in benchmarks/results). With these settings glibc keeps arrays of up to
# 64 MiB, and uses huge pages. Other C libraries ignore them.
_GLIBC_TUNABLES = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}:glibc.malloc.hugetlb=1"


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
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def _initialize(coordinator: str, num_processes: int, process_id: int, timeouts: DistributedConfig) -> None:
    import jax  # only in workers: on TPUs a driver that uses jax locks the chips

    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=timeouts.initialization_timeout_s,
        heartbeat_timeout_seconds=timeouts.heartbeat_timeout_s,
        shutdown_timeout_seconds=timeouts.shutdown_timeout_s,
    )


def _shutdown() -> None:
    import jax  # see _initialize

    jax.distributed.shutdown()


def backend_config(hardware: Hardware) -> JaxConfig:
    """Return the default backend for this hardware."""
    return TpuConfig() if hardware.kind == "tpu" else DistributedConfig()


def worker_environment(hardware: Hardware) -> dict[str, str]:
    """Return environment variables for the workers. They must be set before a worker imports jax."""
    if hardware.kind == "cpu":
        devices = hardware.devices_per_worker
        return {
            "JAX_PLATFORMS": "cpu",
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _GLIBC_TUNABLES),
            # By default jax makes one device of all CPUs of a process.
            **({"JAX_NUM_CPU_DEVICES": str(devices)} if devices > 1 else {}),
        }
    if hardware.kind == "tpu":
        return {"JAX_PLATFORMS": "tpu"}
    # jax has its own CUDA libraries. A path to other CUDA libraries would make it load these first.
    return {"JAX_PLATFORMS": "cuda", "LD_LIBRARY_PATH": ""}
