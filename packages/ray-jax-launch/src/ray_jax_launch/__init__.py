"""Run JAX training loops under Ray Train, on CPUs, GPUs or TPU slices.

Names load on first use, so that naming hardware imports neither Ray nor jax.
"""

import os
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ray_jax_launch._errors import (
    DamagedCheckpointError,
    DeletedCheckpointError,
    LaunchError,
    MismatchedCheckpointError,
    OutOfMemoryError,
    PermanentError,
    StorageFullError,
    TrainingFailed,
    UnsavedCheckpointError,
)
from ray_jax_launch._hardware import Hardware, cpu, gpu, parse_hardware, tpu
from ray_jax_launch._steps import intact_step, latest_step, newest_metadata
from ray_jax_launch._storage import StoragePath, as_storage_path, check_run_name, is_uri, join_path, open_uri

# Under `uv run`, Ray would pack up the working folder and start every worker through `uv run` again. It reads
# this when it is first imported, so it is set before anything here imports it.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

if TYPE_CHECKING:
    from ray_jax_launch._backend import DistributedConfig, backend_config, worker_environment
    from ray_jax_launch._checkpoints import Checkpoints, Restored
    from ray_jax_launch._cluster import auto, check_resources, connect
    from ray_jax_launch._data import RankedDataConfig, RankedDataset
    from ray_jax_launch._launch import Result, launch, scaling_config
    from ray_jax_launch._session import log_metrics, log_to_driver, mark_finished, stop_requested

_MODULE_OF = {
    "DistributedConfig": "_backend",
    "backend_config": "_backend",
    "worker_environment": "_backend",
    "Checkpoints": "_checkpoints",
    "Restored": "_checkpoints",
    "auto": "_cluster",
    "check_resources": "_cluster",
    "connect": "_cluster",
    "RankedDataConfig": "_data",
    "RankedDataset": "_data",
    "Result": "_launch",
    "launch": "_launch",
    "log_metrics": "_session",
    "log_to_driver": "_session",
    "mark_finished": "_session",
    "stop_requested": "_session",
    "scaling_config": "_launch",
}

__version__ = version("ray-jax-launch")

__all__ = [
    "Checkpoints",
    "DamagedCheckpointError",
    "DeletedCheckpointError",
    "DistributedConfig",
    "Hardware",
    "LaunchError",
    "MismatchedCheckpointError",
    "OutOfMemoryError",
    "PermanentError",
    "RankedDataConfig",
    "RankedDataset",
    "Restored",
    "Result",
    "StorageFullError",
    "StoragePath",
    "TrainingFailed",
    "UnsavedCheckpointError",
    "as_storage_path",
    "auto",
    "backend_config",
    "check_resources",
    "check_run_name",
    "connect",
    "cpu",
    "gpu",
    "intact_step",
    "is_uri",
    "join_path",
    "latest_step",
    "launch",
    "log_metrics",
    "log_to_driver",
    "mark_finished",
    "newest_metadata",
    "open_uri",
    "parse_hardware",
    "scaling_config",
    "stop_requested",
    "tpu",
    "worker_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ray_jax_launch' has no attribute {name!r}")
    return getattr(import_module(f"ray_jax_launch.{_MODULE_OF[name]}"), name)
