"""The state of a run: from its files, and from the lock of its command on this machine."""

from itertools import pairwise
from typing import Literal

from pretrain._run.history import RunHistory, last_sign_of_life
from pretrain._run.lock import command_runs

_SILENT_S = 300.0
_SILENT_STEPS_S = 60.0
_NUM_INTERVALS = 20

RunState = Literal["training", "no sign of life", "stopped", "failed", "finished"]


def run_state(history: RunHistory, now_s: float) -> RunState:
    """Return the state of a run. A run whose command was killed has failed, if this machine can tell.

    Args:
        history: the run's history.
        now_s: the Unix time.
    """
    phase = history.phases[-1].phase if history.phases else None
    if is_finished(history):
        return "finished"
    is_running = command_runs(history.folder)
    if phase == "stopped" or phase == "failed":
        return "training" if is_running else phase  # a command that continues it writes its first phase later
    if is_running is False:
        return "failed"
    return "training" if now_s - last_seen_s(history) < silent_after_s(history) else "no sign of life"


def is_finished(history: RunHistory) -> bool:
    """Return whether a run is finished: it has a result, or its last phase tells it."""
    return history.result is not None or (bool(history.phases) and history.phases[-1].phase == "finished")


def silent_after_s(history: RunHistory) -> float:
    """Return the seconds without a phase or a record after which a run shows no sign of life.

    They depend on the longest of the last intervals between two records, and are five minutes at first, and while the
    run does anything but train. A run in object storage uploads its records every 30 s.
    """
    began_s = max((start.get("time_s", 0.0) for start in history.starts), default=0.0)
    times = [record["time_s"] for record in history.records[-_NUM_INTERVALS:] if record.get("time_s", -1.0) >= began_s]
    intervals = [after_s - before_s for before_s, after_s in pairwise(times)]
    is_known = len(intervals) > 1 and bool(history.phases) and history.phases[-1].phase == "training"
    return max(_SILENT_STEPS_S if is_known else _SILENT_S, _SILENT_STEPS_S + 3 * max(intervals, default=0.0))


def last_seen_s(history: RunHistory) -> float:
    """Return the Unix time of the last phase or record. A run that has neither was seen when it was described."""
    seen_s = last_sign_of_life(history.phases, history.records)
    if seen_s is not None:
        return seen_s
    config = history.folder.config
    return config.stat().st_mtime if config.exists() else 0.0
