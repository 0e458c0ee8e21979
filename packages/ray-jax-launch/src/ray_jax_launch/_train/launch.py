"""Running a training loop on all workers, until it ends or fails too often."""

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
from pickle import PicklingError
from typing import Any

import ray
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError, WorkerGroupError
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._cluster import DATA_CPUS, check_resources, connect, is_started_here, log_folder
from ray_jax_launch._errors import LaunchError, TrainingFailed
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._numbers import check_number
from ray_jax_launch._ray_internals import Trainer
from ray_jax_launch._storage import StoragePath, check_run_name, join_path, open_uri
from ray_jax_launch._train.backend import backend_config, worker_environment
from ray_jax_launch._train.control_actor import BoardHandle, Metrics, start_board
from ray_jax_launch._train.datasets import DataReservation, RankedDataConfig, RankedDataset
from ray_jax_launch._train.failures import ForwardReports, first_failure, in_a_line, note_traceback, to_raise
from ray_jax_launch._train.interrupt import Interrupt
from ray_jax_launch._train.restart_policy import RestartPolicy
from ray_jax_launch._train.worker_context import Session, begin, end, note_step

# An elastic group starts where it saw room for its workers. When that was a node which had just gone, the start fails,
# and the next one sees what there is: this is to happen soon.
_ELASTIC_START_TIMEOUT_S = 15
_COLLECT_EVERY_S = 0.5
_MARKER = ".launch-"

OnMetrics = Callable[[int, Metrics], None]

_logger = logging.getLogger("ray_jax_launch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a launch ended."""

    return_value: Any
    """What the loop returned on rank 0."""

    metrics: Metrics
    """Of each metric, the last value that rank 0 logged (`log_metrics`) or reported (`ray.train.report`)."""

    path: StoragePath
    """Where the run is kept: the name in the storage path."""

    log_folder: str
    """Ray's full logs, on each node: what workers print, and Ray Train's own."""


def scaling_config(hardware: Hardware) -> ScalingConfig:
    """Ray Train's form of the hardware."""
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

    When a worker fails, all workers are started again in new processes, at most `max_failures` times; the loop is
    expected to go on from its newest checkpoint (see `Checkpoints`). Preemptions are not counted. A loop that raises
    the same exception at the same place twice in a row, or a `PermanentError`, is not started again.

    Args:
        train_loop: runs in each worker, where `ray.train`'s functions, `Checkpoints`, `log_metrics` and
            `stop_requested` are at hand and, with several workers, `jax.distributed` is initialised. What rank 0
            returns is the result's `return_value`.
        config: handed to the loop. Must not make workers import jax when it is unpickled.
        hardware: see `parse_hardware`.
        storage_path: a folder that all nodes share, or a URI of object storage.
        name: of the run, which is kept under it in the storage path. Ray keeps its own state in `.ray` there.
        datasets: for each name that `ray.train.get_dataset_shard` knows in the loop, what makes a
            rank's dataset. It is called once per start of the group, when rank 0 first asks for the dataset.
        on_metrics: called in this process, in a thread of its own, with the rank and the metrics of each
            `log_metrics`, in each rank's order. What it raises is logged, and the run goes on.
        data_cpus: CPUs for the tasks of Ray Data beside those of the workers, for a loop that makes datasets of its
            own. By default 1 where `datasets` are given, else 0.
        max_failures: how many failures of the group to recover from.
        preemption_grace_s: seconds that workers on other nodes may go on after a preempted node is gone, to save.
        wait_for_resources_s: seconds to wait for an autoscaler, or a person, to add the nodes that the cluster lacks.
        backend: how the workers join, such as a `DistributedConfig` with other time-outs; by default
            `backend_config(hardware)`.

    Raises:
        LaunchError: an argument cannot be; the cluster has too little, or does not answer; the storage cannot be
            reached, or is a folder that the nodes do not share; or the loop raised one.
        OutOfMemoryError: memory could not be allocated, or Ray's memory monitor killed workers twice in a row.
        DamagedCheckpointError: the run has checkpoints, and all of them are damaged.
        TrainingFailed: a worker failed once more than `max_failures`.
        KeyboardInterrupt: Ctrl-C, or SIGTERM. A loop that listens (`stop_requested`) has saved and returned; a
            second Ctrl-C does not wait for it. The workers have been stopped.
    """
    _check_arguments(train_loop, config, hardware, name, datasets, on_metrics, backend)
    data_cpus = (DATA_CPUS if datasets else 0) if data_cpus is None else data_cpus
    for what, number in (("max_failures", max_failures), ("data_cpus", data_cpus)):
        check_number(what, number, at_least=0)
    for what, number in (("preemption_grace_s", preemption_grace_s), ("wait_for_resources_s", wait_for_resources_s)):
        check_number(what, number, at_least=0, whole=False)
    with _run_folder(storage_path, name) as (run_path, marker):
        connect(hardware)
        check_resources(hardware, data_cpus=data_cpus, wait_for_resources_s=wait_for_resources_s)
    board = start_board()
    interrupt = Interrupt(board)
    trainer = Trainer(
        functools.partial(_run_loop, train_loop, Session(board, run_path, name, marker)),
        train_loop_config=config,
        jax_config=backend_config(hardware) if backend is None else backend,
        scaling_config=scaling_config(hardware),
        # Ray 2.60 declares a dict of these, and then uses it as one.
        dataset_config=RankedDataConfig(),  # pyright: ignore[reportArgumentType]
        # Ray calls a callable dataset at each start of the group; what this one returns is again a
        # callable, which RankedDataConfig calls with the ranks.
        datasets={name: _constant(make) for name, make in (datasets or {}).items()},
        run_config=RunConfig(
            # A name of its own per launch: Ray then never resumes from its own snapshot, which is not
            # written atomically and stops the start when it names a checkpoint that is gone. The
            # checkpoints in the run's folder are the one record of how far it came.
            name=datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ"),
            storage_path=str(join_path(run_path, ".ray")),
            failure_config=FailureConfig(preemption_grace_s=preemption_grace_s),
            worker_runtime_env={"env_vars": worker_environment(hardware)},
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[ForwardReports(board)],
        ),
    )
    trainer.on_start = interrupt.attach
    trainer.policy = RestartPolicy(board, max_failures=max_failures, wait_for_resources_s=wait_for_resources_s)
    try:
        interrupt.handle()
        with (
            _reserving(hardware, str(run_path), data_cpus) as renew,
            _collecting(board, on_metrics, renew),
            _train_settings(hardware),
        ):
            return_value = _fit(trainer, board)
        if ray.get(board.obeyed.remote()):
            raise KeyboardInterrupt("stopped: launch it again, with the same storage_path and name, to continue")
        return Result(
            return_value=return_value,
            metrics=ray.get(board.latest.remote()),
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
        ray.kill(board)
        if marker is not None:
            marker.unlink(missing_ok=True)


def _check_arguments(
    train_loop: Any, config: Any, hardware: Any, name: Any, datasets: Any, on_metrics: Any, backend: Any
) -> None:
    makers = {f"datasets[{key!r}]": make for key, make in datasets.items()} if isinstance(datasets, Mapping) else {}
    rules: list[tuple[str, Any, bool, str]] = [
        ("train_loop", train_loop, callable(train_loop), "a function"),
        ("datasets", datasets, datasets is None or isinstance(datasets, Mapping), "a dict"),
        *((what, make, callable(make), "a function") for what, make in makers.items()),
        ("on_metrics", on_metrics, on_metrics is None or callable(on_metrics), "a function"),
        ("config", config, isinstance(config, dict), "a dict"),
        ("hardware", hardware, isinstance(hardware, Hardware), "made by cpu, gpu, tpu, auto or parse_hardware"),
        ("backend", backend, backend is None or isinstance(backend, JaxConfig), "a JaxConfig"),
    ]
    check_run_name(name)
    for what, value, holds, constraint in rules:
        if not holds:
            raise LaunchError(f"{what} must be {constraint}, got {value!r}. Pass another")
    sent = {"train_loop": train_loop, "backend": backend, **makers}
    for what, value in (sent | {f"config[{key!r}]": config[key] for key in config}).items():
        try:
            cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]
        except (PicklingError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # as the value sees fit
            raise LaunchError(
                f"{what} must be picklable, as the workers get it, got {type(value).__name__} ({error}). Make it in "
                "the loop"
            ) from None


@contextlib.contextmanager
def _run_folder(storage_path: StoragePath, name: str) -> Iterator[tuple[StoragePath, Path | None]]:
    """Make the run's folder, and in it a file that every worker must find (see `Session`).

    If the block fails, both are deleted. Yields the folder, and the file; no file in object storage.
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
            for left in run_path.glob(f"{_MARKER}*"):  # by a launch that was killed
                left.unlink(missing_ok=True)
            marker.touch()
        except OSError as error:
            raise LaunchError(
                f"storage_path must be a folder that can be written, got {run_path} ({error.strerror}). Choose another"
            ) from error
        yield run_path, marker
    except LaunchError:
        for path, delete in ((marker, Path.unlink), *((path, Path.rmdir) for path in reversed(made))):
            with contextlib.suppress(OSError):  # where there is none, or another has put something into it
                delete(path)
        raise


def _fit(trainer: Trainer, board: BoardHandle) -> Any:
    """Train, and return what the loop returned on rank 0."""
    try:
        return trainer.fit().return_value
    except WorkerGroupError as error:
        finished = ray.get(board.finished.remote())
        if finished is None:
            raise
        rank, _ = first_failure(error.worker_failures)
        what = in_a_line(rank, error.worker_failures[rank])
        _logger.warning("%s; this was after the training had ended, and nothing is lost", what)
        return finished[0]


@contextlib.contextmanager
def _collecting(board: BoardHandle, on_metrics: OnMetrics | None, renew: Callable[[], None]) -> Iterator[None]:
    """Hand on what workers log, say why they failed, and renew what is reserved, while the block runs."""
    stop = threading.Event()
    hand_on = on_metrics or _do_nothing

    def collect() -> None:
        stopping = False
        while not stopping:
            stopping = stop.wait(_COLLECT_EVERY_S)
            renew()
            logged, lines = ray.get(board.collect.remote())
            for rank, metrics in logged:
                try:
                    hand_on(rank, metrics)
                except Exception:  # the user's function may raise anything; the run is worth more than what shows it
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
    """Keep CPUs from an elastic group while the block runs. Yields what is to be called every few seconds."""
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
    """Have Ray Train, which reads these from the environment, do what it has no arguments for. The user's own win."""
    settings: dict[str, str] = {}
    if hardware.is_elastic:
        settings["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(_ELASTIC_START_TIMEOUT_S)
    if is_started_here():
        # It looks for nodes that are about to be taken away, in a process of its own that takes seconds to start.
        settings["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def _run_loop(train_loop: Callable[[dict[str, Any]], Any], session: Session, config: dict[str, Any]) -> Any:
    """Run the loop in a worker. An exception takes its traceback along, which is lost on the way otherwise."""
    begin(session)
    with contextlib.ExitStack() as stack:
        stack.push(note_traceback)
        stack.push(note_step)
        returned = train_loop(config)
    end()
    return returned


def _do_nothing(*args: Any) -> None:
    pass


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
