"""The worker's side of the watchdog: counts the steps that are computed, sends the count, and sends the stack.

A thread does this, also while the loop waits in a collective or for data. If the process is stopped, nothing comes.
"""

import contextlib
import faulthandler
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

from ray_jax_launch._control.control_actor import ControlHandle, answer
from ray_jax_launch._control.turns import turns_of_process
from ray_jax_launch._control.watchdog import BEAT_EVERY_S, Beat

# The usual time is the median of the newest ones.
_NUM_TIMES = 21
# A limit is 20 times the usual time (`watchdog.py`).
_FIRST_SHARE = 10
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")
# Functions that call the loop, the second of Ray. The frames before them say nothing about the loop.
_CALLERS = ("_with_save_events", "train_fn")


class Heartbeat:
    """Sends how far the loop of this process is. Make it in the thread of the loop, before the loop.

    Args:
        control: the control actor, or its stand-in.
        group: the start of the workers.
        size: the number of workers.
        rank: the rank of this worker.
        handle: this worker's actor; None if this is the process of the driver.

    Attributes:
        turns: the times at which it sends.
    """

    def __init__(self, control: ControlHandle, group: str, size: int, rank: int, handle: Any = None) -> None:
        self._control = control
        self._sender = group, size, rank
        self._handle = handle
        self._loop = threading.get_ident()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._pending: deque[tuple[int, Any]] = deque()
        self._step, self._num_added, self._num_computed = -1, 0, 0
        self._is_training = True
        self._num_calls, self._num_ends = 0, 0
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._since_s, self._num_before = time.monotonic(), 0
        self._has_ended = False
        self.turns = turns_of_process("heartbeat", rank, size, BEAT_EVERY_S)
        threading.Thread(target=self._send, name="heartbeat", daemon=True).start()

    def add(self, step: int, computed: Any = None) -> None:
        """Add a step.

        Args:
            step: the step.
            computed: a `jax.Array` of the step, which is ready once the step is computed; None if it is computed.
        """
        with self._lock:
            if not self._num_added:
                # No step is longer than the first one with all that comes before it. The first limit is twice its time.
                self._times.append((time.monotonic() - self._since_s) / _FIRST_SHARE)
                self.turns.call_now()
            self._num_added += 1
            self._pending.append((step, computed))
            self._count()

    def watch(self, is_training: bool) -> bool:
        """Note whether the loop computes steps from now on. Return what was before. Each call is a sign of life."""
        with self._lock:
            self._num_calls += 1
            before, self._is_training = self._is_training, is_training
            if is_training and not before:
                self._count()
                self._since_s, self._num_before = time.monotonic(), self._num_computed
            if is_training != before:
                self.turns.call_soon()  # a process that is stopped after this must not seem to do other work
            return before

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Note that the loop computes no steps in the block, and that the block must end."""
        before = self.watch(False)
        self._num_ends += 1
        try:
            yield
        finally:
            self._num_ends -= 1
            self.watch(before)

    def must_end(self) -> None:
        """Note that the loop has computed its last step, and must end."""
        self._num_ends += 1

    def end(self) -> None:
        """Note that the loop has returned. What this worker does now takes as long as it takes."""
        self.watch(False)
        self._has_ended = True
        self._beat()
        self.turns.call_now()  # ends the thread

    def read(self) -> Beat:
        """Return how far the loop is. The time since the last call is measured if steps were computed in it."""
        with self._lock:
            self._count()
            num_steps = self._num_computed - self._num_before
            if num_steps and self._is_training:
                now_s = time.monotonic()
                if self._num_before:
                    self._times.append((now_s - self._since_s) / num_steps)
                self._since_s, self._num_before = now_s, self._num_computed
            usual_s = statistics.median(self._times) if self._times else 0.0
            is_training = self._is_training and self._num_added > 0
            must_end = self._num_ends > 0
            return Beat(
                self._num_computed, self._step, is_training, usual_s, self._has_ended, must_end, self._num_calls
            )

    def _count(self) -> None:
        while self._pending and ((array := self._pending[0][1]) is None or array.is_ready()):
            self._step, _ = self._pending.popleft()
            self._num_computed += 1

    def _send(self) -> None:
        while True:
            self.turns.wait()
            if self._has_ended:
                return
            if answer(self._beat()):
                self._send_stack()

    def _beat(self) -> Any:
        with self._sending:  # the last beat must be that of `end`
            return self._control.beat.remote(*self._sender, self.read(), self._handle)

    def _send_stack(self) -> None:
        """Send the stack of the loop, and write those of all threads to the log of this worker."""
        if self._handle is not None and sys.__stderr__ is not None:
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(sys.__stderr__)
        frame = sys._current_frames().get(self._loop)
        frames = [] if frame is None else [*traceback.walk_stack(frame)][::-1]
        modules = {one.f_globals.get("__name__", "").partition(".")[0].lstrip("_") for one, _ in frames}
        stack = traceback.StackSummary.extract(iter(frames))
        first = max((number for number, one in enumerate(stack, 1) if one.name in _CALLERS), default=0)
        group, _, rank = self._sender
        self._control.add_stack.remote(
            group,
            rank,
            "".join(traceback.format_list(stack[first:])),
            is_in_debugger=any(module.startswith(_DEBUGGERS) for module in modules),
        )
