"""What rank 0 writes while it trains: metrics, TensorBoard, and when the workers started."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
from tensorboardX import SummaryWriter

from nnx_gpt2 import flops_per_token, learning_rate_schedule, peak_flops_per_s
from pretrain._config import PretrainConfig
from pretrain._metrics import Record, append_metrics, cut_metrics
from pretrain._run import RunFolder

# A run in which this many steps in a row made no update is ended.
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
        self._tensorboard: SummaryWriter | None = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._folder.push()
            self._folder.forget_copy()

    def begin(self, start: int) -> None:
        """Start at a step: what was recorded from there on will be recorded anew."""
        if not self._writes:
            return
        cut_metrics(self._folder.metrics, start - 1)
        self._tensorboard = SummaryWriter(str(self._folder.tensorboard), purge_step=start, flush_secs=10)
        with self._folder.starts.open("a") as file:
            file.write(json.dumps({"step": start, "time_s": time.time(), "workers": jax.process_count()}) + "\n")

    def write(self, record: Record) -> None:
        """Record a step."""
        if self._tensorboard is None:
            return
        append_metrics(self._folder.metrics, record)
        self._send(record)
        for name, value in record.items():
            if name != "step":
                self._tensorboard.add_scalar(name, value, record["step"])

    def push(self) -> None:
        """Make what was recorded durable, where the run is in object storage."""
        if self._writes:
            self._folder.push()


class StepTimer:
    """Turns a step's metrics into a record, with what the steps since the last record took."""

    def __init__(self, config: PretrainConfig, mesh: jax.sharding.Mesh, *, num_skipped: int = 0) -> None:
        self._schedule = learning_rate_schedule(config.optimizer, config.train.max_steps)
        self._tokens_per_step = config.train.global_batch_size * config.model.seq_len
        peak = peak_flops_per_s(mesh.devices.flat[0].device_kind)
        flops_per_step = flops_per_token(config.model) * self._tokens_per_step
        # Seconds that a step would take at the devices' peak; None where that is not known.
        self._ideal_step_s = None if peak is None else flops_per_step / (peak * mesh.size)
        # The last record whose loss was finite: its step, and the steps skipped until then.
        self._good_step, self._good_num_skipped = 0, num_skipped
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

    def record(self, step: int, metrics: dict[str, jax.Array]) -> Record:
        """The record of a step, once its metrics are there; measures anew from now.

        A loss or a gradient norm that is not finite is left out; the step made no update.

        Raises:
            FloatingPointError: no step made an update any more for so long that none will.
        """
        num_skipped = int(metrics["num_skipped"])
        record: dict[str, Any] = {"step": step, "num_skipped": num_skipped} if num_skipped else {"step": step}
        for name in ("loss", "grad_norm"):
            if math.isfinite(value := float(metrics[name])):
                record[name] = value
        # The optimizer counts updates, of which a skipped step is none.
        record["learning_rate"] = float(self._schedule(step - 1 - num_skipped))
        if num_skipped - self._good_num_skipped < step - self._good_step:
            self._good_step, self._good_num_skipped = step, num_skipped
        elif step - self._good_step >= MAX_STEPS_SKIPPED:
            raise FloatingPointError(
                f"expected a finite loss and gradient, got none in the last {step - self._good_step} steps up to step "
                f"{step}: lower --optimizer.learning-rate, lengthen --optimizer.warmup-steps, or set "
                "--optimizer.clip-norm 1, under another --name"
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
