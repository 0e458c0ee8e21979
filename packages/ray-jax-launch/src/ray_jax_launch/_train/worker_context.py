"""Functions that a training loop calls in a worker: log metrics, ask for a stop request, mark the end."""

import contextlib
import io
import logging
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

import ray
import ray.train
import ray.train.collective
from ray.experimental.tqdm_ray import RAY_TQDM_MAGIC
from ray.util.metrics import Gauge

from ray_jax_launch._checkpoint.save_events import notify_of_saves
from ray_jax_launch._control.control_actor import ControlHandle, answer
from ray_jax_launch._control.heartbeat import Heartbeat
from ray_jax_launch._control.session import Session, current_session, set_session
from ray_jax_launch._control.stop_poller import LocalStop, StopPoller, current_group
from ray_jax_launch._errors import LaunchError, shown
from ray_jax_launch._numbers import check_number, check_type
from ray_jax_launch._ray_internals.ray_train import limit_data_calls
from ray_jax_launch._train.failures import Preempted, Resized, note_traceback

# A network file system may show a new file to other nodes late.
_SHARED_WITHIN_S = 10.0
_LOOK_FOR_DEVICES_EVERY_S = 0.5
# A longer line of a loop's output is sent in parts.
_MAX_LINE, _RETURN = 8192, "\r"
# Ray prints the progress bars of Ray Data for the driver, which only Ray's own log monitor can show.
_PROGRESS_BAR = RAY_TQDM_MAGIC


def run_loop(train_loop: Callable[[], Any], session: Session) -> Any:
    """Run the loop in a worker of a group, and add traceback and step to its exception.

    Raises:
        LaunchError: this node does not have the run's folder.
    """
    set_session(session)
    log_to_driver("ray_jax_launch")
    limit_data_calls(ray.train.get_context().get_world_size())
    _check_folder(session)
    with contextlib.ExitStack() as stack:
        stack.push(note_traceback)
        stack.push(_note_step)
        if session.prints:
            stack.enter_context(contextlib.redirect_stdout(_Tee(sys.stdout, session.control)))
        returned = _with_save_events(train_loop, session)
    _acknowledge_stop()
    return returned


class _Tee(io.TextIOBase):
    """A stream that also sends its complete lines to the driver, which logs them at level INFO.

    Of a line that is written again and again after carriage returns, such as a progress bar, it sends the last state.
    """

    def __init__(self, stream: TextIO, control: ControlHandle) -> None:
        self._stream = stream
        self._control = control
        self._held = ""
        self._rank = ray.train.get_context().get_world_rank()

    def write(self, text: str, /) -> int:
        """Write the text, and send the lines that it completes."""
        *lines, held = (self._held + text).split("\n")
        held = _shown(held)
        if len(held) > _MAX_LINE:
            lines, held = [*lines, held], ""
        self._held = held
        for line in lines:
            if _PROGRESS_BAR not in line:
                self._control.log.remote(f"worker {self._rank}: {_shown(line).rstrip(_RETURN)}", logging.INFO)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _shown(line: str) -> str:
    """Return what a terminal shows of a line: what follows the last carriage return that text follows."""
    return line[line.rstrip(_RETURN).rfind(_RETURN) + 1 :]


def run_local_loop(train_loop: Callable[[], Any], session: Session) -> Any:
    """Run the loop in the driver's process."""
    set_session(session)
    try:
        returned = _with_save_events(train_loop, session)
        _acknowledge_stop()
    finally:
        set_session(None)
    return returned


def _with_save_events(train_loop: Callable[[], Any], session: Session) -> Any:
    """Run the loop. Tell the driver the devices of this worker, and the steps that `Checkpoints` completes."""
    context = ray.train.get_context()
    worker = f"worker {context.get_world_rank()} of {context.get_world_size()}"
    worker += ": this process" if session.is_local else f": node {ray.util.get_node_ip_address()}"
    ended = threading.Event()
    thread = threading.Thread(target=_log_devices, args=(session.control, worker, ended), daemon=True)
    thread.start()
    session.heartbeat = _heartbeat(session) if session.is_watched else None
    with notify_of_saves(session.control.save.remote, session.failed_saves.append):
        try:
            return train_loop()
        finally:
            if session.heartbeat is not None:
                session.heartbeat.end()
            ended.set()
            thread.join(_LOOK_FOR_DEVICES_EVERY_S)


def _heartbeat(session: Session) -> Heartbeat:
    if session.is_local:
        return Heartbeat(session.control, "", 1, 0)
    return Heartbeat(session.control, *current_group())


def _log_devices(control: ControlHandle, worker: str, ended: threading.Event) -> None:
    """Log the devices of this worker once the loop has used jax.

    To ask jax earlier would start its backends, after which a loop can no longer configure them.
    """
    while not (uses_jax := _has_devices()) and not ended.wait(_LOOK_FOR_DEVICES_EVERY_S):
        pass
    if uses_jax or _has_devices():
        import jax  # the loop has imported it

        devices = jax.local_devices()
        names = ", ".join(map(str, devices))
        line = f"{worker}, {len(devices)} device{'s' if len(devices) > 1 else ''} ({names})"
    else:
        line = f"{worker}, no device (the loop did not use jax)"
    control.log.remote(line, logging.INFO)


def _has_devices() -> bool:
    """Return whether jax has started its backends in this process. jax has no public name for this."""
    xla_bridge = sys.modules.get("jax._src.xla_bridge")
    return xla_bridge is not None and getattr(xla_bridge, "backends_are_initialized", lambda: False)()


def _check_folder(session: Session) -> None:
    """Check that this node has the run's folder.

    Raises:
        LaunchError: it does not.
    """
    deadline_s = time.monotonic() + _SHARED_WITHIN_S
    while session.marker is not None and not session.marker.exists():
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"storage_path must be a folder that all nodes share, got {session.marker.parent.parent}, which is "
                f"another folder on node {ray.util.get_node_ip_address()}. Use a network file system, s3:// or gs://."
            )
        time.sleep(_SHARED_WITHIN_S / 50)


class _DriverHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the driver, which logs it."""
        current_session().control.log.remote(self.format(record), record.levelno)


def log_to_driver(logger: str) -> None:
    """Send the warnings and errors of a logger to the driver, which logs them as its own.

    A second call changes nothing. Everything else that a worker logs or prints is in Ray's logs (`Result.log_folder`).

    Args:
        logger: its name, such as the name of a package.
    """
    sender = logging.getLogger(logger)
    if not current_session().is_local and not any(isinstance(handler, _DriverHandler) for handler in sender.handlers):
        sender.addHandler(_DriverHandler(logging.WARNING))


def log_metrics(metrics: Mapping[str, float | str]) -> None:
    """Send metrics to the driver without waiting, for `launch(on_metrics=)` and `Result.metrics`.

    The numbers also become Ray gauges, `ray_jax_<name>` with the tags `run` and `rank`, which Ray's dashboard and
    Prometheus show. Unlike `ray.train.report` this is not a barrier: each rank may call it at any time.

    Args:
        metrics: numbers by name, such as step, loss, tokens_per_s. Reading a number from a jax array waits for the
            device. With a text among them, such as the phase of the loop, they reach only `on_metrics`.

    Raises:
        LaunchError: a name is no printable text, or a value is no number and no text.
    """
    check_type("metrics", metrics, Mapping, "numbers by name", 'Write them as in {"loss": 1.0}')
    session = current_session()
    rank = ray.train.get_context().get_world_rank()
    tags = {"run": session.run_name, "rank": str(rank)}
    values = {name: _metric(name, value) for name, value in metrics.items()}
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    for name, value in numbers.items() if ray.is_initialized() and len(numbers) == len(values) else ():
        if name not in session.gauges:
            session.gauges[name] = Gauge(
                f"jax_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", f"{name} of a training loop", tag_keys=("run", "rank")
            )
        session.gauges[name].set(value, tags)
    session.control.record.remote(rank, values)


def _metric(name: Any, value: Any) -> int | float | str:
    """Return the value of a metric. An integer stays exact, also one of NumPy or JAX.

    Raises:
        LaunchError: the name is no printable text, or the value is no number and no text.
    """
    check_type("the name of a metric", name, str, "a printable text")
    if not name.isprintable() or not name:
        raise LaunchError(f"the name of a metric must be a printable text, got {shown(name)}.")
    if isinstance(value, str):
        return value
    try:
        number = float(value)  # of an array too
    except (TypeError, ValueError, OverflowError) as error:
        raise LaunchError(
            f"metric {shown(name)} must be a number or a text, got {shown(value)}. Leave it out."
        ) from error
    if isinstance(value, int):
        return value
    with contextlib.suppress(TypeError):
        return operator.index(value)
    return number


def mark_finished(return_value: Any = None) -> None:
    """Mark the work as done and saved: nothing that the loop does after this can fail the run.

    A later failure, even the death of the process, is a line in the log. Use it before optional work after the last
    step, such as a sample or a picture. Rank 0 calls it, after every rank has saved.

    Args:
        return_value: `Result.return_value` if the loop fails after this. If it does not, the loop's own value is used.
    """
    session = current_session()
    if session.heartbeat is not None:
        session.heartbeat.must_end()
        session.heartbeat.watch(False)  # what follows is no step
    answer(session.control.finish.remote(return_value))


def stop_requested(step: int, computed: Any = None) -> bool:
    """Return whether to save and return now.

    True at the same step on every rank, after one of these:

    - Ctrl-C, SIGTERM or SIGHUP: once the loop has returned, `launch` raises KeyboardInterrupt.
    - A notice that a node will be preempted: once the loop has returned, the group starts again without the node.
    - An elastic group has room for another number of workers: it starts again with this number.

    Otherwise a call takes a lock and sends nothing.

    Args:
        step: the loop's step, which only grows. Every rank calls this at the same steps.
        computed: a `jax.Array` that the step computes, for `launch(hang_timeout_s=)`: jax returns it before the step is
            computed. Without it, the step counts as computed at this call.

    Raises:
        LaunchError: the step is no whole number, or negative.
        UnsavedCheckpointError: a save in the background of this process has failed.
        StopRequestedError: the driver has called `request_stop`.
    """
    step = check_number("step", step, at_least=0)
    session = current_session()
    if session.failed_saves:
        raise session.failed_saves.pop()
    if session.poller is None:
        session.poller = (
            LocalStop(session.control) if session.is_local else StopPoller(session.control, *current_group())
        )
    if session.heartbeat is not None:
        session.heartbeat.add(step, computed)
    stops = session.poller.stop_requested(step)
    if stops and session.heartbeat is not None:
        session.heartbeat.must_end()
        session.heartbeat.watch(False)  # the loop saves
    return stops


def stop_pending() -> bool:
    """Return whether a stop request has come, without an answer to it: the ranks do not agree on a step.

    For optional work of one rank after `mark_finished`, which then ends early. False before the first `stop_requested`.
    """
    poller = current_session().poller
    return poller is not None and poller.is_pending


def watch_steps(is_training: bool) -> None:
    """Tell the watchdog of `launch(hang_timeout_s=)` whether the loop computes steps from now on.

    Call it with False before work that is no step, such as a validation, and with True after it: such work may take any
    time while all workers answer. The methods of `Checkpoints` need no call.

    Work that must end may take an hour, or five times `hang_timeout_s` if that is longer: a method of `Checkpoints`,
    and everything after a stop request, after `mark_finished`, or after the return of a worker. If it takes longer,
    call this with False again from time to time, on any worker: the hour begins again.

    Steps are watched from the first `stop_requested` on. Before it, and once the loops have begun, only a worker that
    does not answer hangs. Without `hang_timeout_s` this does nothing.

    Args:
        is_training: whether the loop computes steps.
    """
    heartbeat = current_session().heartbeat
    if heartbeat is not None:
        heartbeat.watch(is_training)


def _note_step(exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
    """Add the last step that `stop_requested` was given to an exception that leaves the loop."""
    poller = current_session().poller
    if exc is not None and poller is not None:
        exc.add_note(f"at step {poller.step}")


def _acknowledge_stop() -> None:
    """Acknowledge a stop request, after the loop has returned because of it.

    Raises:
        Preempted: a node is preempted, and the loop must continue on other nodes. If it returned, Ray Train would treat
            the run as finished.
        Resized: the loop must continue with another number of workers.
    """
    poller = current_session().poller
    if poller is None or not poller.acknowledged or poller.request is None:
        return
    if poller.request.reason == "interrupt":
        answer(current_session().control.acknowledge.remote())
        return
    # Ray Train stops all workers when the first worker raises, and another worker may still be saving.
    ray.train.collective.barrier()
    raise {"preemption": Preempted, "resize": Resized}[poller.request.reason](f"saved at step {poller.step}")
