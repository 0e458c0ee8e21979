"""Execute the plan of a launch: make the run's folder, connect to the cluster, run the workers."""

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

import ray
from ray.train import LoggingConfig, RunConfig, ScalingConfig

from ray_jax_launch._checkpoint.ray_snapshot import repair_snapshot
from ray_jax_launch._cluster import auto, check_resources, connect, is_started_here
from ray_jax_launch._control.forwarding import showing_info
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._run_folder import RunFolder, making_run_folder
from ray_jax_launch._scaling import hardware_of, resources_of, share_cpus
from ray_jax_launch._scaling import scaling_config as scaling_of
from ray_jax_launch._storage import as_storage_path
from ray_jax_launch._train.backend import worker_environment
from ray_jax_launch._train.fit_result import Result
from ray_jax_launch._train.launch_plan import LaunchPlan, PreparedLaunch
from ray_jax_launch._train.local_mode import run_local
from ray_jax_launch._train.run_group import run_group

_logger = logging.getLogger("ray_jax_launch")


def run_plan(plan: LaunchPlan) -> Result:
    """Run the loop of a plan on every worker, and wait for its end. See `launch` for the exceptions."""
    with _making_folder(plan) as folder, showing_info():
        prepared = _prepare(plan, folder)
        repair_snapshot(*prepared.open_storage())
        return run_local(prepared) if prepared.hardware.kind == "local" else run_group(prepared)


def _making_folder(plan: LaunchPlan) -> contextlib.AbstractContextManager[RunFolder | None]:
    if plan.run_config.storage_filesystem is not None:
        return contextlib.nullcontext()
    return making_run_folder(as_storage_path(plan.run_config.storage_path or ""), plan.run_name)


def _prepare(plan: LaunchPlan, folder: RunFolder | None) -> PreparedLaunch:
    """Connect to the cluster, choose what the plan leaves open, and check that the cluster has the resources."""
    hardware, scaling = _connect(plan)
    data_cpus = plan.data_cpus
    if data_cpus is None:
        data_cpus = hardware.data_cpus if plan.datasets else 0
    if hardware.kind != "local":
        if is_started_here():
            scaling = share_cpus(scaling, ray.cluster_resources().get("CPU", 0), data_cpus)
        check_resources(
            hardware,
            data_cpus=data_cpus,
            wait_for_resources_s=plan.wait_for_resources_s,
            resources_per_worker=resources_of(scaling),
        )
    run_config = _for_ray(plan.run_config, folder, hardware)
    return PreparedLaunch(
        plan=plan, hardware=hardware, scaling=scaling, run_config=run_config, data_cpus=data_cpus, folder=folder
    )


def _connect(plan: LaunchPlan) -> tuple[Hardware, ScalingConfig]:
    """Start Ray if it is needed, and return the hardware."""
    if plan.hardware == "auto":
        connect()
        hardware = auto()
        return hardware, scaling_of(hardware, **plan.shape)
    if plan.hardware is None:
        scaling = plan.scaling_config or ScalingConfig()
        hardware = hardware_of(scaling)
    else:
        hardware = plan.hardware
        scaling = scaling_of(hardware, **plan.shape)
    if hardware.kind != "local":
        _logger.info("starting %s", hardware)
        connect(hardware)
    elif plan.datasets or plan.data_cpus:
        connect()
    return hardware, scaling


def _for_ray(given: RunConfig, folder: RunFolder | None, hardware: Hardware) -> RunConfig:
    """Return the user's config with the storage as Ray needs it, and the workers' environment."""
    runtime_env: Any = given.worker_runtime_env or {}
    env_vars = {**worker_environment(hardware), **(runtime_env.get("env_vars") or {})}
    is_default = given.logging_config == LoggingConfig()
    storage = given.storage_path if folder is None else as_storage_path(given.storage_path or "")
    return dataclasses.replace(
        given,
        storage_path=str(storage.absolute() if isinstance(storage, Path) else storage),
        worker_runtime_env={**runtime_env, "env_vars": env_vars},
        logging_config=LoggingConfig(log_level="ERROR") if is_default else given.logging_config,
    )
