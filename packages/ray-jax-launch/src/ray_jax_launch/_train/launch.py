"""`launch`: run a training loop on all workers under Ray Train, until it ends or fails too often."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._control.control_actor import OnMetrics
from ray_jax_launch._control.events import OnEvent
from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._scaling import LabelSelector
from ray_jax_launch._storage import StoragePath, as_storage_path, check_run_name
from ray_jax_launch._train.backend import check_env_vars
from ray_jax_launch._train.fit_result import Result
from ray_jax_launch._train.launch_plan import AnyDataset, LaunchPlan, TrainLoop, read_hardware
from ray_jax_launch._train.run_plan import run_plan


def launch(  # noqa: PLR0913 - a launch in one call
    train_loop: TrainLoop,
    config: dict[str, Any] | None = None,
    *,
    hardware: Hardware | str | None = None,
    scaling_config: ScalingConfig | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str | None = None,
    label_selector: LabelSelector | None = None,
    storage_path: StoragePath | None = None,
    name: str | None = None,
    datasets: Mapping[str, AnyDataset] | None = None,
    dataset_config: DataConfig | None = None,
    on_metrics: OnMetrics | None = None,
    on_event: OnEvent | None = None,
    data_cpus: int | None = None,
    max_failures: int = 3,
    preemption_grace_s: float = 0.0,
    wait_for_resources_s: float = 0.0,
    hang_timeout_s: float | None = None,
    env_vars: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    backend: JaxConfig | None = None,
) -> Result:
    """Run `train_loop(config)` on every worker under Ray Train and wait for its end.

    When a worker fails, or Ray Train's controller, all workers start again in new processes, at most `max_failures`
    times without a new checkpoint between the failures. The loop should then continue from its newest checkpoint (see
    `Checkpoints`). Preemptions do not count. A loop that raises the same exception at the same place twice without a
    new checkpoint, or a `PermanentError`, does not start again.

    What the loop prints is logged at level INFO, and shown unless the program has configured logging.

    With `hardware="local"` the loop runs in this process: it starts in seconds, and raises its own exceptions.

    Args:
        train_loop: runs in each worker. It can use `ray.train`, `Checkpoints`, `log_metrics` and `stop_requested`. With
            several workers, `jax.distributed` is initialised. It may take no argument.
        config: passed to the loop. Must not make workers import jax when it is unpickled.
        hardware: see `parse_hardware`; `auto` is the best hardware of the cluster. Give this or `scaling_config`.
        scaling_config: Ray Train's own, in place of `hardware` and the three arguments that follow.
        resources_per_worker: see `ray_jax_launch.scaling_config`.
        placement_strategy: see `ray_jax_launch.scaling_config`.
        label_selector: see `ray_jax_launch.scaling_config`.
        storage_path: a folder that all nodes share, or a URI of object storage. By default `~/ray_results`, as in Ray.
        name: the run's folder in the storage path, and Ray's name of the run. By default Ray makes one from the time.
        datasets: by name for `ray.train.get_dataset_shard`, Ray Datasets, which Ray splits among the workers, or
            functions of `(rank, world_size)` that make the dataset of a rank. Each is called once per start of the
            group, when rank 0 first asks for the dataset.
        dataset_config: how Ray splits the Ray Datasets.
        on_metrics: called in a thread of this process with the rank and the metrics of each `log_metrics`, in each
            rank's order. Its exceptions are logged, and the run continues.
        on_event: called in the same thread with each `Event`, such as `Restarting`. The same holds for its exceptions.
        data_cpus: CPUs for the tasks of Ray Data, in addition to the workers' CPUs, if the loop makes its own datasets.
            By default `Hardware.data_cpus` with `datasets`, else 0.
        max_failures: the number of failures in a row to recover from, without a new checkpoint between them; -1 for any
            number.
        preemption_grace_s: seconds that workers on other nodes have to save after a preempted node is gone.
        wait_for_resources_s: seconds to wait for an autoscaler, or a person, to add missing nodes.
        hang_timeout_s: seconds without a step after which the workers are killed and start again, as after a failure,
            if a worker does not answer; five times as long if all answer, and at least 20 times the usual time of a
            step. A step ends when the loop calls `stop_requested`; see there and `watch_steps`. A save, and the end of
            the loops, take an hour without a sign of life, or five times as long if that is longer. With `local`, the
            stack of the loop is logged, and the loop goes on. None, the default, for any time.
        env_vars: environment variables of the workers, set before jax is imported. They win over those that
            `worker_environment(hardware)` sets.
        runtime_env: Ray's runtime environment of the workers. `local` uses only its `env_vars`.
        backend: joins the workers, such as a `DistributedConfig` with other timeouts; by default
            `backend_config(hardware)`.

    Raises:
        LaunchError: an argument is invalid; the cluster has too few resources or does not answer; the storage cannot be
            reached, or is a folder that the nodes do not share; or the loop raised one.
        TypeError: `train_loop`, `config` or `datasets` cannot be pickled.
        OutOfMemoryError: memory could not be allocated, or Ray's memory monitor killed workers twice in a row.
        DamagedCheckpointError: all checkpoints of the run are damaged.
        StorageFullError: a checkpoint could not be written, because the storage is full.
        TrainingFailed: workers failed more than `max_failures` times, or too few nodes for an elastic group came in
            time.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP. A loop that calls `stop_requested` has saved and returned. A
            second Ctrl-C, a second later or more, does not wait for it. All workers have stopped.
        StopRequestedError: this process has called `request_stop`.
        Exception: with `local` hardware, what the loop raised, as it is.
    """
    if (hardware is None) == (scaling_config is None):
        raise LaunchError(
            f"hardware or scaling_config must be given, got {'neither' if hardware is None else 'both'}. Give one of "
            "the two."
        )
    shape = {
        "resources_per_worker": resources_per_worker,
        "placement_strategy": placement_strategy,
        "label_selector": label_selector,
    }
    if name is not None:
        check_run_name(name)
    storage_path = None if storage_path is None else as_storage_path(storage_path)
    for what, given in (("env_vars", env_vars), ("runtime_env", runtime_env)):
        if not isinstance(given, Mapping | None):
            raise LaunchError(f"{what} must be a dict, got {shown(given)}. Make it a dict, or leave it out.")
    runtime_env = dict(runtime_env or {})
    check_env_vars(runtime_env)
    runtime_env["env_vars"] = {**(runtime_env.get("env_vars") or {}), **(env_vars or {})}
    plan = LaunchPlan(
        train_loop=train_loop if config is None else _with_config(train_loop, config),
        config=config,
        hardware=None if hardware is None else read_hardware(hardware),
        scaling_config=scaling_config,
        shape={name: value for name, value in shape.items() if value is not None},
        jax_config=None if type(backend) is JaxConfig else backend,
        run_config=RunConfig(
            name=name,
            storage_path=None if storage_path is None else str(storage_path),
            failure_config=FailureConfig(max_failures=max_failures, preemption_grace_s=preemption_grace_s),
            worker_runtime_env=runtime_env,
        ),
        datasets=datasets,
        dataset_config=dataset_config,
        data_cpus=data_cpus,
        wait_for_resources_s=wait_for_resources_s,
        hang_timeout_s=hang_timeout_s,
        on_metrics=on_metrics,
        on_event=on_event,
    )
    return run_plan(plan)


def _with_config(train_loop: TrainLoop, config: dict[str, Any]) -> TrainLoop:
    """Return the loop with its argument, even if the argument is optional: Ray passes only a required one."""
    try:
        inspect.signature(train_loop).bind(config)
    except (TypeError, ValueError):
        return train_loop
    return functools.partial(train_loop, config)
