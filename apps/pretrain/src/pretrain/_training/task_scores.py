"""Scores of saved checkpoints on tasks while the run trains, by the command `eval` in a process of its own.

The process computes on the CPUs of its machine, at the lowest priority: the devices are the training's. At most one
process runs at a time, and at most one new checkpoint waits: a later one takes its place. A process that is killed
leaves nothing. The next start of the run scores the checkpoints that are there and have no scores.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from pretrain._best_effort import best_effort
from pretrain._config import TrainConfig
from pretrain._early_interrupt import CHILD
from pretrain._errors import one_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import SCORED_STEP, TASKS
from pretrain._run.metrics import Record, rounded
from ray_jax_launch import checkpoint_steps

_LEAST_PRIORITY = ("nice", "-n", "19")
# The batch of the command: its memory is beside that of the training.
_BATCH_SIZE = "4"
# Variables of the worker that would give the process its devices, or another number of devices.
_DROPPED = ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "JAX_PLATFORM_NAME")
_END_WITHIN_S = 10.0

_logger = logging.getLogger("pretrain")


def is_scored(train: TrainConfig, step: int) -> bool:
    """Return whether the checkpoint of a step is to be scored: each `eval_tasks_every` steps, and the last one."""
    every = train.eval_tasks_every
    return bool(train.eval_tasks) and (
        step == train.max_steps or (every is not None and step > 0 and step % every == 0)
    )


class TaskScores:
    """The scores of one start of a run, on rank 0.

    Args:
        folder: the run's folder.
        train: the tasks, and the steps of the checkpoints to score.
        start: the first step of this start.
        scored: the steps that have scores.
    """

    def __init__(self, folder: RunFolder, train: TrainConfig, *, start: int, scored: Iterable[int]) -> None:
        self._folder, self._train = folder, train
        self._known = {*scored}
        self._process: _Process | None = None
        self._old = [step for step in self._saved() if step <= start and self._is_wanted(step)]
        self._new: int | None = None

    def poll(self, step: int, *, is_last: bool = False) -> list[Record]:
        """Start a process if a checkpoint waits for it and is saved. Return the scores that are new.

        Args:
            step: the last step of the training.
            is_last: whether the run ends with this step, also before `max_steps`.
        """
        found: list[Record] = []
        if self._process is not None and self._process.has_ended:
            with best_effort(f"the scores of step {self._process.step} on tasks"):
                found.append(self._process.scores())
            self._process = None
        self._start_next()
        if (is_last or self._is_wanted(step)) and step not in (*self._known, *self.held):
            if self._new is not None:
                _logger.warning(
                    "the checkpoint of step %d is not scored on tasks: the process before it takes longer than the "
                    "steps between two. Raise --train.eval-tasks-every",
                    self._new,
                )
            self._new = step
            self._start_next()
        return found

    def _start_next(self) -> None:
        """Start a process for the next checkpoint that is saved, if none runs."""
        if self._process is None and (waiting := self._next_saved()) is not None:
            self._known.add(waiting)
            with best_effort(f"the scores of step {waiting} on tasks"):
                self._process = _Process(self._folder, self._train.eval_tasks, waiting)

    @property
    def held(self) -> list[int]:
        """The steps of the checkpoints that must stay: at most that of the process, and those that wait for it."""
        running = [] if self._process is None else [self._process.step]
        return running + self._old + ([] if self._new is None else [self._new])

    @property
    def is_idle(self) -> bool:
        """True if no process runs."""
        return self._process is None

    def _next_saved(self) -> int | None:
        """Return the step of the next checkpoint to score, which does not wait any more; None if none is saved."""
        if not self._old and self._new is None:
            return None
        saved = self._saved()
        while self._old:
            step = self._old.pop(0)
            if step in saved:
                return step
        if self._new not in saved:
            return None
        step, self._new = self._new, None
        return step

    def close(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _saved(self) -> list[int]:
        return checkpoint_steps(self._folder.checkpoints)

    def _is_wanted(self, step: int) -> bool:
        return is_scored(self._train, step) and step not in self._known


class _Process:
    """A command that scores a checkpoint."""

    def __init__(self, folder: RunFolder, tasks: tuple[str, ...], step: int) -> None:
        self.step = step
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - `_close` closes them
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        variables = {name: value for name, value in variables.items() if name not in _DROPPED}
        options = ["--tasks", *tasks, "--batch-size", _BATCH_SIZE, "--json"]
        self._process = subprocess.Popen(
            [*_LEAST_PRIORITY, sys.executable, "-P", "-c", CHILD, "eval", f"{folder}@{step}", *options],
            stdin=subprocess.PIPE,  # its end, with that of this process, ends the command
            stdout=self._output,
            stderr=self._errors,
            env=variables | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is for this process alone
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def scores(self) -> Record:
        """Return the scores.

        Raises:
            RuntimeError: the command has failed.
        """
        output, errors = (_content(file) for file in (self._output, self._errors))
        self._close()
        if self._process.returncode != 0:
            lines = errors.strip().splitlines() or [f"exit code {self._process.returncode}"]
            raise RuntimeError(one_line(lines[-1].removeprefix("error: ").rstrip(".")))
        return _record(self.step, json.loads(output))

    def kill(self) -> None:
        """Kill the command."""
        self._process.kill()
        self._process.wait(_END_WITHIN_S)
        self._close()

    def _close(self) -> None:
        for file in (self._process.stdin, self._output, self._errors):
            assert file is not None, "stdin is a pipe"
            file.close()


def _content(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _record(step: int, evaluation: dict[str, Any]) -> Record:
    """Return the scores of a `TaskEvaluation` as a record, without that of the step at which it is written."""
    record: Record = {SCORED_STEP: step}
    for task in evaluation["tasks"]:
        for score in task["metrics"]:
            name = f"{TASKS}{task['task']}/{score['metric']}"
            record[name] = score["value"]
            if score["stderr"] is not None:
                record[f"{name}_stderr"] = score["stderr"]
    return rounded(record)
