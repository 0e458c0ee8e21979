"""A run that is trained to its end in child processes, with kills at random places."""

import random
import time
from collections import deque
from collections.abc import Sequence

from pretrain._audit.child_run import ChildRun
from pretrain._audit.planned_kills import PlannedKill
from pretrain._errors import UsageError
from pretrain._screen.kill_table import KillRow, KillTable

_POLL_S = 0.02
_BAD_INPUT = 2


class ChildFailedError(RuntimeError):
    """A command `train` has failed that nothing had killed, or has ended before a planned kill."""


def train_with_kills(run: ChildRun, kills: Sequence[PlannedKill], rng: random.Random, table: KillTable) -> None:
    """Train a run to its end, and kill its processes on the way. A command that a kill has ended is started again.

    Args:
        run: the run.
        kills: the kills, in the order of their steps. Each waits until the run has continued after the one before.
        rng: chooses the worker to kill.
        table: gets each kill, and what continued after it.

    Raises:
        UsageError: the command has rejected its input.
        ChildFailedError: the command has failed, and no kill explains it; or the run ended before the last kill.
    """
    pending, row = deque(kills), None
    num_starts, killed_s, is_started_again = 0, 0.0, False
    run.start()
    while True:
        code = run.poll()
        if row is not None and len(starts := run.starts()) > num_starts:
            row.checkpoint, row.after_s = starts[-1]["step"], starts[-1]["time_s"] - killed_s
            row.continued_by = "the same command" if is_started_again else "new workers"
            table.continued(row)
            row = None
        if code == 0:
            if pending:
                raise ChildFailedError(
                    f"the run {run.folder.name} ended before {len(pending)} of {len(kills)} kills. Try it again"
                )
            return
        if code is not None:
            if row is None or is_started_again:
                _check(run, code)
            is_started_again = True
            run.start()
        elif row is None and pending and run.step() >= pending[0].step:
            time.sleep(pending[0].delay_s)
            num_starts, row = len(run.starts()), _kill(run, pending[0], rng, number=len(kills) - len(pending) + 1)
            if row is not None:
                killed_s, is_started_again = time.time(), False
                pending.popleft()
                table.add(row)
        time.sleep(_POLL_S)


def _kill(run: ChildRun, kill: PlannedKill, rng: random.Random, *, number: int) -> KillRow | None:
    """Kill a process of a run. Return None if it has just ended."""
    if kill.is_of_command:
        if run.poll() is not None:
            return None
        victim, step, phase = f"the command ({run.pid})", run.step(), run.phase()
        run.kill_command()
    else:
        workers = run.workers()
        if not workers:
            return None
        worker = rng.choice(workers)
        victim, step, phase = f"a worker ({worker.pid})", run.step(), run.phase()
        if not worker.kill():
            return None
    return KillRow(number=number, victim=victim, step=step, phase=phase)


def _check(run: ChildRun, code: int) -> None:
    if code == _BAD_INPUT:
        raise UsageError(run.last_line())
    if code:
        raise ChildFailedError(f"the command of the run {run.folder.name} ended with code {code}: {run.last_line()}")
