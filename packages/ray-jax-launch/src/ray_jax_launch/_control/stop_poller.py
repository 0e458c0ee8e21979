"""The worker's side of a stop request: a thread that makes all ranks stop at the same step."""

import threading
from typing import Any

import ray
import ray.train

from ray_jax_launch._control.control_actor import ControlHandle, StopRequest, answer
from ray_jax_launch._control.turns import turns_of_process
from ray_jax_launch._errors import StopRequestedError
from ray_jax_launch._ray_internals.ray_train import preemption_noticed

_POLL_EVERY_S = 0.5


def current_group() -> tuple[str, int, int, Any]:
    """Return the start of the workers that this worker belongs to, their number, the rank, and this worker's actor."""
    context = ray.train.get_context()
    # Each start of the workers has its own placement group.
    placement_group = ray.util.get_current_placement_group()
    group = "" if placement_group is None else placement_group.id.hex()
    return group, context.get_world_size(), context.get_world_rank(), ray.get_runtime_context().current_actor


class StopPoller:
    """Asks the control actor for a stop request, and then for a step that no rank has passed.

    The thread answers for the loop, which may be waiting in a collective for a rank that already waits to stop. The
    control actor lets all ranks call once there is an answer. Otherwise the thread polls twice a second, and less often
    in a large group, until the process ends: a control actor that has started again learns from it what the ranks have
    agreed on, and whom to ask.

    Args:
        control: the control actor.
        group: the start of the workers.
        size: the number of workers.
        rank: the rank of this worker.
        handle: this worker's actor, for the calls of the control actor.

    Attributes:
        turns: the times at which it asks.
        step: the last step that the loop passed to `stop_requested`.
        request: the stop request, or None.
        acknowledged: `stop_requested` has returned True.
    """

    def __init__(self, control: ControlHandle, group: str, size: int, rank: int, handle: Any = None) -> None:
        self.step = -1
        self.request: StopRequest | None = None
        self.acknowledged = False
        self.turns = turns_of_process("poller", rank, size, _POLL_EVERY_S)
        self._control = control
        self._preemption_noticed = preemption_noticed()
        self._lock = threading.Lock()
        self._stop_step = 0
        self._agreed = threading.Event()
        sender = group, size, rank, handle
        threading.Thread(target=self._poll, args=sender, name="stop-poller", daemon=True).start()

    def stop_requested(self, step: int) -> bool:
        """Return whether to stop at this step. Wait for the other ranks once a stop is requested.

        Raises:
            StopRequestedError: the launch must fail.
        """
        with self._lock:
            self.step = step
            request = self.request
        if request is None:
            return False
        _check(request)
        self._agreed.wait()
        self.acknowledged = step >= self._stop_step
        return self.acknowledged

    @property
    def is_pending(self) -> bool:
        """True if a stop request has come."""
        return self.request is not None

    def _poll(self, group: str, size: int, rank: int, handle: Any) -> None:
        next_step = None
        while True:
            known = self.request or (StopRequest("preemption") if self._preemption_noticed() else None)
            request, stop_step = answer(
                self._control.poll.remote(group, size, rank, handle, request=known, next_step=next_step)
            )
            if stop_step is not None:
                self._stop_step = stop_step
                self._agreed.set()
            if request is not None and next_step is None:
                with self._lock:  # from here on the loop waits when it comes to the next step
                    self.request, next_step = request, self.step + 1
            else:
                self.turns.wait(until=lambda: self.request is None and self._preemption_noticed())


class LocalStop:
    """`StopPoller` of a loop in the driver's process: one rank, no preemption, no thread."""

    def __init__(self, control: ControlHandle) -> None:
        self.step = -1
        self.request: StopRequest | None = None
        self.acknowledged = False
        self._control = control

    def stop_requested(self, step: int) -> bool:
        """Return whether to stop at this step.

        Raises:
            StopRequestedError: the launch must fail.
        """
        self.step = step
        self.request, _ = self._control.poll.remote("", 1, 0, request=None, next_step=None)
        if self.request is not None:
            _check(self.request)
        self.acknowledged = self.request is not None
        return self.acknowledged

    @property
    def is_pending(self) -> bool:
        """True if a stop request has come."""
        self.request, _ = self._control.poll.remote("", 1, 0, request=None, next_step=None)
        return self.request is not None


def _check(request: StopRequest) -> None:
    if request.reason == "failure":
        raise StopRequestedError(request.text)
