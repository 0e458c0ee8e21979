"""The state of a run, from its files alone."""

from typing import Literal

from pretrain._run.history import RunHistory, last_sign_of_life
from pretrain._run.remote_copy import watched_files

SILENT_AFTER_S = 300.0
"""A run without a phase or a record for this time shows no sign of life."""

RunState = Literal["training", "no sign of life", "stopped", "finished"]


def run_state(history: RunHistory, now_s: float) -> RunState:
    """Return the state of a run. A run that is killed or cannot be reached shows no sign of life.

    Args:
        history: the run's history.
        now_s: the Unix time.
    """
    phase = history.phases[-1].phase if history.phases else None
    if history.result is not None:
        return "finished"
    if phase == "stopped" or phase == "finished":
        return phase
    return "training" if now_s - last_seen_s(history) < SILENT_AFTER_S else "no sign of life"


def last_seen_s(history: RunHistory) -> float:
    """Return the Unix time of the last phase or record. A run of pretrain 0.8 has the time of its files."""
    seen_s = last_sign_of_life(history.phases, history.records)
    if seen_s is not None:
        return seen_s
    paths = [path for path in watched_files(history.folder) if path.exists()]
    return max((path.stat().st_mtime for path in paths), default=0.0)
