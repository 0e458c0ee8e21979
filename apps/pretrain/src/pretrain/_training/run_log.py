"""What rank 0 writes while it trains: metrics, TensorBoard, and when the workers started."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax

from nnx_gpt2 import flops_per_token, learning_rate_schedule, peak_flops_per_s
from pretrain._config import PretrainConfig
from pretrain._conveniences import convenience
from pretrain._errors import TrainingDivergedError
from pretrain._run.files import append_line, sync_file, sync_folder
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import Record, append_metrics, cut_metrics, finite
from pretrain._training.tensorboard import TensorBoard

# A run ends at the first recorded step before which this many steps in a row, or more, made no update.
MAX_STEPS_SKIPPED = 50


class RunLog:
    """The run folder's metrics, written by rank 0. On other ranks it does nothing.

    Args:
        folder: the run's.
        send: where each record goes besides.
    """

    def __init__(self, folder: RunFolder, send: Callable[[Record], None]) -> None:
        self._send = send
        self._writes = jax.process_index() == 0
        self._folder = folder.elsewhere() if self._writes else folder
        self._tensorboard: TensorBoard | None = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writes:
            self._to_tensorboard(TensorBoard.close)
            self._folder.push()
            self._folder.forget_copy()

    def begin(self, start: int) -> None:
        """Start at a step: what was recorded from there on will be recorded again."""
        if not self._writes:
            return
        cut_metrics(self._folder.metrics, start - 1)
        append_line(self._folder.starts, {"step": start, "time_s": time.time(), "workers": jax.process_count()})
        with convenience("TensorBoard's events"):
            self._tensorboard = TensorBoard(self._folder.tensorboard, start)

    def write(self, record: Record) -> None:
        """Record a step."""
        if not self._writes:
            return
        record = finite(record)
        append_metrics(self._folder.metrics, record)
        self._send(record)
        self._to_tensorboard(lambda tensorboard: tensorboard.write(record))

    def push(self) -> None:
        """Make what was recorded outlast a kill and a power cut. To be called before a checkpoint is saved.

        A resumed run goes on after its checkpoint: nothing would write again what was lost before it.
        """
        if not self._writes:
            return
        for path in (self._folder.metrics, self._folder.starts):
            sync_file(path)
        sync_folder(self._folder.path)
        self._to_tensorboard(TensorBoard.flush)
        self._folder.push()

    def _to_tensorboard(self, action: Callable[[TensorBoard], None]) -> None:
        """Act on TensorBoard's events. Where that fails, the run goes on without them."""
        tensorboard, self._tensorboard = self._tensorboard, None
        if tensorboard is not None:
            with convenience("TensorBoard's events"):
                action(tensorboard)
                self._tensorboard = tensorboard


class StepTimer:
    """Turns a step's metrics into a record, with what the steps since the last record took.

    Args:
        config: the run's.
        device_kind: what jax calls the devices.
        num_devices: devices of all processes.
    """

    def __init__(self, config: PretrainConfig, device_kind: str, num_devices: int) -> None:
        self._schedule = learning_rate_schedule(config.optimizer, config.train.max_steps)
        self._tokens_per_step = config.train.global_batch_size * config.model.seq_len
        peak = peak_flops_per_s(device_kind)
        flops_per_step = flops_per_token(config.model) * self._tokens_per_step
        # Seconds that a step would take at the devices' peak; None where that is not known.
        self._ideal_step_s = None if peak is None else flops_per_step / (peak * num_devices)
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure from here, where `step` steps are done."""
        self._step, self._since, self._data_wait_s = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        before = time.perf_counter()
        yield
        self._data_wait_s += time.perf_counter() - before

    def record(self, step: int, metrics: dict[str, jax.Array], *, is_due: bool = True) -> Record:
        """The record of a step, once its metrics are there; measures again from now.

        A loss or a gradient norm that is not finite is left out; the step made no update.

        Args:
            step: the step.
            metrics: what `train_step` returned with it.
            is_due: the configuration has this step recorded. A step that is recorded because the run is stopped
                there does not end the run, so that a run ends at the same step however often it is stopped.

        Raises:
            TrainingDivergedError: `MAX_STEPS_SKIPPED` steps in a row made no update, so that none will.
        """
        num_skipped = int(metrics["num_skipped"])
        record: dict[str, Any] = {"step": step, "num_skipped": num_skipped} if num_skipped else {"step": step}
        for name in ("loss", "grad_norm"):
            if math.isfinite(value := float(metrics[name])):
                record[name] = value
        # The optimizer counts updates, of which a skipped step is none.
        record["learning_rate"] = float(self._schedule(step - 1 - num_skipped))
        num_in_a_row = int(metrics["num_skipped_in_a_row"])
        if is_due and num_in_a_row >= MAX_STEPS_SKIPPED:
            raise TrainingDivergedError(
                f"loss and gradient must be finite, got none in the last {num_in_a_row} steps up to step {step}. Lower "
                "--optimizer.learning-rate, lengthen --optimizer.warmup-steps, or set --optimizer.clip-norm 1, under "
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
