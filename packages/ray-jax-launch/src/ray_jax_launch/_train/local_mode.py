"""Local mode: the loop runs in the driver's process. Ray starts only for datasets or `data_cpus`."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ray.train import LoggingConfig

from ray_jax_launch._cluster import log_folder
from ray_jax_launch._control.control_actor import LocalControl
from ray_jax_launch._control.forwarding import forwarding
from ray_jax_launch._control.interrupt import Interrupt
from ray_jax_launch._control.session import Session
from ray_jax_launch._ray_internals.ray_train import LocalReports
from ray_jax_launch._train.datasets import for_one
from ray_jax_launch._train.fit_result import Result, make_result
from ray_jax_launch._train.launch_plan import PreparedLaunch
from ray_jax_launch._train.worker_context import run_local_loop

_logger = logging.getLogger("ray_jax_launch")


def run_local(launch: PreparedLaunch) -> Result:
    """Run the loop in this process. Its exceptions leave it as they are, unless it has called `mark_finished`.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM, as for a group.
    """
    plan, run_config = launch.plan, launch.run_config
    control = LocalControl(plan.hang_timeout_s)
    run_path = launch.folder.path if launch.folder else None
    session = Session(control, run_path, plan.run_name, None, is_local=True, is_watched=plan.hang_timeout_s is not None)
    on_report = partial(control.report.remote, has_checkpoint=False)
    reports = LocalReports(run_config, for_one(plan.datasets or {}), on_report)
    interrupt = Interrupt(control)
    runtime_env: Any = run_config.worker_runtime_env or {}
    try:
        interrupt.install()
        with (
            forwarding(control, plan.on_metrics, plan.on_event),
            reports.active(),
            _environment(runtime_env.get("env_vars") or {}),
            _logging(run_config.logging_config),
        ):
            return_value = _run(plan.worker_loop(), session, control)
    finally:
        interrupt.restore()
    if control.state.remote().is_acknowledged:
        raise KeyboardInterrupt("stopped: launch it again, with the same storage_path and name, to continue")
    return make_result(reports.result(), control, return_value, log_folder(), launch.result_path)


def _run(train_loop: Callable[[], Any], session: Session, control: LocalControl) -> Any:
    """Return the loop's value, or the one that `mark_finished` was given if the loop fails after that."""
    try:
        return run_local_loop(train_loop, session)
    except Exception as error:  # the loop may raise anything, and after `mark_finished` nothing may fail the run
        finished = control.state.remote().finished
        if finished is None:
            raise
        what = f"the loop failed: {type(error).__name__}: {error}"
        _logger.warning("%s; this was after the training had ended, and nothing is lost", what)
        return finished[0]


@contextlib.contextmanager
def _logging(config: LoggingConfig | None) -> Iterator[None]:
    """Set the level of Ray's loggers while the block runs, as for a group, whose Ray Data logs to files."""
    before = {logger: logger.level for logger in map(logging.getLogger, ("ray.train", "ray.data"))}
    if config is not None:
        for logger in before:
            logger.setLevel(config.log_level)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
