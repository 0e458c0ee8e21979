"""Policy of restarts: decides in Ray Train's controller whether a failed group of workers starts again."""

import logging
import math
import time

from ray.train import ControllerError, FailureConfig, PreemptionError, TrainingFailedError, WorkerGroupError

from ray_jax_launch._control.control_actor import ControlHandle, answer, count_failure
from ray_jax_launch._control.events import Restarting, WaitingForNodes
from ray_jax_launch._ray_internals.ray_train import (
    FailureDecision,
    FailurePolicy,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray_jax_launch._train.failures import (
    fingerprint,
    first_failure,
    in_a_line,
    is_permanent,
    is_preemption,
    is_resize,
)

# Lost nodes come back, or an autoscaler replaces them, within this time or the user's `wait_for_resources_s`.
_MIN_RESTART_WAIT_S = 240.0

_logger = logging.getLogger("ray_jax_launch")


def restart_wait_s(wait_for_resources_s: float) -> float:
    """Return the seconds that a group waits for nodes before it starts again."""
    return max(wait_for_resources_s, _MIN_RESTART_WAIT_S)


def restart_without_controller(control: ControlHandle, config: FailureConfig | None) -> bool:
    """Count the death of Ray Train's controller, which ends its workers, as a failure. Called in the driver.

    Returns:
        Whether the workers start again.
    """
    max_failures = _limit((config or FailureConfig()).max_failures)
    num_failures = count_failure(control)
    if num_failures > max_failures:
        return False
    what = "Ray Train's controller died"
    control.note.remote(Restarting("failure", what, num_failures))
    _logger.warning("%s; %s", what, _describe(num_failures, max_failures))
    return True


def note_waiting(control: ControlHandle, wait_s: float, line: str) -> None:
    """Send an event, and a line for the log, when a group waits for nodes."""
    control.note.remote(WaitingForNodes(wait_s))
    control.log.remote(line)


def _limit(number: int) -> float:
    return math.inf if number < 0 else number


def _describe(num_failures: int, max_failures: float) -> str:
    """Return a clause on a restart, for the log."""
    limit = "" if max_failures == math.inf else f" of at most {max_failures} without a new checkpoint"
    return f"the workers start again (failure {num_failures}{limit})"


class RestartPolicy(FailurePolicy):
    """Restarts a group after temporary failures. Logs why, and sends an event (`Restarting`, `WaitingForNodes`).

    Ray's own policy restarts after every exception of the loop, and never after a failure to join the workers.

    Args:
        control: the control actor, which counts the failures, and carries events and log lines to the driver.
        max_failures: failures in a row to recover from, without a new checkpoint between them; -1 for any number.
            Preemptions do not count.
        max_preemptions: preemptions to recover from; -1 for any number.
        wait_for_resources_s: seconds to wait for nodes when the cluster has too few to start the group again.
    """

    def __init__(
        self, control: ControlHandle, *, max_failures: int, wait_for_resources_s: float, max_preemptions: int = -1
    ) -> None:
        super().__init__(FailureConfig(max_failures=max_failures))
        self._control = control
        self._max_failures = _limit(max_failures)
        self._preemptions_left = _limit(max_preemptions)
        self._wait_s = restart_wait_s(wait_for_resources_s)
        self._waiting_since_s: float | None = None
        self._last: str | None = None
        self._hang = ""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Return whether to retry or to raise. Called once for each failure of the group."""
        self._hang = answer(self._control.end_group.remote())
        if answer(self._control.state.remote()).finished is not None:
            if self._hang:
                self._log(self._hang)
            return FailureDecision.RAISE  # `launch` then returns the result that `mark_finished` was given
        if isinstance(training_failed_error, ControllerError):
            cause = training_failed_error.controller_failure
            if isinstance(cause, WorkerGroupStartupTimeoutError):
                return self._wait_for_nodes()
            self._waiting_since_s = None
            if isinstance(cause, WorkerGroupStartupFailedError):
                what = f"the workers could not start: {str(cause).strip().splitlines()[-1]}"
                return self._retry(what, self._count())
            return FailureDecision.RAISE
        self._waiting_since_s = None
        if isinstance(training_failed_error, PreemptionError):
            return self._restart_after_preemption()
        assert isinstance(training_failed_error, WorkerGroupError), "Ray Train has no other errors"
        return self._handle_workers(training_failed_error.worker_failures)

    def _handle_workers(self, failures: dict[int, Exception]) -> FailureDecision:
        # When one rank is preempted, the collectives of other ranks fail too.
        if any(is_preemption(failure) for failure in failures.values()):
            return self._restart_after_preemption()
        if any(is_resize(failure) for failure in failures.values()):
            what = "the cluster has room for another number of workers"
            return self._restart(Restarting("resize", what), "the workers start again, from where they were")
        rank, details = first_failure(failures)
        failure = failures[rank]
        what = self._hang or in_a_line(rank, failure)
        if is_permanent(failure):
            return FailureDecision.RAISE
        num_failures = self._count()
        before = self._last if num_failures > 1 else None
        self._last = None if self._hang else fingerprint(failure, details)
        if self._last is not None and self._last == before:
            self._log(f"{what}; the workers do not start again, because they failed in the same way before")
            return FailureDecision.RAISE
        return self._retry(what, num_failures)

    def _count(self) -> int:
        return count_failure(self._control)

    def _retry(self, what: str, num_failures: int) -> FailureDecision:
        if num_failures > self._max_failures:
            if self._hang:
                self._log(f"{what}; the workers do not start again")
            return FailureDecision.RAISE
        return self._restart(Restarting("failure", what, num_failures), _describe(num_failures, self._max_failures))

    def _restart_after_preemption(self) -> FailureDecision:
        self._preemptions_left -= 1
        if self._preemptions_left < 0:
            return FailureDecision.RAISE
        return self._restart(Restarting("preemption", "a node is preempted"), "the workers start again on the others")

    def _restart(self, event: Restarting, consequence: str) -> FailureDecision:
        self._control.note.remote(event)
        self._log(f"{event.text}; {consequence}")
        return FailureDecision.RETRY

    def _wait_for_nodes(self) -> FailureDecision:
        now = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now
            line = f"the cluster has too few nodes for the workers; waiting up to {self._wait_s:.0f} s for more"
            note_waiting(self._control, self._wait_s, line)
        return FailureDecision.RETRY if now - self._waiting_since_s < self._wait_s else FailureDecision.RAISE

    def _log(self, line: str) -> None:
        self._control.log.remote(line)
