"""The record of a step: its metrics and its time."""

import contextlib
import math
import time
from collections.abc import Iterator

import jax

from nnx_gpt2 import flops_per_token, learning_rate_schedule, peak_flops_per_s
from owt_data import GrowingTokens, Tokens
from pretrain._config import PretrainConfig
from pretrain._errors import TrainingDivergedError
from pretrain._run.metrics import Record

# A run ends at the first recorded step at which this many steps in a row, or more, made no update.
MAX_STEPS_SKIPPED = 50


class StepTimer:
    """A timer that turns the metrics of a step into a record, with the mean time of the steps since the last record.

    Args:
        config: the run's configuration.
        train: the training tokens.
        device_kind: jax's name of the devices.
        num_devices: number of devices of all processes.
    """

    def __init__(self, config: PretrainConfig, train: Tokens, device_kind: str, num_devices: int) -> None:
        self._schedule = learning_rate_schedule(config.optimizer, config.train.max_steps)
        self._train, self._seq_len, self._batch_size = train, config.model.seq_len, config.train.global_batch_size
        self._tokens_per_step = config.train.global_batch_size * config.model.seq_len
        peak = peak_flops_per_s(device_kind)
        flops_per_step = flops_per_token(config.model) * self._tokens_per_step
        # Seconds of a step at the devices' peak; None if the peak is unknown.
        self._ideal_step_s = None if peak is None else flops_per_step / (peak * num_devices)
        self.restart(0)

    def restart(self, step: int) -> None:
        """Start to measure, after `step` steps."""
        self._step, self._since, self._data_wait_s = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of the block as wait for data."""
        before = time.perf_counter()
        yield
        self._data_wait_s += time.perf_counter() - before

    def progress(self, step: int) -> Record:
        """Return the step, and the epochs and training tokens up to it. A stream has no epochs before its second."""
        num_seen, num_windows = step * self._batch_size, self._train.num_windows(self._seq_len)
        record: Record = {"step": step}
        if not isinstance(self._train, GrowingTokens) or (self._train.is_complete and num_seen >= num_windows):
            record["epoch"] = round(num_seen / num_windows, 4)
        return record | {"tokens": step * self._tokens_per_step}

    def record(self, step: int, metrics: dict[str, jax.Array], *, is_due: bool = True) -> Record:
        """Wait for the metrics of a step, return its record, and restart the timer.

        The record lacks a loss or a gradient norm that is not finite: the step made no update.

        Args:
            step: the step.
            metrics: the metrics that `train_step` returned.
            is_due: True if the configuration asks for a record of this step, False if a stop request does. Only a due
                record can end a diverged run. The run therefore ends at the same step however often it is stopped.

        Raises:
            TrainingDivergedError: `MAX_STEPS_SKIPPED` steps in a row, or more, made no update.
        """
        num_skipped = int(metrics["num_skipped"])
        record = self.progress(step) | ({"num_skipped": num_skipped} if num_skipped else {})
        for name in ("loss", "grad_norm"):
            if math.isfinite(value := float(metrics[name])):
                record[name] = value
        # The optimizer counts updates. A skipped step is not an update.
        record["learning_rate"] = float(self._schedule(step - 1 - num_skipped))
        num_in_a_row = int(metrics["num_skipped_in_a_row"])
        if is_due and num_in_a_row >= MAX_STEPS_SKIPPED:
            raise TrainingDivergedError(
                f"the loss and the gradient must be finite, got {num_in_a_row} steps without, up to step {step}. Lower "
                "--optimizer.learning-rate, raise --optimizer.warmup-steps, or set --optimizer.clip-norm 1, with "
                "another --name."
            )
        num_steps = step - self._step
        if num_steps:
            step_s = (time.perf_counter() - self._since) / num_steps
            record |= {
                "tokens_per_s": self._tokens_per_step / step_s,
                "step_s": step_s,
                "data_wait_s": self._data_wait_s / num_steps,
            }
            if self._ideal_step_s is not None:
                record["mfu"] = self._ideal_step_s / step_s
        self.restart(step)
        return record
