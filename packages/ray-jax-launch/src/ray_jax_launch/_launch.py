"""Running a training loop on all workers, until it ends or fails too often."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch._backend import backend_config, worker_environment
from ray_jax_launch._cluster import check_resources, connect
from ray_jax_launch._data import RankedDataConfig, RankedDataset
from ray_jax_launch._errors import TrainingFailed
from ray_jax_launch._hardware import Hardware

# Starts that fail before any worker runs, for instance because a node went away. Ray would retry for ever.
_MAX_CONTROLLER_FAILURES = 3


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
    run_dir: Path,
    datasets: Mapping[str, RankedDataset] | None = None,
    max_failures: int = 3,
    backend: JaxConfig | None = None,
) -> Result:
    """Run `train_loop(config)` on every worker under Ray Train and wait for its end.

    When a worker fails, the whole group is started again in new processes, at most `max_failures`
    times; the loop is expected to go on from its newest checkpoint (see `Checkpoints`).

    Args:
        train_loop: runs in each worker, where `ray.train`'s functions are at hand and, with several
            workers, `jax.distributed` is initialised. What rank 0 returns is the result's
            `return_value`.
        config: handed to the loop. Must not make workers import jax when it is unpickled.
        hardware: see `parse_hardware`.
        run_dir: folder of the run, on storage that all nodes share. Ray keeps its own state in
            `.ray` there.
        datasets: for each name that `ray.train.get_dataset_shard` knows in the loop, what makes a
            rank's dataset. It is called again each time the group starts.
        max_failures: how many failures of the group to recover from.
        backend: how the workers join, such as a `DistributedConfig` with other time-outs; by default
            `backend_config(hardware)`.

    Raises:
        LaunchError: the cluster has too little, or does not answer.
        TrainingFailed: a worker failed once more than `max_failures`.
        KeyboardInterrupt: Ctrl-C; the workers have been stopped.
    """
    connect(hardware)
    check_resources(hardware)
    trainer = JaxTrainer(
        functools.partial(_run_loop, train_loop),
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
            storage_path=str(run_dir.absolute() / ".ray"),
            failure_config=FailureConfig(max_failures=max_failures, controller_failure_limit=_MAX_CONTROLLER_FAILURES),
            worker_runtime_env={"env_vars": worker_environment(hardware)},
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        return trainer.fit()
    except SystemExit as error:
        # So ends Ray's own handler of Ctrl-C, once it has stopped the workers.
        raise KeyboardInterrupt from error
    except WorkerGroupError as error:
        rank, failure = min(error.worker_failures.items())
        details = "".join(getattr(failure, "__notes__", [])) or str(failure)
        raise TrainingFailed(f"worker {rank} of {hardware} failed", rank=rank, details=details.strip()) from error
    except TrainingFailedError as error:
        raise TrainingFailed(f"{hardware} could not be started", rank=None, details=str(error)) from error


def _run_loop(train_loop: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    """Run the loop in a worker. An exception takes its traceback along, which is lost on the way otherwise."""
    with contextlib.ExitStack() as stack:
        stack.push(_note_traceback)
        return train_loop(config)


def _note_traceback(
    exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
) -> None:
    if exc is not None:
        exc.add_note("".join(traceback.format_exception(exc)))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
