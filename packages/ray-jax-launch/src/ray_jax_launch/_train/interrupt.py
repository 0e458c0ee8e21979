"""Ctrl-C and SIGTERM in the driver.

A first signal sends a stop request to the control actor (`control_actor.py`). Each worker polls for it
(`stop_poller.py`): `stop_requested` returns True at the same step on every rank, the loop saves and returns, and
`launch` raises KeyboardInterrupt. A second signal stops the workers at once, and so does the first if the loop never
calls `stop_requested`.
"""

import contextlib
import logging
import signal
import threading
from types import FrameType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_jax_launch._train.control_actor import ControlHandle, LocalControl, answer

_logger = logging.getLogger("ray_jax_launch")


class Interrupt:
    """Handler of SIGINT and SIGTERM while a launch runs."""

    def __init__(self, control: ControlHandle) -> None:
        self._control = control
        self._controller: ActorHandle | None = None
        self._previous: dict[int, Any] = {}
        self._requested = False

    def install(self) -> None:
        """Handle the signals, if this is the main thread. Python lets no other thread do this."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)

    def attach(self, controller: ActorHandle) -> None:
        """Set Ray Train's controller, which stops the workers."""
        self._controller = controller

    def restore(self) -> None:
        """Restore the handlers that `install` replaced."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._requested:
            self._requested = True
            if answer(self._control.interrupt.remote()):
                _logger.warning("interrupted: the workers save what they have; press Ctrl-C again to stop at once")
                return
        _logger.warning("interrupted: the workers stop at once; saved checkpoints stay")
        if self._controller is not None:
            with contextlib.suppress(RayActorError):  # the controller exits while it answers
                ray.get(self._controller.abort.remote())
        if isinstance(self._control, LocalControl):
            raise KeyboardInterrupt  # in the loop itself
        raise SystemExit(1)
