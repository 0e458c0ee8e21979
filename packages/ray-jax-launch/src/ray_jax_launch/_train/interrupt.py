"""How a launch answers Ctrl-C and SIGTERM."""

import contextlib
import logging
import signal
import threading
from types import FrameType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from ray_jax_launch._train.control_actor import BoardHandle

_logger = logging.getLogger("ray_jax_launch")


class Interrupt:
    """Ctrl-C and SIGTERM: the first asks a loop that listens to save and return, the second takes it down."""

    def __init__(self, board: BoardHandle) -> None:
        self._board = board
        self._controller: ActorHandle | None = None
        self._former: dict[int, Any] = {}
        self._asked = False

    def handle(self) -> None:
        """Answer the signals from now on, if this is the main thread, the only one where this can be done."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._on_signal)

    def attach(self, controller: ActorHandle) -> None:
        """Know whom to end."""
        self._controller = controller

    def restore(self) -> None:
        """Leave the signals to those who had them before."""
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            if ray.get(self._board.interrupt.remote()):
                _logger.warning("interrupted: the workers save what they have; press Ctrl-C again to stop at once")
                return
        _logger.warning("interrupted: stopping the workers, which do not save")
        if self._controller is not None:
            with contextlib.suppress(RayActorError):  # it exits while it answers
                ray.get(self._controller.abort.remote())
        raise SystemExit(1)
