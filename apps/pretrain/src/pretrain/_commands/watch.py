"""The command `watch`: the live view of a run, from its folder alone."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from pretrain._formats import age
from pretrain._run.find import find_run
from pretrain._run.folder import RunFolder
from pretrain._run.history import (
    ENDS,
    RECENT_PHASES,
    Phase,
    RunHistory,
    as_phases,
    read_recent,
    read_samples,
    read_starts,
)
from pretrain._run.log_parts import PHASES, TEXTS
from pretrain._run.metrics import TEXT_METRICS, Record
from pretrain._run.partial_reads import NewLines
from pretrain._run.remote_copy import pull_changed
from pretrain._run.result import read_result
from pretrain._run.state import last_seen_s, run_state
from pretrain._screen.display import Display
from pretrain._screen.ending import show_result
from pretrain._screen.printing import print_line
from pretrain._screen.run_view import RunView
from ray_jax_launch import LaunchError

# A request to object storage costs money and time.
_MIN_URI_INTERVAL_S = 5.0
# The command that trains writes the result, seconds after its workers have told the end.
_RESULT_WITHIN_S = 30.0
_NUM_RECORDS = 64  # that the state of a run may depend on
_STATES = {"stopped": "is stopped", "failed": "has failed", "finished": "is finished"}


def watch(
    run: str,
    *,
    console: Console,
    interval_s: float = 1.0,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], Any] = time.sleep,
) -> None:
    """Show a run until it is finished or stopped, from its files alone.

    Args:
        run: the run's folder, URI or name.
        console: the output.
        interval_s: seconds between two looks at the files; in object storage at least 5.
        clock: returns the Unix time.
        sleep: waits for some seconds.

    Raises:
        UsageError: the run does not exist, or its description is damaged.
        LaunchError: the object storage cannot be reached at the start.
        OSError: the output cannot be written; BrokenPipeError if its reader has closed it.
        KeyboardInterrupt: Ctrl-C.
    """
    folder, description = find_run(run)
    has_changed = _changes(folder)
    new_phases, new_records = NewLines(folder.phases, TEXTS[PHASES]), NewLines(folder.metrics, TEXT_METRICS)
    history = read_recent(folder, description)
    view = RunView.of(history, is_local=history.description.hardware == "local", clock=clock)
    is_stale, lost = False, list[OSError]()
    phases, records = list[Phase](), list[Record]()
    with Display(view, console, on_lost=lost.append) as display:
        display.print(f"watching {folder}, started on {history.description.hardware}")
        display.show_newest()
        while not lost and not _is_over(history, clock()):
            sleep(max(interval_s, _MIN_URI_INTERVAL_S) if folder.uri else interval_s)
            try:
                is_stale |= has_changed()
                if is_stale:
                    phases += as_phases(new_phases.read())
                    records += new_records.read()
                    before, history = history, _continued(history, phases, records)
                    for news in _news(before, phases, records):
                        display.add(news)
                    phases, records, is_stale = [], [], False
            except (LaunchError, OSError) as error:  # the network may fail for a while
                display.print(f"{folder} cannot be read, the next attempt follows: {error}")
            display.notice(_notice(history, clock()))
    if lost:
        raise lost[0]
    if history.result is not None:
        show_result(dataclasses.replace(history, samples=read_samples(folder)), history.result, console)
    else:
        step, state = history.records[-1]["step"] if history.records else 0, run_state(history, clock())
        what = "for its result" if state == "finished" else "to continue"
        print_line(console, f"the run {_STATES.get(state, state)} at step {step}: run the same command again {what}")


def _changes(folder: RunFolder) -> Callable[[], bool]:
    """Return a function that returns whether the files of a run have changed since its last call."""
    if folder.uri is not None:
        return lambda: pull_changed(folder)
    before = _versions(folder)

    def has_changed() -> bool:
        nonlocal before
        before, last = _versions(folder), before
        return before != last

    return has_changed


def _versions(folder: RunFolder) -> list[tuple[int, int]]:
    """Return the modification times and sizes of the files that tell how far a run is."""
    versions = []
    files = (folder.metrics, folder.starts, folder.phases, folder.samples, folder.scores)
    for path in (folder.config, *files, folder.result):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            versions.append((found.st_mtime_ns, found.st_size))
    return versions


def _continued(history: RunHistory, phases: Sequence[Phase], records: Sequence[Record]) -> RunHistory:
    """Return the end of a history with further phases and records, and with the other files as they are now."""
    return dataclasses.replace(
        history,
        phases=[*history.phases, *phases][-RECENT_PHASES:],
        records=[*history.records, *records][-_NUM_RECORDS:],
        starts=read_starts(history.folder),
        result=read_result(history.folder),
    )


def _news(before: RunHistory, phases: Sequence[Phase], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the phases and records that the history before does not have, in the order of time."""
    new = [dataclasses.asdict(phase) for phase in phases if phase not in before.phases]
    new += [record for record in records if record not in before.records]
    return sorted(new, key=lambda line: line.get("time_s", 0.0))


def _is_over(history: RunHistory, now_s: float) -> bool:
    state = run_state(history, now_s)
    if state == "finished" and history.result is None:
        return now_s - last_seen_s(history) > _RESULT_WITHIN_S
    return state in ENDS


def _notice(history: RunHistory, now_s: float) -> str:
    """Return a text if the run has been silent for long."""
    state = run_state(history, now_s)
    return f"{state} for {age(now_s - last_seen_s(history))}" if state == "no sign of life" else ""
