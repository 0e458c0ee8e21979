"""The log of a run, written by rank 0: metrics, phases, samples, starts of the workers, and trackers."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pretrain._best_effort import best_effort
from pretrain._config import PretrainConfig
from pretrain._run.description import RunDescription
from pretrain._run.files import read_lines, write_durably
from pretrain._run.folder import RunFolder
from pretrain._run.history import (
    ENDS,
    SCORED_STEP,
    Phase,
    PhaseName,
    Sample,
    last_sign_of_life,
    next_phase,
    read_starts,
    recent_phases,
)
from pretrain._run.log_parts import METRICS, PHASES, SAMPLES, SCORES, STARTS, TEXTS
from pretrain._run.metrics import TEXT_METRICS, Record, finite, numbers
from pretrain._run.partial_reads import last_lines
from pretrain._run.step_losses import ValLosses, write_val_losses
from pretrain._surroundings.processor import processor_name
from pretrain._trackers.tracker import Trackers, open_trackers
from pretrain._training.task_scores import TaskScores
from ray_jax_launch import stop_pending

# Of a process that scores a checkpoint.
_LOOK_EVERY_S = 0.2
# Checkpoints that are kept until they are scored.
_MOST_HELD = 64


class RunLog:
    """The log of a run. Rank 0 writes; other ranks do nothing.

    A run in object storage is uploaded every 30 s, and before each checkpoint.

    Args:
        folder: the run's folder.
        config: the configuration of this start.
        description: the run's description.
        send: called with the numbers of each record, and with each phase as a dictionary.
        clock: returns Unix time in seconds.
        keep: returns whether a checkpoint is kept, whatever its age.
        watch: called on all ranks at the beginning of each phase, with whether its work is steps.

    Raises:
        MovedFolderError: the command has locked another folder than the one that has its name now. `open`, `write` and
            `push` raise it too.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: PretrainConfig,
        description: RunDescription,
        send: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.time,
        watch: Callable[[bool], None] = lambda is_training: None,
        keep: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._send = send
        self._watch, self._keep = watch, keep
        self._clock = clock
        self._config = config
        self._description = description
        self._writes = jax.process_index() == 0
        folder.check_place()  # before anything makes a folder of the former name
        self._folder = folder.for_worker() if self._writes else folder
        self._writer = self._folder.log_writer()
        self._trackers: Trackers | None = None
        self._scores: TaskScores | None = None
        self._unsent: list[Record] = []  # scores that the trackers get again
        self._held: set[int] = set()  # the checkpoints of these steps are to be scored
        self._before: Phase | None = None  # the last phase before this start
        self._last: Phase | None = None
        self._early: list[Phase] = []  # phases before `open`
        self._start = 0
        self._began_s = 0.0
        self._last_step = 0
        self._is_open = False

    @property
    def folder(self) -> RunFolder:
        """The folder that rank 0 writes, on this machine."""
        return self._folder

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._writes:
            return
        self._writer.stop()
        if self._scores is not None:
            self._scores.close()
        try:
            # After an exception the workers may start again. The driver notes the end if they do not.
            if self._is_open and exc is None and self._last is not None and self._last.phase != "finished":
                self.phase(self._last_step, "stopped")
            if self._trackers is not None:
                self._trackers.close()
            if self._is_open:
                self._push()
        finally:
            self._folder.delete_copy()

    def begin(self, start: int, began_s: float) -> None:
        """Begin the phase `loading` at a step. Nothing is written before `open`: the checkpoint may be rejected.

        Args:
            start: the step.
            began_s: Unix time at which the command began, on the driver.
        """
        if not self._writes:
            return
        self._start, self._began_s = start, began_s
        phases, starts = recent_phases(self._folder), read_starts(self._folder)
        alive_s = last_sign_of_life(phases, last_lines(self._folder.metrics, 1, TEXT_METRICS))
        self._before = phases[-1] if phases else None
        if alive_s is not None and starts and starts[-1].get("began_s") == began_s:  # this command has lost its workers
            self._add(start, alive_s, "restarting")
        else:
            if phases and alive_s is not None and phases[-1].phase not in ENDS:  # a kill
                self._before = next_phase(phases[-1], step=phases[-1].step, time_s=alive_s, phase="stopped")
                self._early.append(self._before)
            self._add(start, began_s, "starting")
        self.phase(start, "loading")

    def open(self, device: str, num_devices: int) -> None:
        """Write the start. Earlier records of its step and later ones are dropped: the run writes them again.

        Args:
            device: name of a device.
            num_devices: devices of all processes.
        """
        if not self._writes:
            return
        self._is_open = True
        for phase in self._early:
            self._append(PHASES, dataclasses.asdict(phase))
        self._writer.cut(self._start)
        start = {
            "step": self._start,
            "time_s": round(self._clock(), 3),
            "began_s": self._began_s,
            "workers": jax.process_count(),
            "devices": num_devices,
            "device": device,
            "processor": processor_name(),
        }
        self._append(STARTS, start)
        self._writer.flush()  # from here on, the run has begun: no failure deletes it
        self._writer.start()
        self._trackers = open_trackers(self._config, self._description, self._folder, self._start)
        scores = read_lines(self._folder.scores, TEXTS[SCORES])
        self._unsent = sorted((line for line in scores if line["step"] >= self._start), key=itemgetter("step"))
        if self._config.train.eval_tasks:
            scored = [line[SCORED_STEP] for line in scores if SCORED_STEP in line]
            self._scores = TaskScores(self._folder, self._config.train, start=self._start, scored=scored)

    def phase(self, step: int, name: PhaseName) -> None:
        """Begin a phase. It is sent at once, and written once `open` was called.

        Args:
            step: the step.
            name: the phase.
        """
        self._watch(name == "training")
        if not self._writes or (self._last is not None and self._last.phase == name):
            return
        self._add(step, round(self._clock(), 3), name)

    def _add(self, step: int, time_s: float, name: PhaseName) -> None:
        phase = next_phase(self._last or self._before, step=step, time_s=time_s, phase=name)
        if self._is_open:
            self._append(PHASES, dataclasses.asdict(phase))
        else:
            self._early.append(phase)
        self._last, self._last_step = phase, max(phase.step, self._last_step)
        self._send(dataclasses.asdict(phase))

    def write(self, record: Record) -> None:
        """Write a record."""
        if not self._writes:
            return
        record = finite(record)
        self._append(METRICS, record)
        self._send(numbers(record))  # a text among them would keep all of them from Ray's gauges
        self._last_step = record["step"]
        if self._trackers is not None:
            while self._unsent and self._unsent[0]["step"] < record["step"]:
                self._trackers.write(self._unsent.pop(0))
            self._trackers.write(record)
            while self._unsent and self._unsent[0]["step"] == record["step"]:
                self._trackers.write(self._unsent.pop(0))
        self._write_scores()

    def _write_scores(self, *, is_last: bool = False) -> None:
        """Write the scores that are new at the last step, and let the next checkpoint be scored."""
        if self._scores is None:
            return
        for found in self._scores.poll(self._last_step, is_last=is_last):
            line = {"step": self._last_step, **found}
            self._append(SCORES, line)
            if self._trackers is not None:
                self._trackers.write(line)

    def keep(self, step: int) -> bool:
        """Return whether a checkpoint is kept, whatever its age: also until it is scored. The same on all ranks."""
        return self._keep(step) or step in self._held

    def write_losses(self, last_step: int, losses: Sequence[float]) -> None:
        """Write the losses of the steps up to `last_step`, one for each; NaN for a step without an update."""
        if self._writes and losses:
            self._folder.check_place()
            self._writer.append_losses(last_step - len(losses) + 1, losses)

    def write_val_losses(self, losses: ValLosses) -> None:
        """Write the losses of the validation windows after the last step. `push` uploads them."""
        if self._writes:
            self._folder.check_place()
            write_val_losses(self._folder.val_losses, losses)

    def write_sample(self, sample: Sample) -> None:
        """Write a sample."""
        if self._writes:
            self._append(SAMPLES, dataclasses.asdict(sample))
            if self._trackers is not None:
                self._trackers.write_sample(sample)

    def push(self) -> None:
        """Make the log durable, before a checkpoint is saved. A collective if checkpoints are scored on tasks.

        A resumed run continues after its checkpoint, and does not write earlier records again.
        """
        if self._config.train.eval_tasks:
            held = [] if self._scores is None else self._scores.held
            steps = np.full(_MOST_HELD, -1)
            steps[: len(held)] = held[:_MOST_HELD]
            self._held = {*multihost_utils.broadcast_one_to_all(steps).tolist()} - {-1}
        if not self._writes:
            return
        if self._trackers is not None:
            self._trackers.flush()
        self._push()

    def end(self, step: int, text: str) -> None:
        """Write the text at the end of a run, and wait for the scores on tasks, unless a stop is requested.

        After this, the driver writes `result.json`: nothing is missing then.

        Args:
            step: the last step, which is saved.
            text: the text; an empty one is not written.
        """
        if self._writes and text:
            with best_effort(f"the sample {self._folder.sample}"):
                self._folder.check_place()
                write_durably(self._folder.sample, text)
        if self._scores is not None:
            self.phase(step, "evaluating")
            self._write_scores(is_last=True)
            while not self._scores.is_idle and not stop_pending():
                time.sleep(_LOOK_EVERY_S)
                self._watch(False)  # a sign of life: the scores may take hours, and the other workers have returned
                self._write_scores(is_last=True)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self._folder.check_place()
        self._writer.append(name, line)

    def _push(self) -> None:
        self._folder.check_place()
        self._writer.flush()
        self._folder.push()
