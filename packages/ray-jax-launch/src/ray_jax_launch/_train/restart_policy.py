"""Policy of restarts: decides in Ray Train's controller whether a failed group of workers starts again."""

import math
import time

import ray
from ray.train import ControllerError, FailureConfig, PreemptionError, TrainingFailedError, WorkerGroupError

from ray_jax_launch._ray_internals import (
    FailureDecision,
    FailurePolicy,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray_jax_launch._train.control_actor import ControlHandle
from ray_jax_launch._train.failures import fingerprint, first_failure, in_a_line, is_permanent, is_preemption

# Lost nodes come back, or an autoscaler replaces them, within this time or the user's `wait_for_resources_s`.
_MIN_RESTART_WAIT_S = 240.0


def restart_wait_s(wait_for_resources_s: float) -> float:
    """Return the seconds that a group waits for nodes before it starts again."""
    return max(wait_for_resources_s, _MIN_RESTART_WAIT_S)


class RestartPolicy(FailurePolicy):
    """Restarts a group after temporary failures, and logs why.

    Ray's own policy restarts after every exception of the loop, and never after a failure to join the workers.

    Args:
        control: the control actor, which carries log lines to the driver.
        max_failures: failures to recover from; -1 for any number. Preemptions do not count.
        max_preemptions: preemptions to recover from; -1 for any number.
        wait_for_resources_s: seconds to wait for nodes when the cluster has too few to start the group again.
    """

    def __init__(
        self, control: ControlHandle, *, max_failures: int, wait_for_resources_s: float, max_preemptions: int = -1
    ) -> None:
        super().__init__(FailureConfig(max_failures=max_failures))
        self._control = control
        self._max_failures = math.inf if max_failures < 0 else max_failures
        self._preemptions_left = math.inf if max_preemptions < 0 else max_preemptions
        self._wait_s = restart_wait_s(wait_for_resources_s)
        self._waiting_since_s: float | None = None
        self._num_failures = 0
        self._last: str | None = None

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Return whether to retry or to raise. Called once for each failure of the group."""
        if ray.get(self._control.finished.remote()) is not None:
            return FailureDecision.RAISE  # `launch` then returns the result that `mark_finished` was given
        if isinstance(training_failed_error, ControllerError):
            cause = training_failed_error.controller_failure
            if isinstance(cause, WorkerGroupStartupTimeoutError):
                return self._wait_for_nodes()
            self._waiting_since_s = None
            if isinstance(cause, WorkerGroupStartupFailedError):
                return self._count(f"the workers could not start: {str(cause).strip().splitlines()[-1]}")
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
        rank, details = first_failure(failures)
        failure = failures[rank]
        what = in_a_line(rank, failure)
        if is_permanent(failure):
            return FailureDecision.RAISE
        before, self._last = self._last, fingerprint(failure, details)
        if self._last is not None and self._last == before:
            self._log(f"{what}; the workers do not start again, because they failed in the same way before")
            return FailureDecision.RAISE
        return self._count(what)

    def _count(self, what: str) -> FailureDecision:
        self._num_failures += 1
        if self._num_failures > self._max_failures:
            return FailureDecision.RAISE
        limit = "" if self._max_failures == math.inf else f" of at most {self._max_failures}"
        self._log(f"{what}; the workers start again (failure {self._num_failures}{limit})")
        return FailureDecision.RETRY

    def _restart_after_preemption(self) -> FailureDecision:
        self._preemptions_left -= 1
        if self._preemptions_left < 0:
            return FailureDecision.RAISE
        self._log("a node is preempted; the workers start again on the others")
        return FailureDecision.RETRY

    def _wait_for_nodes(self) -> FailureDecision:
        now = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now
            self._log(f"the cluster has too few nodes for the workers; waiting up to {self._wait_s:.0f} s for more")
        return FailureDecision.RETRY if now - self._waiting_since_s < self._wait_s else FailureDecision.RAISE

    def _log(self, line: str) -> None:
        self._control.log.remote(line)
