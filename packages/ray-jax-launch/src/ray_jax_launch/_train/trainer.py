"""`JaxTrainer`: a launch with the signature of Ray's trainer."""

from collections.abc import Mapping
from typing import Any

from ray.train import Checkpoint, DataConfig, RunConfig, ScalingConfig, ValidationConfig
from ray.train.v2.jax import JaxTrainer as RayJaxTrainer
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._control.control_actor import OnMetrics
from ray_jax_launch._control.events import OnEvent
from ray_jax_launch._errors import LaunchError
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._scaling import scaling_config as scaling_of
from ray_jax_launch._train.fit_result import Result
from ray_jax_launch._train.launch_plan import AnyDataset, LaunchPlan, TrainLoop, read_hardware
from ray_jax_launch._train.run_plan import run_plan


class JaxTrainer(RayJaxTrainer):
    """Ray's `ray.train.v2.jax.JaxTrainer`, for the same scripts.

    CPU workers are joined by `jax.distributed`. Workers on one node have different GPUs. `Result.metrics` has what was
    reported without a checkpoint. Ctrl-C lets a loop save that calls `stop_requested`. A failure is raised once, with
    its rank and traceback. In the loop, `Checkpoints`, `log_metrics` and the other functions of this package work.

    Args:
        train_loop_per_worker: runs in each worker. Takes no argument, or `train_loop_config`.
        train_loop_config: passed to the loop. Must not make workers import jax when it is unpickled.
        jax_config: joins the workers, such as a `DistributedConfig` with other timeouts. A plain `JaxConfig` is
            replaced by the default, `backend_config(hardware)`.
        scaling_config: the workers. Without `use_gpu` and `use_tpu` they are CPU workers. `num_workers=0` is local
            mode: the loop runs in this process.
        dataset_config: how Ray splits the Ray Datasets among `datasets`.
        run_config: name, storage and policies of the run, with Ray's defaults. `FailureConfig(max_failures=)` is 0 by
            default. Ray Train logs errors only, unless `logging_config` differs from Ray's default.
        datasets: by name for `ray.train.get_dataset_shard`, Ray Datasets, functions that return one, or functions of
            `(rank, world_size)` that return the dataset of a rank.
        validation_config: see Ray's.
        resume_from_checkpoint: must be None, as in Ray. A run continues by its name.
        hardware: a preset in place of `scaling_config`, or its text such as `gpu:4x8`, `auto` or `local`.
        on_metrics: called in a thread of this process with the rank and the metrics of each `log_metrics`, in each
            rank's order. Its exceptions are logged, and the run continues.
        on_event: called in the same thread with each `Event`, such as `Restarting`. The same holds for its exceptions.
        data_cpus: CPUs for the tasks of Ray Data, in addition to the workers' CPUs. By default `Hardware.data_cpus`
            with `datasets`, else 0.
        wait_for_resources_s: seconds to wait for an autoscaler, or a person, to add missing nodes.
        hang_timeout_s: seconds without a step after which the workers are killed and start again, as after a failure,
            if a worker does not answer; five times as long if all answer, and at least 20 times the usual time of a
            step. A step ends when the loop calls `stop_requested`; see there and `watch_steps`. A save, and the end of
            the loops, take an hour without a sign of life, or five times as long if that is longer. With `local`, the
            stack of the loop is logged, and the loop goes on. None, the default, for any time.

    Raises:
        LaunchError: an argument is invalid.
    """

    def __init__(  # noqa: PLR0913 - the signature of Ray's trainer
        self,
        train_loop_per_worker: TrainLoop,
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, AnyDataset] | None = None,
        validation_config: ValidationConfig | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        hardware: Hardware | str | None = None,
        on_metrics: OnMetrics | None = None,
        on_event: OnEvent | None = None,
        data_cpus: int | None = None,
        wait_for_resources_s: float = 0.0,
        hang_timeout_s: float | None = None,
    ) -> None:
        if resume_from_checkpoint is not None:
            raise LaunchError(
                f"resume_from_checkpoint must be None, got {resume_from_checkpoint}. Give the run the storage_path and "
                "name of the run to continue, or pass the checkpoint's path in train_loop_config."
            )
        if hardware is None and scaling_config is None:
            scaling_config = ScalingConfig()
        self._plan = LaunchPlan(
            train_loop=train_loop_per_worker,
            config=train_loop_config,
            hardware=None if hardware is None else read_hardware(hardware),
            scaling_config=scaling_config,
            jax_config=None if type(jax_config) is JaxConfig else jax_config,
            run_config=RunConfig() if run_config is None else run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            data_cpus=data_cpus,
            wait_for_resources_s=wait_for_resources_s,
            hang_timeout_s=hang_timeout_s,
            on_metrics=on_metrics,
            on_event=on_event,
            has_rays_path=True,
        )
        if isinstance(self._plan.hardware, Hardware):
            scaling_config = scaling_of(self._plan.hardware)
        super().__init__(
            train_loop_per_worker,  # pyright: ignore[reportArgumentType]  # Ray declares Dict without its arguments
            train_loop_config=train_loop_config,
            jax_config=jax_config or JaxConfig(),
            scaling_config=scaling_config or ScalingConfig(),
            # Ray 2.60 declares a dict of configs, but uses the argument as one config.
            dataset_config=dataset_config or DataConfig(),  # pyright: ignore[reportArgumentType]
            run_config=self._plan.run_config,
            datasets=dict(datasets or {}),  # pyright: ignore[reportArgumentType]  # Ray knows no ranked datasets
            validation_config=validation_config,
        )

    def fit(self) -> Result:
        """Run the loop on every worker and wait for its end.

        When a worker fails, or Ray Train's controller, all workers start again in new processes, at most
        `FailureConfig(max_failures=)` times without a new checkpoint between the failures. The loop should then
        continue from its newest checkpoint. Preemptions do not count. A loop that raises the same exception at the same
        place twice without a new checkpoint, or a `PermanentError`, does not start again.

        What the loop prints is logged at level INFO, and shown unless the program has configured logging.

        Raises:
            LaunchError: a path is invalid; the cluster has too few resources or does not answer; the storage cannot be
                reached, or is a folder that the nodes do not share; or the loop raised one.
            TypeError: an argument cannot be pickled.
            OutOfMemoryError: memory could not be allocated, or Ray's memory monitor killed workers twice in a row.
            DamagedCheckpointError: all checkpoints of the run are damaged.
            TrainingFailed: workers failed too often, or too few nodes for an elastic group came in time. It is also a
                `ray.train.TrainingFailedError`.
            KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP. A loop that calls `stop_requested` has saved and returned. A
                second Ctrl-C, a second later or more, does not wait for it. All workers have stopped.
            StopRequestedError: the program has called `request_stop`.
            Exception: in local mode, what the loop raised, as it is.
        """
        return run_plan(self._plan)
