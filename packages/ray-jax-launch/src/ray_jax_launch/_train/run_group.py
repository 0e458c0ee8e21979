"""Run a prepared launch on a group of workers: start it under Ray Train, start it again, raise its errors."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError
from ray.exceptions import RayActorError
from ray.train import PreemptionError, TrainingFailedError, WorkerGroupError

from ray_jax_launch._checkpoint.ray_snapshot import repair_snapshot
from ray_jax_launch._cluster import is_silent, is_started_here, log_folder
from ray_jax_launch._control.control_actor import ControlHandle, answer, start_control_actor
from ray_jax_launch._control.forwarding import forwarding
from ray_jax_launch._control.interrupt import Interrupt
from ray_jax_launch._control.session import Session
from ray_jax_launch._hardware import Hardware
from ray_jax_launch._lost_cluster import ClusterLostError, end_actor, wait_for
from ray_jax_launch._ray_internals.ray_cluster import hide_cluster_messages, placement_groups, remove_placement_groups
from ray_jax_launch._ray_internals.ray_train import AtomicSnapshots, FixedPolicy, Trainer, WaitingPolicy
from ray_jax_launch._train.backend import backend_config, train_settings
from ray_jax_launch._train.datasets import RankedDataConfig, for_group, reserving
from ray_jax_launch._train.failures import ForwardReports, WorkersFailed, first_failure, in_a_line, to_raise
from ray_jax_launch._train.fit_result import Result, make_result
from ray_jax_launch._train.launch_plan import PreparedLaunch
from ray_jax_launch._train.restart_policy import (
    RestartPolicy,
    note_waiting,
    restart_wait_s,
    restart_without_controller,
)
from ray_jax_launch._train.worker_context import run_loop

_logger = logging.getLogger("ray_jax_launch")


def run_group(launch: PreparedLaunch) -> Result:
    """Run the loop on every worker, and wait for its end."""
    if is_silent():
        hide_cluster_messages()
    control = start_control_actor(launch.plan.hang_timeout_s)
    interrupt = Interrupt(control)
    try:
        interrupt.install()
        with _raising_as_documented(launch.hardware):
            trainer, return_value = _run_to_the_end(launch, control, interrupt)
            if answer(control.state.remote()).is_acknowledged:
                raise KeyboardInterrupt("stopped: launch it again, with the same storage_path and name, to continue")
            return make_result(trainer.outcome, control, return_value, log_folder(), launch.result_path)
    finally:
        interrupt.restore()
        end_actor(control)


def _run_to_the_end(launch: PreparedLaunch, control: ControlHandle, interrupt: Interrupt) -> tuple[Trainer, Any]:
    """Run Ray's trainer, again after each death of its controller. Return the last one and the value of rank 0."""
    plan = launch.plan
    place = launch.folder and launch.folder.path
    with (
        reserving(launch.hardware, f"{place}/{plan.run_name}", launch.data_cpus) as renew,
        forwarding(control, plan.on_metrics, plan.on_event, renew=renew, on_silence=interrupt.on_silence),
        train_settings(launch.hardware),
    ):
        while True:
            trainer = _make_trainer(launch, control)
            trainer.on_start, trainer.wait = interrupt.attach, wait_for
            others = placement_groups()
            try:
                return trainer, _fit(trainer, control)
            except (RayActorError, RayOutOfMemoryError) as error:
                # Ray Train's controller has died, and its workers with it.
                if interrupt.is_requested:
                    raise KeyboardInterrupt from error
                if not restart_without_controller(control, launch.run_config.failure_config):
                    what = f"Ray Train's controller died, and with it {launch.hardware}"
                    raise WorkersFailed(what, None, str(error), log_folder(of_failure=True)) from error
                # On another cluster, Ray Train has an actor that does this, unless the controller dies early.
                remove_placement_groups(placement_groups() - others)
                repair_snapshot(*launch.open_storage())


@contextlib.contextmanager
def _raising_as_documented(hardware: Hardware) -> Iterator[None]:
    """Raise the errors that `launch` documents, in place of Ray's."""
    try:
        yield
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


def _make_trainer(launch: PreparedLaunch, control: ControlHandle) -> Trainer:
    """Make Ray's trainer for one start of its controller."""
    plan, run_config = launch.plan, launch.run_config
    run_path, marker = launch.folder or (None, None)
    is_watched = plan.hang_timeout_s is not None
    session = Session(control, run_path, plan.run_name, marker, prints=is_silent(), is_watched=is_watched)
    trainer = Trainer(
        functools.partial(run_loop, plan.worker_loop(), session),
        jax_config=plan.jax_config or backend_config(launch.hardware),
        scaling_config=launch.scaling,
        # Ray 2.60 declares a dict of configs, but uses the argument as one config.
        dataset_config=RankedDataConfig(plan.dataset_config),  # pyright: ignore[reportArgumentType]
        datasets=for_group(plan.datasets or {}),
        run_config=dataclasses.replace(
            run_config, callbacks=[*(run_config.callbacks or []), AtomicSnapshots(), ForwardReports(control)]
        ),
        validation_config=plan.validation_config,
    )
    trainer.policies = {
        "failure_policy": RestartPolicy(
            control,
            max_failures=plan.failures.max_failures,
            max_preemptions=plan.failures.max_preemption_failures,
            wait_for_resources_s=plan.wait_for_resources_s,
        )
    }
    if launch.hardware.is_elastic:
        wait_s = restart_wait_s(plan.wait_for_resources_s)
        on_wait = functools.partial(note_waiting, control, wait_s)
        trainer.policies["scaling_policy"] = WaitingPolicy(
            launch.scaling, launch.hardware.worker_counts, on_wait, control.request_resize.remote, wait_s
        )
    elif is_started_here():
        trainer.policies["scaling_policy"] = FixedPolicy(launch.scaling)
    return trainer


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
