"""What a training loop can ask and tell while it runs in a worker."""

import itertools
import logging
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import ray.train
from ray.util.metrics import Gauge

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._ray_internals import preemption_noticed
from ray_jax_launch._storage import StoragePath
from ray_jax_launch._train.control_actor import BoardHandle, StopReason
from ray_jax_launch._train.failures import Preempted

_PREEMPTION_POLL_S = 1.0
# A network file system may show a new file to other nodes late.
_SHARED_WITHIN_S = 10.0


@dataclass
class Session:
    """A launch as one of its workers sees it."""

    board: BoardHandle
    run_path: StoragePath
    run_name: str
    marker: Path | None
    """A file in the run's folder, which every worker must find there. None in object storage."""

    gauges: dict[str, Gauge] = field(default_factory=dict)
    listener: "_Listener | None" = None


_session: Session | None = None
# Of what this process posts; taken by any thread.
_numbers = itertools.count()


def begin(session: Session) -> None:
    """Make a session the current one of this process.

    Raises:
        LaunchError: this node does not have the run's folder.
    """
    global _session, _numbers
    _session, _numbers = session, itertools.count()
    log_to_driver("ray_jax_launch")
    deadline_s = time.monotonic() + _SHARED_WITHIN_S
    while session.marker is not None and not session.marker.exists():
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"storage_path must be a folder that all nodes share, got {Path(session.run_path).parent}, which is "
                f"another folder on node {ray.util.get_node_ip_address()}. Give one on a network file system, or "
                "s3:// or gs://"
            )
        time.sleep(_SHARED_WITHIN_S / 50)


def current_session() -> Session:
    """The session of this worker.

    Raises:
        RuntimeError: this is no worker of `launch`.
    """
    if _session is None:
        raise RuntimeError("expected to be called in a training loop that `ray_jax_launch.launch` runs")
    return _session


class _ToDriver(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the driver, which logs it."""
        current_session().board.tell.remote(self.format(record))


def log_to_driver(logger: str) -> None:
    """Send the warnings and errors of a logger to the driver, which logs them as its own.

    Whatever else a worker logs or prints is in Ray's logs (`Result.log_folder`).

    Args:
        logger: its name, such as that of a package.
    """
    logging.getLogger(logger).addHandler(_ToDriver(logging.WARNING))


def log_metrics(metrics: Mapping[str, float]) -> None:
    """Send metrics to the driver, without waiting: for `launch(on_metrics=)` and `Result.metrics`.

    They also become gauges of Ray's, `ray_jax_<name>` with the tags `run` and `rank`, which its dashboard and
    Prometheus show. Unlike `ray.train.report` this is no barrier: each rank calls it when it likes.

    Args:
        metrics: numbers by name, such as step, loss, tokens_per_s. Reading one from a jax array waits for the device.

    Raises:
        TypeError: a value is no number.
    """
    session = current_session()
    rank = ray.train.get_context().get_world_rank()
    tags = {"run": session.run_name, "rank": str(rank)}
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    for name, value in numbers.items():
        if name not in session.gauges:
            session.gauges[name] = Gauge(
                f"jax_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", f"{name} of a training loop", tag_keys=("run", "rank")
            )
        session.gauges[name].set(value, tags)
    session.board.post.remote(ray.get_runtime_context().get_worker_id(), next(_numbers), rank, numbers)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"expected a number as the metric {name}, got {value!r}") from error
    return value if isinstance(value, int) else number


def mark_finished(return_value: Any = None) -> None:
    """Tell that the work is done and saved, so that nothing that the loop still does can fail the run.

    A failure from here on, even the death of the process, is a line in the log. For what is nice to have after the
    last step: a sample, a picture. Rank 0 calls it, once every rank has saved.

    Args:
        return_value: `Result.return_value` if the loop fails from here on. Otherwise it is what the loop returns.
    """
    ray.get(current_session().board.finish.remote(return_value))


def stop_requested(step: int) -> bool:
    """Whether to save and return now: the user pressed Ctrl-C, or a node will soon be taken away.

    True at the same step on every rank. Until then a call takes a lock and sends nothing. After an interrupt, `launch`
    raises KeyboardInterrupt once the loop has returned; after the warning that a node goes, the group starts again
    without it.

    Args:
        step: the loop's step, which only grows. Every rank calls this at the same steps.
    """
    session = current_session()
    if session.listener is None:
        session.listener = _Listener(session.board)
    return session.listener.stop_requested(step)


class _Listener:
    """Finds a step to stop at that no rank has gone beyond.

    The answer to the question where this rank is comes from a thread, never from the loop, which may be waiting in a
    collective for a rank that learned of the wish a step earlier.
    """

    def __init__(self, board: BoardHandle) -> None:
        context = ray.train.get_context()
        self._board, self._rank, self._size = board, context.get_world_rank(), context.get_world_size()
        # Each start of the workers has a placement group of its own.
        placement_group = ray.util.get_current_placement_group()
        self._group = "" if placement_group is None else placement_group.id.hex()
        self._preemption_noticed = preemption_noticed()
        self._lock = threading.Lock()
        self.step = -1
        self._asked = False
        self._decided = threading.Event()
        self._stop_step: Any = 0  # an int, as the board answers
        self.reason: StopReason | None = None
        self.obeyed = False
        threading.Thread(target=self._listen, name="stop-listener", daemon=True).start()

    def stop_requested(self, step: int) -> bool:
        with self._lock:
            self.step = step
            asked = self._asked
        if not asked:
            return False
        self._decided.wait()
        self.obeyed = step >= self._stop_step
        return self.obeyed

    def leave(self) -> None:
        """Return once every worker of the group has saved. A group is stopped when its first worker raises."""
        ray.get(self._board.leave.remote(self._group, self._size, self._rank))

    def _listen(self) -> None:
        asked = self._board.wait_for_stop.remote(self._group, self._rank)
        told = False
        while not ray.wait([asked], timeout=_PREEMPTION_POLL_S)[0]:
            if self._preemption_noticed() and not told:
                told = True
                self._board.preempt.remote(self._group)
        self.reason = ray.get(asked)
        with self._lock:
            self._asked = True
            next_step = self.step + 1  # where the loop will wait for the decision, if it comes that far
        self._stop_step = ray.get(self._board.agree.remote(self._group, self._size, self._rank, next_step))
        self._decided.set()


def note_step(exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
    """Have an exception that leaves the loop tell the step, as far as `stop_requested` knows it."""
    listener = current_session().listener
    if exc is not None and listener is not None:
        exc.add_note(f"at step {listener.step}")


def end() -> None:
    """Tell how a loop ended that was asked to stop, once it has returned.

    Raises:
        Preempted: it stopped because a node is preempted. (To Ray Train a loop that returns has finished, but this one
            is to go on elsewhere.)
    """
    listener = current_session().listener
    if listener is None or not listener.obeyed:
        return
    if listener.reason == "interrupt":
        ray.get(current_session().board.obey.remote())
    else:
        listener.leave()
        raise Preempted(f"saved at step {listener.step}, as a node is preempted")
