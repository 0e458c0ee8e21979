"""The record of a step: the metrics and the times of the steps since the last record."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import flops_per_token, learning_rate_schedule, peak_flops_per_s
from owt_data import GrowingTokens, Tokens, step_starts
from pretrain._config import PretrainConfig
from pretrain._errors import TrainingDivergedError
from pretrain._run.metrics import Record, rounded, windows_digest
from pretrain._run.spikes import THRESHOLD, TRAILING, spike_scores
from pretrain._training.train_batches import batches_of


@dataclass(kw_only=True, slots=True)
class Unrecorded:
    """The sums of a meter over the steps since the last record. A checkpoint has them as JSON."""

    loss_sum: float = 0.0
    num_losses: int = 0
    """Number of steps that made an update."""
    grad_norm_max: float | None = None
    num_steps: int = 0
    spike: Sequence[float] | None = None
    """The largest spike: the number of its step among these, from 1, and its score."""
    skipped: int | None = None
    """The number of the last step among these that made no update."""
    most_in_a_row: int = 0
    trailing_losses: list[float] = field(default_factory=list)
    """Losses of the last steps that made an update, also of those before the last record."""


_MOST_STEPS, _STEPS_IN_FLIGHT = 256, 64  # without a record for long, metrics of older steps leave the device

Metrics = dict[str, jax.Array]


def diverged(what: str) -> TrainingDivergedError:
    """Return the error of a training whose numbers are not finite."""
    return TrainingDivergedError(
        f"the training has diverged: {what} is not finite. Lower --optimizer.learning-rate, raise "
        "--optimizer.warmup-steps, or set --optimizer.clip-norm 1, with another --name."
    )


class _LearningRates:
    """The learning rate of each step, computed on the host, for many steps at once.

    A rate that is computed on the device of the steps waits for those that are in its queue, and the device then waits
    for its next step.
    """

    _NUM_AT_ONCE = 1024

    def __init__(self, config: PretrainConfig) -> None:
        self._schedule = learning_rate_schedule(config.optimizer, config.train.max_steps)
        self._last = config.train.max_steps - 1
        try:
            self._host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
            self._host = None
        self._first = 0
        self._rates = self._from(0)  # compiled before the first step is timed

    def of_step(self, step: int) -> float:
        """Return the learning rate of a step, from 1."""
        position = (step - 1) % self._NUM_AT_ONCE
        if step - 1 - position != self._first:
            self._first = step - 1 - position
            self._rates = self._from(self._first)
        return float(self._rates[position])

    def _from(self, first: int) -> NDArray[np.float32]:
        steps = np.minimum(np.arange(first, first + self._NUM_AT_ONCE), self._last)
        with jax.default_device(self._host):
            return np.asarray(self._schedule(steps.astype(np.int32)))


class StepMeter:
    """A meter that collects the metrics of each step on the device, and turns them into a record when one is due.

    Collecting does not wait for the device. Only the time between `start` and `wait_for_record` counts, and only steps
    that were added in it: not compilation, evaluations and saves.

    Args:
        config: the run's configuration.
        train: the training tokens.
        device: a device of this process.
        num_devices: number of devices of all processes.
        clock: returns seconds.
        wall_clock: returns Unix time in seconds.
    """

    def __init__(
        self,
        config: PretrainConfig,
        train: Tokens,
        device: Any,
        num_devices: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._learning_rates = _LearningRates(config)
        self._train = train
        self._seq_len = config.model.seq_len
        self._batches = batches_of(config)
        self._batch_size = config.train.global_batch_size
        self._tokens_per_step = config.train.global_batch_size * config.model.seq_len
        peak = peak_flops_per_s(device.device_kind) if config.peak_tflops is None else config.peak_tflops * 1e12
        flops_per_step = flops_per_token(config.model) * self._tokens_per_step
        # Seconds of a step at the devices' peak; None if the peak is unknown.
        self._ideal_step_s = None if peak is None else flops_per_step / (peak * num_devices)
        self._device = device
        self._clock = clock
        self._wall_clock = wall_clock
        self._steps: list[Metrics] = []
        self._losses: list[float] = []
        self._unrecorded = Unrecorded()
        self._stop_after = config.train.stop_after_bad_steps
        self._since: float | None = None
        self._num_timed = 0
        self._wait_s = 0.0
        self._last_wait_s = 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of the block as the wait for data of the next step that is added."""
        before = self._clock()
        yield
        self._last_wait_s = self._clock() - before

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a step that has been started.

        Args:
            metrics: the metrics that `train_step` returned.
        """
        self._steps.append(metrics)
        if len(self._steps) > _MOST_STEPS:
            self._collect(len(self._steps) - _STEPS_IN_FLIGHT)  # the device does not wait: it has later steps to do
        if self._since is not None:
            self._num_timed += 1
            self._wait_s += self._last_wait_s

    def start(self) -> None:
        """Start to count the time. Call this when the device has nothing to do."""
        self._since = self._clock()
        self._num_timed = 0
        self._wait_s = 0.0

    def stop(self) -> None:
        """Count no time until the next `start`."""
        self._since = None

    def progress(self, step: int) -> Record:
        """Return the step and its windows, and the epochs and training tokens up to it.

        A stream has no epochs before its second.
        """
        num_seen, num_windows = step * self._batch_size, self._train.num_windows(self._seq_len)
        record: Record = {"step": step, "tokens": step * self._tokens_per_step}
        if not isinstance(self._train, GrowingTokens) or (self._train.is_complete and num_seen >= num_windows):
            record["epoch"] = round(num_seen / num_windows, 4)
        if step:
            record["windows"] = windows_digest(step_starts(self._train, self._batches, step - 1))
        return record | {"time_s": round(self._wall_clock(), 3)}

    def wait_for_record(self, step: int) -> Record:
        """Wait for the added steps, return the record of the last of them, and begin the next record.

        A step whose loss or gradient is not finite made no update, and does not count in either. The record lacks the
        two if no step counts. It names the last such step, and the step of the largest spike of the loss.

        Args:
            step: the last step that was added.

        Raises:
            TrainingDivergedError: `train.stop_after_bad_steps` steps in a row, or more, made no update.
        """
        last = self._steps[-1]
        self._collect()
        now = self._clock()
        num_skipped, since = int(last["num_skipped"]), self._unrecorded
        if self._stop_after is not None and since.most_in_a_row >= self._stop_after:
            raise diverged(f"the loss or the gradient of {since.most_in_a_row} steps in a row, up to step {step},")
        record = self.progress(step) | ({"num_skipped": num_skipped} if num_skipped else {})
        before = step - since.num_steps
        if since.skipped is not None:
            record["skipped_step"] = before + since.skipped
        if since.spike is not None:
            record |= {"spike_step": before + since.spike[0], "spike_score": since.spike[1]}
        if since.num_losses:
            record |= {"loss": since.loss_sum / since.num_losses, "grad_norm_max": since.grad_norm_max}
        record["learning_rate"] = self._learning_rates.of_step(step)
        if self._since is not None and self._num_timed:
            step_s = (now - self._since) / self._num_timed
            record |= {
                "step_s": step_s,
                "tokens_per_s": self._tokens_per_step / step_s,
                "data_wait_s": self._wait_s / self._num_timed,
            }
            if self._ideal_step_s is not None:
                record["mfu"] = self._ideal_step_s / step_s
        if stats := self._device.memory_stats():
            record["memory_bytes"] = stats["peak_bytes_in_use"]
        self._unrecorded = Unrecorded(trailing_losses=since.trailing_losses)
        if self._since is not None:
            self._since = now
            self._num_timed = 0
            self._wait_s = 0.0
        return rounded(record)

    def wait_for_unrecorded(self) -> dict[str, Any]:
        """Wait for the added steps, and return what a continued run needs to complete their record."""
        self._collect()
        return asdict(self._unrecorded)

    @property
    def num_in_flight(self) -> int:
        """The number of added steps that were not waited for."""
        return len(self._steps)

    def take_losses(self) -> list[float]:
        """Return the losses of the steps that were waited for since the last call; NaN for a step without an update."""
        losses, self._losses = self._losses, []
        return losses

    def restore(self, unrecorded: dict[str, Any]) -> None:
        """Continue an unfinished record.

        Args:
            unrecorded: the result of `wait_for_unrecorded`, or none of it for a run without steps.
        """
        self._unrecorded = Unrecorded(**unrecorded)

    def _collect(self, num_steps: int | None = None) -> None:
        """Wait for the first of the added steps, or for all, and add their metrics up, in the order of steps."""
        losses, since = list[float](), self._unrecorded
        for number, metrics in enumerate(jax.device_get(self._steps[:num_steps]), since.num_steps + 1):
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            is_update = math.isfinite(loss) and math.isfinite(grad_norm)
            losses.append(loss if is_update else math.nan)
            since.most_in_a_row = max(since.most_in_a_row, int(metrics["num_skipped_in_a_row"]))
            if not is_update:
                since.skipped = number
            else:
                since.loss_sum += loss
                since.num_losses += 1
                since.grad_norm_max = max(grad_norm, since.grad_norm_max or 0.0)
        del self._steps[:num_steps]
        self._find_spike(losses)
        since.num_steps += len(losses)
        self._losses += losses

    def _find_spike(self, losses: list[float]) -> None:
        """Note the largest spike among the losses of further steps."""
        since = self._unrecorded
        all_losses = since.trailing_losses + losses
        scores = spike_scores(all_losses, first=len(since.trailing_losses))
        for number, score in enumerate(scores, since.num_steps + 1):
            if score >= max(THRESHOLD, since.spike[1] if since.spike else -math.inf):
                since.spike = (number, float(score))
        since.trailing_losses = [loss for loss in all_losses if math.isfinite(loss)][-TRAILING:]
