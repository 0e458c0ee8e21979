"""The log of a run, written by rank 0: metrics, phases, samples, starts of the workers, and trackers."""

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from pretrain._config import PretrainConfig
from pretrain._run.description import RunDescription
from pretrain._run.files import append_line, read_lines, sync_file, sync_folder
from pretrain._run.folder import RunFolder
from pretrain._run.history import Phase, PhaseName, Sample, last_sign_of_life, read_phases
from pretrain._run.metrics import Record, cut_lines, finite
from pretrain._trackers.tracker import Trackers, open_trackers


class RunLog:
    """The log of a run. Rank 0 writes; other ranks do nothing.

    Args:
        folder: the run's folder.
        config: the configuration of this start.
        description: the run's description.
        send: called with each record, and with each phase as a dictionary.
        clock: returns Unix time in seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: PretrainConfig,
        description: RunDescription,
        send: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._send, self._clock, self._config, self._description = send, clock, config, description
        self._writes = jax.process_index() == 0
        self._folder = folder.for_worker() if self._writes else folder
        self._trackers: Trackers | None = None
        self._last: Phase | None = None
        self._early: list[Phase] | None = []  # phases before `begin`; None after it

    @property
    def folder(self) -> RunFolder:
        """The folder that rank 0 writes, on this machine."""
        return self._folder

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writes:
            if self._early is None and self._last is not None and self._last.phase != "finished":
                self.phase(self._last.step, "stopped")
            if self._trackers is not None:
                self._trackers.close()
            try:
                self._folder.push()
            finally:
                self._folder.delete_copy()

    def begin(self, start: int, began_s: float, device: str, num_devices: int) -> None:
        """Start at a step. Nothing is written before this.

        Earlier records of this step and later ones are dropped: the run writes them again.

        Args:
            start: the step.
            began_s: Unix time at which the command began.
            device: name of a device.
            num_devices: devices of all processes.
        """
        if not self._writes:
            return
        phases, early = read_phases(self._folder), self._early or []
        alive_s = last_sign_of_life(phases, read_lines(self._folder.metrics))
        if alive_s is not None and alive_s > began_s:  # this command has lost its workers
            early.insert(0, Phase(step=start, time_s=alive_s, phase="restarting"))
        else:
            early.insert(0, Phase(step=start, time_s=began_s, phase="starting"))
            if phases and alive_s is not None and phases[-1].phase not in ("stopped", "finished"):  # a kill
                early.insert(0, Phase(step=phases[-1].step, time_s=alive_s, phase="stopped"))
        for phase in early:
            append_line(self._folder.phases, dataclasses.asdict(phase))
        self._early = None
        cut_lines(self._folder.metrics, start - 1)
        cut_lines(self._folder.samples, start - 1, texts=("prompt", "text"))
        append_line(
            self._folder.starts,
            {
                "step": start,
                "time_s": round(self._clock(), 3),
                "workers": jax.process_count(),
                "devices": num_devices,
                "device": device,
            },
        )
        self._trackers = open_trackers(self._config, self._description, self._folder, start)

    def phase(self, step: int, name: PhaseName) -> None:
        """Begin a phase. It is sent at once, and written after `begin`.

        Args:
            step: the step.
            name: the phase.
        """
        if not self._writes or (self._last is not None and self._last.phase == name):
            return
        self._last = Phase(step=step, time_s=round(self._clock(), 3), phase=name)
        if self._early is None:
            append_line(self._folder.phases, dataclasses.asdict(self._last))
        else:
            self._early.append(self._last)
        self._send(dataclasses.asdict(self._last))

    def write(self, record: Record) -> None:
        """Write a record."""
        if not self._writes:
            return
        record = finite(record)
        append_line(self._folder.metrics, record)
        self._send(record)
        if self._trackers is not None:
            self._trackers.write(record)

    def write_sample(self, sample: Sample) -> None:
        """Write a sample."""
        if self._writes:
            append_line(self._folder.samples, dataclasses.asdict(sample))
            if self._trackers is not None:
                self._trackers.write_sample(sample)

    def push(self) -> None:
        """Make the log durable. Call this before a checkpoint is saved.

        A resumed run continues after its checkpoint, and does not write earlier records again.
        """
        if not self._writes:
            return
        for path in (self._folder.metrics, self._folder.samples, self._folder.starts, self._folder.phases):
            sync_file(path)
        sync_folder(self._folder.path)
        if self._trackers is not None:
            self._trackers.flush()
        self._folder.push()
