"""`JaxTrainer`: Ray's trainer with its signature, which joins, interrupts, recovers and reports."""

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.data
from pyarrow.fs import LocalFileSystem
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.exceptions import RayActorError
from ray.train import (
    Checkpoint,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    PreemptionError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    ValidationConfig,
    WorkerGroupError,
)
from ray.train.v2.jax import JaxTrainer as RayJaxTrainer
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._checkpoint.ray_snapshot import repair_snapshot
from ray_jax_launch._cluster import auto, check_resources, connect, is_silent, is_started_here, log_folder
from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._hardware import Hardware, parse_hardware
from ray_jax_launch._lost_cluster import ClusterLostError, end_actor, wait_for
from ray_jax_launch._numbers import MAX_COUNT, check_number, check_type
from ray_jax_launch._ray_internals.ray_cluster import hide_cluster_messages, placement_groups, remove_placement_groups
from ray_jax_launch._ray_internals.ray_train import AtomicSnapshots, Trainer, WaitingPolicy
from ray_jax_launch._run_folder import RunFolder, making_run_folder
from ray_jax_launch._scaling import hardware_of, resources_of, share_cpus
from ray_jax_launch._scaling import scaling_config as scaling_of
from ray_jax_launch._storage import as_storage_path, check_run_name, open_uri
from ray_jax_launch._train.backend import backend_config, check_env_vars, train_settings, worker_environment
from ray_jax_launch._train.control_actor import (
    ControlHandle,
    OnMetrics,
    answer,
    forwarding,
    showing_info,
    start_control_actor,
)
from ray_jax_launch._train.datasets import (
    RankedDataConfig,
    RankedDataset,
    check_datasets,
    for_group,
    for_one,
    reserving,
)
from ray_jax_launch._train.failures import ForwardReports, WorkersFailed, first_failure, in_a_line, to_raise
from ray_jax_launch._train.fit_result import Result, make_result
from ray_jax_launch._train.interrupt import Interrupt
from ray_jax_launch._train.local_mode import fit_locally
from ray_jax_launch._train.restart_policy import RestartPolicy, restart_wait_s, restart_without_controller
from ray_jax_launch._train.worker_context import Session, run_loop

TrainLoop = Callable[[], Any] | Callable[[dict[str, Any]], Any]
AnyDataset = ray.data.Dataset | Callable[[], ray.data.Dataset] | RankedDataset

_logger = logging.getLogger("ray_jax_launch")


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
        data_cpus: CPUs for the tasks of Ray Data, in addition to the workers' CPUs. By default `Hardware.data_cpus`
            with `datasets`, else 0.
        wait_for_resources_s: seconds to wait for an autoscaler, or a person, to add missing nodes.

    Attributes:
        shape: arguments of `ray_jax_launch.scaling_config` beside the hardware.

    Raises:
        LaunchError: an argument is invalid.
    """

    def __init__(
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
        data_cpus: int | None = None,
        wait_for_resources_s: float = 0.0,
    ) -> None:
        if resume_from_checkpoint is not None:
            raise LaunchError(
                f"resume_from_checkpoint must be None, got {resume_from_checkpoint}. Give the run the storage_path and "
                "name of the run to continue, or pass the checkpoint's path in train_loop_config."
            )
        if hardware is not None and scaling_config is not None:
            raise LaunchError(
                f"hardware must be None with a scaling_config, got {str(hardware)!r} and {scaling_config}. Give one of "
                "the two."
            )
        for what, given, wanted in (
            ("scaling_config", scaling_config, ScalingConfig),
            ("run_config", run_config, RunConfig),
            ("dataset_config", dataset_config, DataConfig),
            ("jax_config", jax_config, JaxConfig),
        ):
            if given is not None and not isinstance(given, wanted):
                name = wanted.__name__
                raise LaunchError(
                    f"{what} must be a {name}, got {shown(given)}. Make it a {name}(...), or leave it out."
                )
        check_datasets(datasets)
        self._data_cpus = 0 if data_cpus is None and not datasets else data_cpus
        run_config = run_config or RunConfig()
        failures = run_config.failure_config or FailureConfig()
        if self._data_cpus is not None:
            check_number("data_cpus", self._data_cpus, at_least=0, at_most=MAX_COUNT)
        if on_metrics is not None:
            check_type("on_metrics", on_metrics, Callable, "a function", "Leave it out, or give a function")
        if train_loop_config is not None:
            check_type("the config of the loop", train_loop_config, dict, "a dict", "Put the value into a dict")
        check_number("max_failures", failures.max_failures, at_least=-1)
        for what, seconds in (
            ("preemption_grace_s", failures.preemption_grace_s),
            ("wait_for_resources_s", wait_for_resources_s),
        ):
            check_number(what, seconds, at_least=0, whole=False)
        check_run_name(run_config.name or "")
        check_env_vars(run_config.worker_runtime_env)
        self._hardware = hardware if isinstance(hardware, Hardware | None) else _parse(hardware)
        if self._hardware is not None:
            scaling_config = scaling_of(self._hardware)
        self._is_auto = isinstance(hardware, str) and hardware == "auto"
        self._on_metrics, self._wait_s = on_metrics, wait_for_resources_s
        self._given_jax_config = None if type(jax_config) is JaxConfig else jax_config
        self.shape: dict[str, Any] = {}
        super().__init__(
            train_loop_per_worker,  # pyright: ignore[reportArgumentType]  # Ray declares Dict without its arguments
            train_loop_config=train_loop_config,
            jax_config=jax_config or JaxConfig(),
            scaling_config=scaling_config or ScalingConfig(),
            # Ray 2.60 declares a dict of configs, but uses the argument as one config.
            dataset_config=dataset_config or DataConfig(),  # pyright: ignore[reportArgumentType]
            run_config=run_config,
            datasets=dict(datasets or {}),  # pyright: ignore[reportArgumentType]  # Ray knows no ranked datasets
            validation_config=validation_config,
        )
        try:
            if inspect.iscoroutinefunction(train_loop_per_worker):
                raise TypeError("It is async: nobody would await it.")
            self._get_train_func()
        except (TypeError, ValueError) as error:
            raise LaunchError(
                f"train_loop_per_worker must be a function of no argument or one, got {train_loop_per_worker}. {error}"
            ) from error

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
        with self._folder() as folder, showing_info():
            hardware, scaling = self._connect()
            self._data_cpus = hardware.data_cpus if self._data_cpus is None else self._data_cpus
            if hardware.kind != "local" and is_started_here():
                scaling = share_cpus(scaling, ray.cluster_resources().get("CPU", 0), self._data_cpus)
            if hardware.kind != "local":
                check_resources(
                    hardware,
                    data_cpus=self._data_cpus,
                    wait_for_resources_s=self._wait_s,
                    resources_per_worker=resources_of(scaling),
                )
            run_config = self._run_config(folder, hardware)
            self._repair(run_config, folder)
            if hardware.kind == "local":
                return fit_locally(
                    self._get_train_func(),
                    run_config=run_config,
                    run_path=folder.path if folder else None,
                    datasets=for_one(self.datasets),
                    on_metrics=self._on_metrics,
                )
            return self._fit_group(hardware, scaling, run_config, folder)

    def _folder(self) -> contextlib.AbstractContextManager[RunFolder | None]:
        config = self.run_config
        if config.storage_filesystem is not None:
            return contextlib.nullcontext()
        return making_run_folder(as_storage_path(config.storage_path or ""), config.name or "")

    def _connect(self) -> tuple[Hardware, ScalingConfig]:
        """Start Ray if it is needed, and return the hardware."""
        if self._is_auto:
            connect()
            hardware = auto()
            return hardware, scaling_of(hardware, **self.shape)
        scaling, hardware = self.scaling_config, self._hardware
        if hardware is None:
            hardware = hardware_of(scaling)
        else:
            scaling = scaling_of(hardware, **self.shape)
        if hardware.kind != "local":
            _logger.info("starting %s", hardware)
            connect(hardware)
        elif self.datasets or self._data_cpus:
            connect()
        return hardware, scaling

    def _run_config(self, folder: RunFolder | None, hardware: Hardware) -> RunConfig:
        """Return the user's config with the storage as Ray needs it, and the workers' environment."""
        given = self.run_config
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

    def _repair(self, run_config: RunConfig, folder: RunFolder | None) -> None:
        if folder is None:
            filesystem, root = run_config.storage_filesystem, f"{run_config.storage_path}/{run_config.name}"
            assert filesystem is not None, "without a folder there is a filesystem"
        elif isinstance(folder.path, Path):
            filesystem, root = LocalFileSystem(), str(folder.path)
        else:
            filesystem, root = open_uri(folder.path)
        repair_snapshot(filesystem, root.rstrip("/"))

    def _fit_group(
        self, hardware: Hardware, scaling: ScalingConfig, run_config: RunConfig, folder: RunFolder | None
    ) -> Result:
        if is_silent():
            hide_cluster_messages()
        control = start_control_actor()
        interrupt = Interrupt(control)
        try:
            interrupt.install()
            with (
                reserving(hardware, f"{folder and folder.path}/{run_config.name}", self._data_cpus or 0) as renew,
                forwarding(control, self._on_metrics, renew=renew, on_silence=interrupt.on_silence),
                train_settings(hardware),
            ):
                while True:
                    trainer = self._trainer(hardware, scaling, run_config, folder, control)
                    trainer.on_start, trainer.wait = interrupt.attach, wait_for
                    others = placement_groups()
                    try:
                        return_value = _fit(trainer, control)
                        break
                    except (RayActorError, RayOutOfMemoryError) as error:
                        # Ray Train's controller has died, and its workers with it.
                        if interrupt.is_requested:
                            raise KeyboardInterrupt from error
                        if not restart_without_controller(control, run_config.failure_config):
                            what = f"Ray Train's controller died, and with it {hardware}"
                            raise WorkersFailed(what, None, str(error), log_folder(of_failure=True)) from error
                        # On another cluster, Ray Train has an actor that does this, unless the controller dies early.
                        remove_placement_groups(placement_groups() - others)
                        self._repair(run_config, folder)
            if answer(control.state.remote()).is_acknowledged:
                raise KeyboardInterrupt("stopped: launch it again, with the same storage_path and name, to continue")
            return make_result(trainer.outcome, control, return_value, log_folder())
        except SystemExit:
            raise KeyboardInterrupt from None  # see Interrupt
        except WorkersFailed:  # of the controller; it is an error of Ray Train too
            raise
        except ClusterLostError as error:
            raise WorkersFailed(str(error), None, "", log_folder(of_failure=True)) from None
        except WorkerGroupError as error:
            raise to_raise(error.worker_failures, hardware, log_folder(of_failure=True)) from None  # Ray's repeats it
        except PreemptionError as error:
            raise WorkersFailed(f"{hardware} lost nodes", None, str(error), log_folder(of_failure=True)) from error
        except TrainingFailedError as error:
            what = f"{hardware} could not be started, or lost a worker while it was"
            raise WorkersFailed(what, None, str(error), log_folder(of_failure=True)) from error
        finally:
            interrupt.restore()
            end_actor(control)

    def _trainer(
        self,
        hardware: Hardware,
        scaling: ScalingConfig,
        run_config: RunConfig,
        folder: RunFolder | None,
        control: ControlHandle,
    ) -> Trainer:
        path, marker = folder or (None, None)
        session = Session(control, path, run_config.name or "", marker, prints=is_silent())
        trainer = Trainer(
            functools.partial(run_loop, self._get_train_func(), session),
            jax_config=self._given_jax_config or backend_config(hardware),
            scaling_config=scaling,
            dataset_config=RankedDataConfig(self.data_config),  # pyright: ignore[reportArgumentType]  # see __init__
            datasets=for_group(self.datasets),
            run_config=dataclasses.replace(
                run_config, callbacks=[*(run_config.callbacks or []), AtomicSnapshots(), ForwardReports(control)]
            ),
            validation_config=self.validation_config,
        )
        failures = run_config.failure_config or FailureConfig()
        trainer.policies = {
            "failure_policy": RestartPolicy(
                control,
                max_failures=failures.max_failures,
                max_preemptions=failures.max_preemption_failures,
                wait_for_resources_s=self._wait_s,
            )
        }
        if hardware.is_elastic:
            send, wait_s = (control.log.remote, control.request_resize.remote), restart_wait_s(self._wait_s)
            trainer.policies["scaling_policy"] = WaitingPolicy(scaling, *send, wait_s)
        return trainer


def _parse(text: Any) -> Hardware | None:
    """Read the hardware's text; None for `auto`, which needs a cluster."""
    if not isinstance(text, str):
        raise LaunchError(f"hardware must be a Hardware or its text, got {shown(text)}. Write it as in gpu:8.")
    return None if text == "auto" else parse_hardware(text)


def _fit(trainer: Trainer, control: ControlHandle) -> Any:
    """Train, and return the value of rank 0."""
    try:
        return trainer.fit().return_value
    except (WorkerGroupError, PreemptionError) as error:
        finished = answer(control.state.remote()).finished
        if finished is None:
            raise
        what = "the workers were preempted"
        if isinstance(error, WorkerGroupError):
            rank, _ = first_failure(error.worker_failures)
            what = in_a_line(rank, error.worker_failures[rank])
        _logger.warning("%s; this was after the training had ended, and nothing is lost", what)
        return finished[0]
