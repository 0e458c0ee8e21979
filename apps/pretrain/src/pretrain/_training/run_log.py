"""The log of a run, written by rank 0: metrics, phases, samples, starts of the workers, TensorBoard's events."""

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from pretrain._best_effort import best_effort
from pretrain._run.description import RunDescription
from pretrain._run.files import append_line, read_lines, sync_file, sync_folder
from pretrain._run.folder import RunFolder
from pretrain._run.history import Phase, PhaseName, Sample, last_sign_of_life, read_phases
from pretrain._run.metrics import Record, cut_lines, finite
from pretrain._training.tensorboard import TensorBoard


class RunLog:
    """The log of a run. Rank 0 writes; other ranks do nothing.

    Args:
        folder: the run's folder.
        description: the run's description.
        send: called with each record, and with each phase as a dictionary.
        clock: returns Unix time in seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        description: RunDescription,
        send: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._send, self._clock, self._description = send, clock, description
        self._writes = jax.process_index() == 0
        self._folder = folder.for_worker() if self._writes else folder
        self._tensorboard: TensorBoard | None = None
        self._last: Phase | None = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writes:
            if self._last is not None and self._last.phase != "finished":
                self.phase(self._last.step, "stopped")
            self._to_tensorboard(TensorBoard.close)
            try:
                self._folder.push()
            finally:
                self._folder.delete_copy()

    def begin(self, start: int, began_s: float, device: str, num_devices: int) -> None:
        """Start at a step. Earlier records of this step and later ones are dropped: the run writes them again.

        Args:
            start: the step.
            began_s: Unix time at which the command began.
            device: name of a device.
            num_devices: devices of all processes.
        """
        if not self._writes:
            return
        now = self._clock()
        phases = read_phases(self._folder)
        alive_s = last_sign_of_life(phases, read_lines(self._folder.metrics))
        if alive_s is not None and alive_s > began_s:  # this command has lost its workers
            self.phase(start, "restarting", alive_s)
        else:
            if phases and alive_s is not None and phases[-1].phase not in ("stopped", "finished"):  # a kill
                self.phase(phases[-1].step, "stopped", alive_s)
            self.phase(start, "starting", began_s)
        self.phase(start, "loading", now)
        for path in (self._folder.metrics, self._folder.samples):
            cut_lines(path, start - 1)
        append_line(
            self._folder.starts,
            {"step": start, "time_s": now, "workers": jax.process_count(), "devices": num_devices, "device": device},
        )
        with best_effort("TensorBoard's events"):
            self._tensorboard = TensorBoard(self._folder.tensorboard, start)

    def phase(self, step: int, name: PhaseName, time_s: float | None = None) -> None:
        """Begin a phase.

        Args:
            step: the step.
            name: the phase.
            time_s: Unix time of its beginning; None is now.
        """
        if not self._writes or (self._last is not None and self._last.phase == name):
            return
        self._last = Phase(step=step, time_s=round(self._clock() if time_s is None else time_s, 3), phase=name)
        append_line(self._folder.phases, dataclasses.asdict(self._last))
        self._send(dataclasses.asdict(self._last))

    def write(self, record: Record) -> None:
        """Write a record."""
        if not self._writes:
            return
        record = finite(record)
        append_line(self._folder.metrics, record)
        self._send(record)
        self._to_tensorboard(lambda tensorboard: tensorboard.write(record))

    def write_sample(self, sample: Sample) -> None:
        """Write a sample."""
        if self._writes:
            append_line(self._folder.samples, dataclasses.asdict(sample))

    def push(self) -> None:
        """Make the log durable. Call this before a checkpoint is saved.

        A resumed run continues after its checkpoint, and does not write earlier records again.
        """
        if not self._writes:
            return
        for path in (self._folder.metrics, self._folder.samples, self._folder.starts, self._folder.phases):
            sync_file(path)
        sync_folder(self._folder.path)
        self._to_tensorboard(TensorBoard.flush)
        self._folder.push()

    def _to_tensorboard(self, action: Callable[[TensorBoard], None]) -> None:
        """Call a method of the event file. If it fails, the run goes on without TensorBoard's events."""
        tensorboard, self._tensorboard = self._tensorboard, None
        if tensorboard is not None:
            with best_effort("TensorBoard's events"):
                action(tensorboard)
                self._tensorboard = tensorboard
