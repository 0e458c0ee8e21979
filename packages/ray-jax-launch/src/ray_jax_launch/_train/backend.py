"""How the workers' jax processes find each other."""

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


@dataclass
class DistributedConfig(JaxConfig):
    """Joins the workers by `jax.distributed` on CPUs and GPUs alike.

    Ray 2.60's own backend (`ray/train/v2/jax/config.py`) leaves CPU workers unjoined, and on GPUs sets
    `CUDA_VISIBLE_DEVICES` to `range(GPUs per worker)`, so that several workers on a node would all take
    GPU 0 (noticed in the review of ray-project/ray#58322, which added it). This one keeps the devices that Ray
    assigned to each worker.
    """

    initialization_timeout_s: int = 300
    """How long a worker waits for the others to join."""

    heartbeat_timeout_s: int = 100
    """How long a silent worker is taken to be alive. (Ray sees a process that died before this does.)"""

    shutdown_timeout_s: int = 30
    """How long workers wait for each other at the end."""

    @property
    def backend_cls(self) -> Any:
        """What Ray Train starts in the workers."""
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
        """Address and port on rank 0's node that are free just now."""
        return worker_group.execute_single(0, _free_address)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        if len(worker_group) > 1:
            ray.wait(worker_group.execute_async(_shutdown), timeout=backend_config.shutdown_timeout_s)


@dataclass
class TpuConfig(JaxConfig):
    """Ray's own backend for TPUs, which knows their slices, with restarts after a failure to join."""

    use_tpu: bool = True

    @property
    def backend_cls(self) -> Any:
        """What Ray Train starts in the workers."""
        return _TpuBackend


class _TpuBackend(JaxBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        with _restartable(worker_group):
            super().on_start(worker_group, backend_config)


@contextlib.contextmanager
def _restartable(worker_group: Any) -> Iterator[None]:
    """Make a failed rendezvous a failed start, which can be tried again. Ray Train would end the run.

    The port that the coordinator was given may be taken by then, and workers may time out waiting for each other.
    """
    try:
        yield
    except (RayActorError, RayTaskError) as error:
        # Ray 2.60 forgets a group that fails at this point, but its workers would keep their resources.
        worker_group.get_worker_group_state().shutdown()
        why = repr(error.cause) if isinstance(error, RayTaskError) else "a worker died"
        raise WorkerGroupStartupFailedError(f"jax.distributed.initialize: {why}") from error


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def _initialize(coordinator: str, num_processes: int, process_id: int, timeouts: DistributedConfig) -> None:
    import jax  # on TPUs a driver that imports jax would lock the chips: workers alone do

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
    """The backend for this hardware."""
    return TpuConfig() if hardware.kind == "tpu" else DistributedConfig()


def worker_environment(hardware: Hardware) -> dict[str, str]:
    """Environment variables for the workers, which must be there before they import jax."""
    if hardware.kind == "cpu":
        devices = hardware.devices_per_worker
        # XLA's CPU backend allocates a step's temporary arrays anew each time: in pages of 4 KiB, touching them
        # takes a tenth to a fifth of a step. With this, glibc asks for huge pages; other C libraries ignore it.
        return {
            "JAX_PLATFORMS": "cpu",
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
            # jax makes one device of a process's CPUs unless told otherwise.
            **({"JAX_NUM_CPU_DEVICES": str(devices)} if devices > 1 else {}),
        }
    if hardware.kind == "tpu":
        return {"JAX_PLATFORMS": "tpu"}
    # jax brings CUDA's libraries with it; a path to others would make it load those first.
    return {"JAX_PLATFORMS": "cuda", "LD_LIBRARY_PATH": ""}
