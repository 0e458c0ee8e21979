"""The training loop that every worker runs.

The order at a step with a checkpoint or a validation: update, start the save, evaluate, sample, write the metrics,
report. The save continues in the background until the next one. A run that continues from a checkpoint writes the
record of that step again, from the checkpoint. After a stop request, the loop saves and returns.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import ray.train

from nnx_gpt2 import TrainState, averaged_params, put_batch
from pretrain._config import TrainConfig
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._run.description import RUN, RunDescription
from pretrain._run.metrics import Record
from pretrain._training.best_validation import BestValidation
from pretrain._training.load_state import first_step, items, load_state, metadata_of
from pretrain._training.profiling import Profiling
from pretrain._training.run_log import RunLog
from pretrain._training.setup import Setup, set_up
from pretrain._training.step_meter import Metrics, StepMeter, diverged
from pretrain._training.train_batches import train_batches
from ray_jax_launch import Checkpoints, log_metrics, mark_finished, stop_requested, watch_steps


def run(resolved: ResolvedRun, *, began_s: float) -> str:
    """Train from the newest checkpoint, or from the start, to the last step.

    Args:
        resolved: the run.
        began_s: Unix time at which the command began.

    Returns:
        On rank 0, a sample from the trained model; an empty text on other ranks, and after a stop request.
    """
    config = resolved.config
    folder = resolved.folder
    description = resolved.description
    setup = set_up(config, resolved.data)
    best = BestValidation(config.train)
    with (
        RunLog(folder, config, description, send=log_metrics, watch=watch_steps, keep=best.keep) as log,
        Checkpoints(folder.checkpoints, num_to_keep=config.train.checkpoints_to_keep, keep=log.keep) as checkpoints,
        Profiling(config.profile, log.folder.profiles) as profiling,
        ThreadPoolExecutor(1) as thread,
    ):
        start = first_step(checkpoints, description.origin)  # verified, and the same on every process
        log.begin(start, began_s)
        loop = Loop(setup, log, checkpoints, profiling, best, description)
        batches = train_batches(config, resolved.data, start, uses_ray_data=resolved.uses_ray_data)
        first_windows = thread.submit(setup.first_windows, batches)
        loop.load(start)
        for step in range(start + 1, config.train.max_steps + 1):
            if best.has_stalled:
                break
            if step == start + 1:
                metrics = loop.train_first(step, first_windows.result())
            else:
                with loop.meter.waiting_for_data():
                    rows = next(batches)
                metrics = loop.train(step, put_batch(rows, setup.mesh))
            if stop_requested(step, metrics["loss"]):
                loop.stop(step)
                return ""
            loop.do_what_is_due(step)
        return loop.finish()


class Due(NamedTuple):
    """The work that is due at a step."""

    checkpoint: bool
    validation: bool
    record: bool


def due(train: TrainConfig, step: int) -> Due:
    """Return what is done at a step. Everything is done at the last one."""
    every = (train.checkpoint_every, train.eval_every, train.log_every)
    return Due(*(step % number == 0 or step == train.max_steps for number in every))


class Loop:
    """The state of one start of a run on one worker, and what is done with it.

    Args:
        setup: mesh, step, validations and sampler.
        log: the run's log.
        checkpoints: the run's checkpoints.
        profiling: the profile of some steps.
        best: the best validation so far.
        description: the run's description.
    """

    def __init__(
        self,
        setup: Setup,
        log: RunLog,
        checkpoints: Checkpoints,
        profiling: Profiling,
        best: BestValidation,
        description: RunDescription,
    ) -> None:
        self._setup = setup
        self._log = log
        self._checkpoints = checkpoints
        self._profiling = profiling
        self._best = best
        self._description, self._train = description, setup.config.train
        self.meter = StepMeter(setup.config, setup.data.train, setup.device, setup.mesh.size)
        self._state: TrainState
        self._has_unwritten_record = False

    def load(self, start: int) -> None:
        """Read the state of a checkpoint, or make the first one, and write the record that is due at its step.

        A first state from random parameters is not saved: it follows from the seed.
        """
        origin = self._description.origin
        self._state, metadata = load_state(self._checkpoints, origin, self._setup)
        self.meter.restore(metadata["unrecorded"])
        self._best.restore(metadata["best"])
        self._log.open(self._setup.device.device_kind, self._setup.mesh.size)
        self._profiling.limit_steps(start, self._train.max_steps)
        record = self.meter.progress(start) | metadata["record"]
        if origin is not None and self._checkpoints.latest_step() is None:
            self._save(record)
        if any(due(self._train, start)):
            self._write(record, is_evaluated=due(self._train, start).validation)
        if start < self._train.max_steps:
            self._log.phase(start, "compiling")

    def train_first(self, step: int, windows: jax.Array) -> Metrics:
        """Run the first step of this start. The time of a step excludes its compilation."""
        metrics = jax.block_until_ready(self.train(step, windows))
        self._resume(step)
        return metrics

    def train(self, step: int, windows: jax.Array) -> Metrics:
        """Start a step on the devices, and return its metrics."""
        self._profiling.before_step(step)
        self._state, metrics = self._setup.train_step(self._state, windows, self._setup.key)
        self._profiling.after_step(step, metrics)
        # The metrics of a step are read after the next step has started: the device never waits.
        if self._has_unwritten_record:
            self._log.write(self._wait_for_record(step - 1))
        self.meter.add(metrics)
        self._log.write_losses(step - self.meter.num_in_flight, self.meter.take_losses())
        self._has_unwritten_record = due(self._train, step).record
        return metrics

    def do_what_is_due(self, step: int) -> None:
        """Save and evaluate, if either is due. A record that is due alone is written after the next step."""
        is_saved, is_evaluated, _ = due(self._train, step)
        if not is_saved and not is_evaluated:
            return
        record = self._wait_for_record(step)
        self._has_unwritten_record = False
        self.meter.stop()
        if is_saved:
            self._save(record)
        self._write(record, is_evaluated=is_evaluated)
        if self._best.has_stalled and not is_saved:
            self._save(record)
        if step < self._train.max_steps:
            self._resume(step)

    def stop(self, step: int) -> None:
        """Save after a stop request. The continued run does everything else that is due at this step."""
        record = self._wait_for_record(step) if any(due(self._train, step)) else self.meter.progress(step)
        self._save(record)

    def finish(self) -> str:
        """Wait for the last save, and return a sample on rank 0."""
        self._checkpoints.wait()
        self._log.push()
        if jax.process_index() == 0:
            mark_finished("")
        step = int(self._state.step)
        self._log.phase(step, "sampling")
        text = self._setup.sampler.text(self._model)
        self._log.end(step, text)
        self._log.phase(step, "finished")
        return text

    @property
    def _model(self) -> Any:
        """The parameters to evaluate: their average if the run keeps one."""
        has_average = self._setup.config.optimizer.average_decay > 0
        return averaged_params(self._state.opt_state) if has_average else self._state.params

    def _wait_for_record(self, step: int) -> Record:
        """Return the record of a step, and write the losses up to it, also if they end the run."""
        try:
            return self.meter.wait_for_record(step)
        finally:
            self._log.write_losses(step, self.meter.take_losses())

    def _resume(self, step: int) -> None:
        self._log.phase(step, "training")
        self.meter.start()

    def _save(self, record: Record) -> None:
        """Start a save, which continues in the background."""
        unrecorded = self.meter.wait_for_unrecorded()
        self._log.write_losses(record["step"], self.meter.take_losses())
        self._log.phase(record["step"], "saving")
        self._log.push()  # a continued run expects the records before its checkpoint in the log
        self._checkpoints.save(
            record["step"],
            items(self._state),
            metadata={
                "record": record,
                "unrecorded": unrecorded,
                "best": self._best.to_json(),
                RUN: self._description.to_json(),
                **metadata_of(self._state),
            },
        )

    def _is_saved(self, step: int) -> bool:
        """Return whether a step has a checkpoint in this run. Random parameters, those of step 0, have none."""
        origin = self._description.origin
        if origin is not None and step == origin.start_step:
            return True
        return step > 0 and due(self._train, step).checkpoint

    def _write(self, record: Record, *, is_evaluated: bool) -> None:
        """Write a record, with the validation losses and the samples if it is evaluated."""
        self._log.write_losses(record["step"], self.meter.take_losses())
        if is_evaluated:
            record = self._evaluate(record)
        self._log.write(record)
        if is_evaluated:
            ray.train.report(record)

    def _evaluate(self, record: Record) -> Record:
        """Return the record with the validation losses, and take the samples."""
        setup, step = self._setup, record["step"]
        self._log.phase(step, "evaluating")
        losses, of_windows = setup.validation.measure(self._model, setup.tokenizer)
        record = record | losses
        self._best.add(step, losses["val_loss"], is_saved=self._is_saved(step))
        if step == self._train.max_steps or self._best.has_stalled:
            if not setup.validation.is_full:
                losses, of_windows = setup.full_validation.measure(self._model, setup.tokenizer)
            if not math.isfinite(losses["val_loss"]):
                raise diverged(f"the validation loss of the last step, {step},")
            self._log.write_val_losses(of_windows)
            record |= {f"full_{name}": loss for name, loss in losses.items()}
        self._log.phase(step, "sampling")
        for sample in setup.sampler.samples(self._model, step):
            self._log.write_sample(sample)
        return record
