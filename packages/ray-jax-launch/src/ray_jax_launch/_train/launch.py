"""Run a training loop on all workers under Ray Train, until it ends or fails too often."""

import contextlib
import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.train import (
    FailureConfig,
    LoggingConfig,
    PreemptionError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._cluster import DATA_CPUS, check_resources, connect, is_started_here, log_folder
from ray_jax_launch._errors import LaunchError, TrainingFailed
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._numbers import check_number
from ray_jax_launch._ray_internals import Trainer
from ray_jax_launch._storage import StoragePath, check_run_name, join_path, open_uri
from ray_jax_launch._train.backend import backend_config, worker_environment
from ray_jax_launch._train.control_actor import ControlHandle, Metrics, start_control_actor
from ray_jax_launch._train.datasets import DataReservation, RankedDataConfig, RankedDataset
from ray_jax_launch._train.failures import ForwardReports, first_failure, in_a_line, note_traceback, to_raise
from ray_jax_launch._train.interrupt import Interrupt
from ray_jax_launch._train.restart_policy import RestartPolicy
from ray_jax_launch._train.worker_context import Session, acknowledge_stop, begin, note_step

# An elastic group starts on the nodes that it saw. If one of them has just been lost, the start fails, and the next
# start sees the remaining nodes. A short timeout makes this fast.
_ELASTIC_START_TIMEOUT_S = 15
_COLLECT_EVERY_S = 0.5
_MARKER = ".launch-"

OnMetrics = Callable[[int, Metrics], None]

_logger = logging.getLogger("ray_jax_launch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of a launch."""

    return_value: Any
    """Value that the loop returned on rank 0."""

    metrics: Metrics
    """Last value of each metric that rank 0 logged (`log_metrics`) or reported (`ray.train.report`)."""

    path: StoragePath
    """Folder of the run: the name in the storage path."""

    log_folder: str
    """Folder of Ray's full logs on each node: the output of workers, and Ray Train's own logs."""


def scaling_config(hardware: Hardware) -> ScalingConfig:
    """Return Ray Train's scaling config for this hardware."""
    num_workers = (hardware.min_workers, hardware.num_workers) if hardware.is_elastic else hardware.num_workers
    if hardware.kind == "gpu":
        return ScalingConfig(
            num_workers=num_workers,
            use_gpu=True,
            resources_per_worker={"CPU": 1, "GPU": hardware.devices_per_worker},
        )
    if hardware.kind == "tpu":
        return ScalingConfig(
            num_workers=num_workers,
            use_tpu=True,
            accelerator_type=hardware.accelerator_type,
            topology=hardware.topology,
        )
    return ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1})


def launch(
    train_loop: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    *,
    hardware: Hardware,
    storage_path: StoragePath,
    name: str,
    datasets: Mapping[str, RankedDataset] | None = None,
    on_metrics: OnMetrics | None = None,
    data_cpus: int | None = None,
    max_failures: int = 3,
    preemption_grace_s: float = 0.0,
    wait_for_resources_s: float = 0.0,
    backend: JaxConfig | None = None,
) -> Result:
    """Run `train_loop(config)` on every worker under Ray Train and wait for its end.

    When a worker fails, all workers start again in new processes, at most `max_failures` times. The loop should then
    continue from its newest checkpoint (see `Checkpoints`). Preemptions do not count. A loop that raises the same
    exception at the same place twice in a row, or a `PermanentError`, does not start again.

    Args:
        train_loop: runs in each worker. It can use `ray.train`, `Checkpoints`, `log_metrics` and `stop_requested`. With
            several workers, `jax.distributed` is initialised.
        config: passed to the loop. Must not make workers import jax when it is unpickled.
        hardware: see `parse_hardware`.
        storage_path: a folder that all nodes share, or a URI of object storage.
        name: the run's folder in the storage path. Ray keeps its own state in `.ray` there.
        datasets: by name for `ray.train.get_dataset_shard`, functions that make the dataset of a rank. Each is called
            once per start of the group, when rank 0 first asks for the dataset.
        on_metrics: called in a thread of this process with the rank and the metrics of each `log_metrics`, in each
            rank's order. Its exceptions are logged, and the run continues.
        data_cpus: CPUs for the tasks of Ray Data, in addition to the workers' CPUs, if the loop makes its own datasets.
            By default 1 with `datasets`, else 0.
        max_failures: the number of failures of the group to recover from.
        preemption_grace_s: seconds that workers on other nodes have to save after a preempted node is gone.
        wait_for_resources_s: seconds to wait for an autoscaler, or a person, to add missing nodes.
        backend: joins the workers, such as a `DistributedConfig` with other timeouts; by default
            `backend_config(hardware)`.

    Raises:
        LaunchError: a number, `name` or `storage_path` is invalid; the cluster has too few resources or does not
            answer; the storage cannot be reached, or is a folder that the nodes do not share; or the loop raised one.
        TypeError: `train_loop`, `config` or `datasets` cannot be pickled.
        OutOfMemoryError: memory could not be allocated, or Ray's memory monitor killed workers twice in a row.
        DamagedCheckpointError: all checkpoints of the run are damaged.
        TrainingFailed: workers failed more than `max_failures` times.
        KeyboardInterrupt: Ctrl-C or SIGTERM. A loop that calls `stop_requested` has saved and returned. A second Ctrl-C
            does not wait for it. All workers have stopped.
    """
    datasets = datasets or {}
    check_run_name(name)
    data_cpus = (DATA_CPUS if datasets else 0) if data_cpus is None else data_cpus
    for what, number in (("max_failures", max_failures), ("data_cpus", data_cpus)):
        check_number(what, number, at_least=0)
    for what, number in (("preemption_grace_s", preemption_grace_s), ("wait_for_resources_s", wait_for_resources_s)):
        check_number(what, number, at_least=0, whole=False)
    with _run_folder(storage_path, name) as (run_path, marker):
        connect(hardware)
        check_resources(hardware, data_cpus=data_cpus, wait_for_resources_s=wait_for_resources_s)
    control = start_control_actor()
    interrupt = Interrupt(control)
    trainer = Trainer(
        functools.partial(_run_loop, train_loop, Session(control, run_path, name, marker)),
        train_loop_config=config,
        jax_config=backend_config(hardware) if backend is None else backend,
        scaling_config=scaling_config(hardware),
        # Ray 2.60 declares a dict of configs, but uses the argument as one config.
        dataset_config=RankedDataConfig(),  # pyright: ignore[reportArgumentType]
        # Ray calls a callable dataset at each start of the group. The result here is again a callable, which
        # RankedDataConfig calls with the ranks.
        datasets={name: _constant(make) for name, make in datasets.items()},
        run_config=RunConfig(
            # With a unique name per launch, Ray never resumes from its own snapshot. Ray does not write it atomically,
            # and the start fails if it lists a deleted checkpoint. Only the checkpoints in the run's folder count.
            name=datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ"),
            storage_path=str(join_path(run_path, ".ray")),
            failure_config=FailureConfig(preemption_grace_s=preemption_grace_s),
            worker_runtime_env={"env_vars": worker_environment(hardware)},
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[ForwardReports(control)],
        ),
    )
    trainer.on_start = interrupt.attach
    trainer.policy = RestartPolicy(control, max_failures=max_failures, wait_for_resources_s=wait_for_resources_s)
    try:
        interrupt.install()
        with (
            _reserving(hardware, str(run_path), data_cpus) as renew,
            _forwarding(control, on_metrics, renew),
            _train_settings(hardware),
        ):
            return_value = _fit(trainer, control)
        if ray.get(control.acknowledged.remote()):
            raise KeyboardInterrupt("stopped: launch it again, with the same storage_path and name, to continue")
        return Result(
            return_value=return_value,
            metrics=ray.get(control.latest.remote()),
            path=run_path,
            log_folder=log_folder(),
        )
    except SystemExit:
        raise KeyboardInterrupt from None  # see Interrupt
    except WorkerGroupError as error:
        # Ray's error repeats the traceback.
        raise to_raise(error.worker_failures, hardware, log_folder()) from None
    except PreemptionError as error:
        raise TrainingFailed(f"{hardware} lost nodes", None, str(error), log_folder()) from error
    except TrainingFailedError as error:
        what = f"{hardware} could not be started, or lost a worker while it was"
        raise TrainingFailed(what, None, str(error), log_folder()) from error
    finally:
        interrupt.restore()
        ray.kill(control)
        if marker is not None:
            marker.unlink(missing_ok=True)


@contextlib.contextmanager
def _run_folder(storage_path: StoragePath, name: str) -> Iterator[tuple[StoragePath, Path | None]]:
    """Make the run's folder, with a marker file that every worker must find (see `Session`).

    A LaunchError of the block deletes both. Yields the folder and the marker, which is None in object storage.
    """
    run_path = join_path(storage_path, name)
    if not isinstance(run_path, Path):
        open_uri(run_path, create=True)
        yield run_path, None
        return
    run_path = run_path.absolute()
    marker = run_path / f"{_MARKER}{uuid.uuid4().hex}"
    made: list[Path] = []
    try:
        try:
            made += (path for path in (*reversed(run_path.parents), run_path) if not path.exists())
            run_path.mkdir(parents=True, exist_ok=True)
            for left in run_path.glob(f"{_MARKER}*"):  # left by a launch that was killed
                left.unlink(missing_ok=True)
            marker.touch()
        except OSError as error:
            raise LaunchError(
                f"storage_path must be a folder that can be written, got {run_path} ({error.strerror}). Choose another"
            ) from error
        yield run_path, marker
    except LaunchError:
        for path, delete in ((marker, Path.unlink), *((path, Path.rmdir) for path in reversed(made))):
            with contextlib.suppress(OSError):  # it does not exist, or another process has written into it
                delete(path)
        raise


def _fit(trainer: Trainer, control: ControlHandle) -> Any:
    """Train, and return the value of rank 0."""
    try:
        return trainer.fit().return_value
    except WorkerGroupError as error:
        finished = ray.get(control.finished.remote())
        if finished is None:
            raise
        rank, _ = first_failure(error.worker_failures)
        what = in_a_line(rank, error.worker_failures[rank])
        _logger.warning("%s; this was after the training had ended, and nothing is lost", what)
        return finished[0]


@contextlib.contextmanager
def _forwarding(control: ControlHandle, on_metrics: OnMetrics | None, renew: Callable[[], None]) -> Iterator[None]:
    """Forward metrics to `on_metrics` and lines to the log, and call `renew`, every half second of the block."""
    stop = threading.Event()
    forward = on_metrics or _do_nothing

    def collect() -> None:
        stopping = False
        while not stopping:
            stopping = stop.wait(_COLLECT_EVERY_S)
            renew()
            logged, lines = ray.get(control.collect.remote())
            for rank, metrics in logged:
                try:
                    forward(rank, metrics)
                except Exception:  # the user's function may raise anything, and the run must not end by it
                    _logger.exception("on_metrics failed; it gets the next metrics all the same")
            for line in lines:
                _logger.warning(line)

    thread = threading.Thread(target=collect, name="collect-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _reserving(hardware: Hardware, name: str, num_cpus: int) -> Iterator[Callable[[], None]]:
    """Reserve CPUs for Ray Data while the block runs. Yields a function to call every few seconds."""
    if not hardware.is_elastic or not num_cpus:
        yield _do_nothing
        return
    reservation = DataReservation(name, num_cpus)
    reservation.renew()
    try:
        yield reservation.renew
    finally:
        reservation.cancel()


@contextlib.contextmanager
def _train_settings(hardware: Hardware) -> Iterator[None]:
    """Set environment variables of Ray Train that have no argument. The user's own values win."""
    settings: dict[str, str] = {}
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


def _run_loop(train_loop: Callable[[dict[str, Any]], Any], session: Session, config: dict[str, Any]) -> Any:
    """Run the loop in a worker, and add traceback and step to its exception."""
    begin(session)
    with contextlib.ExitStack() as stack:
        stack.push(note_traceback)
        stack.push(note_step)
        returned = train_loop(config)
    acknowledge_stop()
    return returned


def _do_nothing(*args: Any) -> None:
    pass


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
