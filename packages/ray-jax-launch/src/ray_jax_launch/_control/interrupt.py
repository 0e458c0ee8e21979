"""Stop requests of the driver: Ctrl-C, SIGTERM, SIGHUP, and `request_stop`.

The first signal sends a stop request to the control actor (`control_actor.py`). Each worker polls for it
(`stop_poller.py`): `stop_requested` returns True at the same step on every rank, the loop saves and returns, and
`launch` raises KeyboardInterrupt. If no loop calls `stop_requested` yet, or the workers are lost, the first signal
stops them at once.

Later signals change nothing, because one stop often sends several: `uv run` passes SIGTERM on to a process that has got
it already. Only a second Ctrl-C, at least a second after the first, stops the workers at once.
"""

import contextlib
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from ray_jax_launch._control.control_actor import ControlHandle, LocalControl, answer
from ray_jax_launch._errors import in_a_line
from ray_jax_launch._numbers import check_type

# Signals that come within this time belong to one stop.
_ONE_STOP_S = 1.0
# The workers end with the driver in any case.
_ABORT_LIMIT_S = 10.0
_LONGEST_REASON = 1000

_logger = logging.getLogger("ray_jax_launch")
_running: list[ControlHandle] = []


def request_stop(why: str) -> bool:
    """Make the launch that runs in this process fail, from any thread.

    The loop's next call of `stop_requested` raises `StopRequestedError` on each rank. Nothing is saved, and the workers
    do not start again.

    Args:
        why: the text of the error. It becomes one line of at most 1,000 characters.

    Returns:
        False if no launch runs. Then nothing happens.

    Raises:
        LaunchError: it is no text.
    """
    check_type("why", why, str, "a text")
    for control in _running:
        answer(control.request_stop.remote("failure", in_a_line(" ".join(why.split()), _LONGEST_REASON)))
    return bool(_running)


class Interrupt:
    """Handler of SIGINT, SIGTERM and SIGHUP while a launch runs."""

    def __init__(self, control: ControlHandle) -> None:
        self._control = control
        self._controller: ActorHandle | None = None
        self._previous: dict[int, Any] = {}
        self._first_s: float | None = None
        self._first_ctrl_c_s: float | None = None
        self._is_ending = False

    @property
    def is_requested(self) -> bool:
        """True once a signal has come."""
        return self._first_s is not None

    def install(self) -> None:
        """Handle the signals, if this is the main thread. Python lets no other thread do this."""
        _running.append(self._control)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` ignores SIGHUP. The handler of a program that is not Python's cannot be restored.
            if signal.getsignal(number) is not None and (signal.getsignal(number), number) != _NOHUP:
                self._previous[number] = signal.signal(number, self._on_signal)

    def attach(self, controller: ActorHandle) -> None:
        """Set Ray Train's controller, which stops the workers."""
        self._controller = controller

    def on_silence(self) -> None:
        """End the launch if a signal has come and no worker is left that could save."""
        if self._first_s is not None and not self._is_ending and self._controller is not None:
            self._end_workers()
            ray.kill(self._controller)  # it may wait for nodes

    def restore(self) -> None:
        """Restore the handlers that `install` replaced."""
        _running.remove(self._control)
        if self._first_s is not None:
            time.sleep(max(0.0, self._first_s + _ONE_STOP_S - time.monotonic()))
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_first = self._first_s is None
        before_s = self._first_ctrl_c_s
        if is_first:
            self._first_s = now_s
        if number == signal.SIGINT and before_s is None:
            self._first_ctrl_c_s = now_s
        is_second_ctrl_c = number == signal.SIGINT and before_s is not None and now_s - before_s >= _ONE_STOP_S
        if not (is_first or is_second_ctrl_c):
            return
        if is_first and answer(self._control.request_stop.remote("interrupt")):
            remedy = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            _logger.warning("interrupted: the workers save what they have%s", remedy)
            return
        self._end_workers()
        if isinstance(self._control, LocalControl):
            raise KeyboardInterrupt  # in the loop itself
        raise SystemExit(1)

    def _end_workers(self) -> None:
        self._is_ending = True
        _logger.warning("interrupted: the workers stop at once; saved checkpoints stay")
        if self._controller is not None:
            # The controller exits while it answers. While it waits for nodes, it does not answer.
            with contextlib.suppress(RayActorError, GetTimeoutError):
                ray.get(self._controller.abort.remote(), timeout=_ABORT_LIMIT_S)


_NOHUP = (signal.SIG_IGN, signal.SIGHUP)
