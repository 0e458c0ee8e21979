"""Functions that a training loop calls in a worker: log metrics, ask for a stop request, mark the end."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import ray.train
import ray.train.collective
from ray.util.metrics import Gauge

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._storage import StoragePath
from ray_jax_launch._train.control_actor import ControlHandle
from ray_jax_launch._train.failures import Preempted
from ray_jax_launch._train.stop_poller import StopPoller

# A network file system may show a new file to other nodes late.
_SHARED_WITHIN_S = 10.0


@dataclass
class Session:
    """A launch, as one of its workers sees it."""

    control: ControlHandle
    run_path: StoragePath
    run_name: str
    marker: Path | None
    """A file in the run's folder, which every worker must find there. None in object storage."""

    gauges: dict[str, Gauge] = field(default_factory=dict)
    poller: StopPoller | None = None


_session: Session | None = None


def begin(session: Session) -> None:
    """Make a session the current session of this process.

    Raises:
        LaunchError: this node does not have the run's folder.
    """
    global _session
    _session = session
    log_to_driver("ray_jax_launch")
    deadline_s = time.monotonic() + _SHARED_WITHIN_S
    while session.marker is not None and not session.marker.exists():
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"storage_path must be a folder that all nodes share, got {Path(session.run_path).parent}, which is "
                f"another folder on node {ray.util.get_node_ip_address()}. Use a network file system, s3:// or gs://"
            )
        time.sleep(_SHARED_WITHIN_S / 50)


def current_session() -> Session:
    """Return the session of this worker.

    Raises:
        RuntimeError: this process is not a worker of `launch`.
    """
    if _session is None:
        raise RuntimeError("this must be called in a training loop that `ray_jax_launch.launch` runs")
    return _session


class _DriverHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the driver, which logs it."""
        current_session().control.log.remote(self.format(record))


def log_to_driver(logger: str) -> None:
    """Send the warnings and errors of a logger to the driver, which logs them as its own.

    Everything else that a worker logs or prints is in Ray's logs (`Result.log_folder`).

    Args:
        logger: its name, such as the name of a package.
    """
    logging.getLogger(logger).addHandler(_DriverHandler(logging.WARNING))


def log_metrics(metrics: Mapping[str, float]) -> None:
    """Send metrics to the driver without waiting, for `launch(on_metrics=)` and `Result.metrics`.

    They also become Ray gauges, `ray_jax_<name>` with the tags `run` and `rank`, which its dashboard and Prometheus
    show. Unlike `ray.train.report` this is not a barrier: each rank may call it at any time.

    Args:
        metrics: numbers by name, such as step, loss, tokens_per_s. Reading a number from a jax array waits for the
            device.
    """
    session = current_session()
    rank = ray.train.get_context().get_world_rank()
    tags = {"run": session.run_name, "rank": str(rank)}
    # float() reads arrays; an int stays exact.
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
    for name, value in numbers.items():
        if name not in session.gauges:
            session.gauges[name] = Gauge(
                f"jax_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", f"{name} of a training loop", tag_keys=("run", "rank")
            )
        session.gauges[name].set(value, tags)
    session.control.record.remote(rank, numbers)


def mark_finished(return_value: Any = None) -> None:
    """Mark the work as done and saved: nothing that the loop does after this can fail the run.

    A later failure, even the death of the process, is a line in the log. Use it before optional work after the last
    step, such as a sample or a picture. Rank 0 calls it, after every rank has saved.

    Args:
        return_value: `Result.return_value` if the loop fails after this. If it does not, the loop's own value is used.
    """
    ray.get(current_session().control.finish.remote(return_value))


def stop_requested(step: int) -> bool:
    """Return whether to save and return now: the user pressed Ctrl-C, or a node is about to be preempted.

    True at the same step on every rank. Before that, a call takes a lock and sends nothing. After an interrupt,
    `launch` raises KeyboardInterrupt once the loop has returned. After a preemption notice, the group starts again
    without the node.

    Args:
        step: the loop's step, which only grows. Every rank calls this at the same steps.
    """
    session = current_session()
    if session.poller is None:
        session.poller = StopPoller(session.control)
    return session.poller.stop_requested(step)


def note_step(exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
    """Add the last step that `stop_requested` was given to an exception that leaves the loop."""
    poller = current_session().poller
    if exc is not None and poller is not None:
        exc.add_note(f"at step {poller.step}")


def acknowledge_stop() -> None:
    """Acknowledge a stop request, after the loop has returned because of it.

    Raises:
        Preempted: a node is preempted, and the loop must continue on other nodes. If it returned, Ray Train would treat
            the run as finished.
    """
    poller = current_session().poller
    if poller is None or not poller.acknowledged:
        return
    if poller.reason == "interrupt":
        ray.get(current_session().control.acknowledge.remote())
    else:
        # Ray Train stops all workers when the first worker raises, and another worker may still be saving.
        ray.train.collective.barrier()
        raise Preempted(f"saved at step {poller.step}, as a node is preempted")
