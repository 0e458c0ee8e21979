"""The worker's side of a stop request: a thread that makes all ranks stop at the same step."""

import threading
import time

import ray
import ray.train

from ray_jax_launch._ray_internals import preemption_noticed
from ray_jax_launch._train.control_actor import ControlHandle, StopReason

_POLL_EVERY_S = 0.5


class StopPoller:
    """Polls the control actor for a stop request, and then for a step that no rank has passed.

    The thread answers for the loop, which may be waiting in a collective for a rank that already waits to stop.

    Attributes:
        step: the last step that the loop passed to `stop_requested`.
        reason: the reason of the stop request, or None.
        acknowledged: `stop_requested` has returned True.
    """

    def __init__(self, control: ControlHandle) -> None:
        self.step = -1
        self.reason: StopReason | None = None
        self.acknowledged = False
        self._control = control
        self._preemption_noticed = preemption_noticed()
        self._lock = threading.Lock()
        self._stop_step = 0
        self._agreed = threading.Event()
        context = ray.train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
        # Each start of the workers has its own placement group.
        placement_group = ray.util.get_current_placement_group()
        group = "" if placement_group is None else placement_group.id.hex()
        threading.Thread(target=self._poll, args=(group, size, rank), name="stop-poller", daemon=True).start()

    def stop_requested(self, step: int) -> bool:
        """Return whether to stop at this step. Wait for the other ranks once a stop is requested."""
        with self._lock:
            self.step = step
            requested = self.reason is not None
        if not requested:
            return False
        self._agreed.wait()
        self.acknowledged = step >= self._stop_step
        return self.acknowledged

    def _poll(self, group: str, size: int, rank: int) -> None:
        next_step = None
        while True:
            is_preempted = self._preemption_noticed()
            answer = self._control.poll.remote(group, size, rank, is_preempted=is_preempted, next_step=next_step)
            reason, stop_step = ray.get(answer)
            if stop_step is not None:
                self._stop_step = stop_step
                self._agreed.set()
                return
            if reason is not None and next_step is None:
                with self._lock:  # from here on the loop waits when it comes to the next step
                    self.reason, next_step = reason, self.step + 1
            else:
                time.sleep(_POLL_EVERY_S)


class LocalStop:
    """`StopPoller` of a loop in the driver's process: one rank, no preemption, no thread."""

    def __init__(self, control: ControlHandle) -> None:
        self.step = -1
        self.reason: StopReason | None = None
        self.acknowledged = False
        self._control = control

    def stop_requested(self, step: int) -> bool:
        """Return whether to stop at this step."""
        self.step = step
        self.reason, _ = self._control.poll.remote("", 1, 0, is_preempted=False, next_step=None)
        self.acknowledged = self.reason is not None
        return self.acknowledged
