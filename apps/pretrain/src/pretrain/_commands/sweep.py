"""The command `sweep`: several runs, one after the other or some at once.

Each run is a process of its own with the command `train`: nothing of it stays in memory, its failure is its own, and
its folder is that of the command given alone. With Ray, this process starts one cluster, which all runs join. All runs
share the user's cache of compiled programs.
"""

import dataclasses
import fnmatch
import glob
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

import ray_jax_launch
from pretrain._commands.runs import show_runs
from pretrain._compare.comparison import OF_WINDOWS
from pretrain._compare.paired import MIN_STEPS
from pretrain._config import PretrainConfig
from pretrain._data import find_stream, find_texts, open_prepared
from pretrain._early_interrupt import CHILD, keeping_handlers
from pretrain._errors import UsageError, one_line, short
from pretrain._formats import duration, loss
from pretrain._resolve.devices import given_hardware
from pretrain._resolve.length import has_same_length, lengths_of
from pretrain._resolve.resolve import resolve_settings
from pretrain._resolve.settings import resolve_order
from pretrain._run.description import RunDescription, read_description
from pretrain._run.differences import changes_result, differing_options, option_values
from pretrain._run.find import DEFAULT_STORAGE
from pretrain._run.folder import RunFolder, locate
from pretrain._run.lock import command_runs
from pretrain._run.names import run_name
from pretrain._run.remote_copy import pull_changed, reader_copy
from pretrain._run.result import read_result
from pretrain._screen.ending import as_typed
from pretrain._screen.printing import print_line, waiting
from pretrain._surroundings.typed_command import application
from pretrain._trackers.tracker import check_trackers
from ray_jax_launch import as_storage_path, check_run_name, cpu, is_uri, join_path, parse_hardware

_INTERRUPTED = 130
_POLL_S = 0.5
_MOST_REPORTED = 12


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """A run of a sweep."""

    name: str
    """Its name."""

    config: PretrainConfig
    """Its configuration."""

    arguments: Sequence[str]
    """The arguments of `train` that give the configuration."""

    @cached_property
    def folder(self) -> RunFolder:
        """The run's folder, or for a run in object storage a copy of its texts."""
        place = join_path(as_storage_path(self.config.storage_path), self.name)
        return reader_copy(str(place)) if is_uri(place) else locate(place)

    def read(self) -> RunDescription | None:
        """Read the description of the run; None if it has not started."""
        if self.folder.uri is not None:
            pull_changed(self.folder)
        return read_description(self.folder)


def plan_sweep(configs: Sequence[PretrainConfig], arguments: Sequence[Sequence[str]]) -> list[SweptRun]:
    """Check the configurations of a sweep, and return its runs. The devices of `local` hardware are not looked at.

    Args:
        configs: a configuration for each run, without a name.
        arguments: the arguments of `train` that give each configuration.

    Raises:
        UsageError: two runs have the same name, or a configuration cannot be trained.
        DataError: a text does not exist, or the tokens cannot be read.
    """
    runs = [
        SweptRun(name=run_name(config), config=config, arguments=words)
        for config, words in zip(configs, arguments, strict=True)
    ]
    name, number = Counter(run.name for run in runs).most_common(1)[0]
    if number > 1:
        raise UsageError(
            f"the runs of a grid must have different names, got {short(name)} for {number} of them. A name has each "
            "option that changes the result, but not the length, and of the data its label. Vary other options."
        )
    for run in runs:
        check_run_name(run.name)
        check_trackers(run.config)
        resolve_order(run.config)
        if run.config.hardware != "local":  # its devices would be taken from the runs
            given_hardware(run.config)
    for config in {(run.config.data, run.config.prepare, run.config.data_mode): run.config for run in runs}.values():
        if config.data_mode == "stream":
            find_stream(config)
        elif open_prepared(config) is None:
            find_texts(config)
    return runs


def show_commands(runs: Sequence[SweptRun], console: Console) -> None:
    """Print the name and the command of each run."""
    for run in runs:
        print_line(console, f"{run.name}: {application()} {shlex.join(run.arguments)}")


def sweep(runs: Sequence[SweptRun], *, parallel: int = 1, console: Console) -> list[str]:
    """Train the runs of a sweep: skip those that are finished, and continue those that have begun.

    Args:
        runs: the result of `plan_sweep`.
        parallel: runs at once.
        console: shows a line at the start and the end of each run, and then the table of the runs.

    Returns:
        The names of the runs that have failed. The same sweep continues them.

    Raises:
        UsageError: a run of the same name has other settings, or the hardware is not that of one run.
        LaunchError: Ray cannot start.
        KeyboardInterrupt: Ctrl-C. The runs are saved.
    """
    open_runs = [run for run in runs if not _is_finished(run)]
    print_line(console, f"{len(runs)} runs, {len(runs) - len(open_runs)} of them finished")
    workers = _Workers(len(runs), len(runs) - len(open_runs), console)
    if open_runs:
        workers.run(open_runs, parallel, _cluster(open_runs[0].config, parallel, console))
    _show_results(runs, console)
    return workers.failed


def _is_finished(run: SweptRun) -> bool:
    """Return whether a run is finished, and was trained on the same data.

    Raises:
        UsageError: the run has other settings, or is damaged.
    """
    stored = run.read()
    if stored is None:
        return False
    config = resolve_settings(run.config, stored, stored.origin, run.folder)
    # It was extended since.
    is_longer = lengths_of(config)[1:] == (None, None) and stored.config.train.max_steps > config.train.max_steps
    if not (has_same_length(config, stored.config) or is_longer) or read_result(run.folder) is None:
        return False
    values, before = option_values(config), option_values(stored.config)
    of_data = [name for name in values if name == "data" or (name.startswith("prepare.") and changes_result(name))]
    return all(values[name] == before[name] for name in of_data)


def _cluster(config: PretrainConfig, parallel: int, console: Console) -> dict[str, str]:
    """Start Ray for all runs, unless they do without or `RAY_ADDRESS` names a cluster. Return variables of the runs.

    Raises:
        UsageError: the devices of one run are not known.
        LaunchError: Ray cannot start.
    """
    if config.hardware == "auto" and parallel > 1:
        raise UsageError(
            "hardware must be the devices of one run with --parallel, got auto, which takes all. Give --hardware "
            "local, cpu:1 or gpu:1."
        )
    if config.hardware == "local" or os.environ.get("RAY_ADDRESS", "local") != "local":
        return {}
    hardware = cpu(1) if config.hardware == "auto" else parse_hardware(config.hardware)
    with waiting(console, "starting Ray for all runs"), keeping_handlers():
        # Devices are found on the machine. CPUs of Ray are a number, to be large enough for all runs.
        ray_jax_launch.connect(cpu(parallel * (hardware.num_workers + hardware.data_cpus)), dashboard=config.dashboard)
    if config.dashboard:
        print_line(console, f"dashboard: {ray_jax_launch.dashboard_url()}")
    return ray_jax_launch.joining_variables()


class _Workers:
    """The processes of the runs of a sweep."""

    def __init__(self, num_runs: int, num_finished: int, console: Console) -> None:
        self.failed: list[str] = []
        self._num_runs, self._num_done, self._console = num_runs, num_finished, console
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_stopping = False

    def run(self, runs: Sequence[SweptRun], parallel: int, variables: Mapping[str, str]) -> None:
        """Train runs, some at once, and note those that have failed.

        Raises:
            KeyboardInterrupt: Ctrl-C. The runs are saved.
        """
        with ThreadPoolExecutor(parallel) as threads, _shown_lines(self._console) as show:
            futures = [threads.submit(self._train, run, variables, show) for run in runs]
            try:
                wait(futures)
            except KeyboardInterrupt:
                while True:
                    self._interrupt()
                    try:
                        wait(futures)
                        break
                    except KeyboardInterrupt:  # a second one, for the runs too
                        continue
                raise
            for future in futures:
                future.result()

    def _interrupt(self) -> None:
        with self._lock:
            self._is_stopping = True
            for process in self._processes:
                process.send_signal(signal.SIGINT)

    def _train(self, run: SweptRun, variables: Mapping[str, str], show: Callable[[str, str | None], None]) -> None:
        """Train a run in a process."""
        began_s = time.monotonic()
        while command_runs(run.folder):  # such as a run that is being saved after the sweep was killed
            if self._is_stopping:
                return
            show(run.name, "another command uses the run: waiting for its end")
            time.sleep(_POLL_S)
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with self._lock:
                if self._is_stopping:
                    return
                print_line(self._console, f"{run.name}: started")
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", CHILD, *run.arguments],
                    env=os.environ | variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for this process, which interrupts the runs once
                )
                self._processes.add(process)
            assert process.stdout is not None, "it is a pipe"
            assert process.stdin is not None, "it is a pipe"
            for line in process.stdout:
                show(run.name, line.strip())
            code = process.wait()
            process.stdin.close()
            process.stdout.close()
            errors.seek(0)
            text = errors.read().strip()
        show(run.name, None)
        with self._lock:
            self._processes.remove(process)
            self._end(run, code, text, time.monotonic() - began_s)

    def _end(self, run: SweptRun, code: int, errors: str, seconds: float) -> None:
        """Print the end of a run."""
        if code == _INTERRUPTED:
            end = "stopped and saved"
        elif code:
            self.failed.append(run.name)
            cause = errors.splitlines()[-1] if errors else f"its process ended with code {code}"
            end = f"failed: {one_line(cause.removeprefix('error: '))}"
        else:
            self._num_done += 1
            result = read_result(run.folder) if run.read() is not None else None
            found = None if result is None else (result.full_val_loss or result.last_val_loss)
            end = f"finished in {duration(seconds)}{'' if found is None else f', validation loss {loss(found)}'}"
        print_line(self._console, f"{run.name}: {end} ({self._num_done} of {self._num_runs} finished)")


@contextmanager
def _shown_lines(console: Console) -> Iterator[Callable[[str, str | None], None]]:
    """Yield a function that shows the last line of a run on a terminal. None removes the run."""
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = dict[str, Any]()

        def show(name: str, line: str | None) -> None:
            if line is None:
                if name in tasks:
                    bar.remove_task(tasks.pop(name))
            elif name not in tasks:
                tasks[name] = bar.add_task(f"{name}  {line}", total=None)
            elif line:
                bar.update(tasks[name], description=f"{name}  {line}")

        yield show


def _show_results(runs: Sequence[SweptRun], console: Console) -> None:
    """Print the table of the runs that have begun, and commands for them."""
    begun = [run for run in runs if run.folder.config.exists() or run.read() is not None]
    if not begun:
        return
    storage_path = runs[0].config.storage_path
    show_runs(storage_path, [run.name for run in begun], sort="val", console=console)
    groups: dict[PretrainConfig, list[SweptRun]] = {}
    for run in begun:
        groups.setdefault(dataclasses.replace(run.config, seed=0), []).append(run)
    folders = matching_folders(begun)
    if len(folders) > 1:
        folders = [folder for group in groups.values() for folder in matching_folders(group)]
    print_line(console, f"{application()} report {' '.join(map(as_typed, folders[:_MOST_REPORTED]))}")
    if len(groups) < len(begun):
        place = [] if storage_path == str(DEFAULT_STORAGE) else [storage_path]
        words = shlex.join([*place, *(folder.name for folder in folders)])
        print_line(console, f"{application()} runs {words} --group-by seed")
    if (best := best_settings([*groups.values()])) is not None:
        sides = (" ".join(map(as_typed, matching_folders(group))) for group in best)
        print_line(console, f"{application()} compare {(' --against ' if len(best[0]) > 1 else ' ').join(sides)}")


def matching_folders(runs: Sequence[SweptRun]) -> list[RunFolder]:
    """Return one folder whose name is a pattern of these runs and of no other one beside them, or each folder."""
    names, place = [run.name for run in runs], runs[0].folder.path.parent
    if len(runs) == 1 or runs[0].folder.uri is not None or glob.has_magic(str(place)):
        return [run.folder for run in runs]
    pattern = f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - of names, not of paths
    is_exact = {*fnmatch.filter((path.name for path in place.iterdir()), pattern)} == {*names}
    return [RunFolder(place / pattern)] if is_exact else [run.folder for run in runs]


def best_settings(groups: Sequence[Sequence[SweptRun]]) -> tuple[Sequence[SweptRun], Sequence[SweptRun]] | None:
    """Return the two groups of seeds with the lowest mean loss, the best first; None if `compare` would reject them."""
    losses: list[tuple[float, int]] = []
    for number, group in enumerate(groups):
        results = [result for run in group if (result := read_result(run.folder)) is not None]
        values = [value for one in results if (value := one.full_val_loss or one.last_val_loss) is not None]
        if len(values) == len(group) and min(one.steps or 0 for one in results) >= MIN_STEPS:
            losses.append((statistics.fmean(values), number))
    if len(losses) < 2:
        return None
    first, second = (groups[number] for _, number in sorted(losses)[:2])
    differing = differing_options([first[0].config, second[0].config])
    is_of_windows = any(name in (*OF_WINDOWS, "data") or name.startswith("prepare.") for name in differing)
    return None if is_of_windows or len(first) != len(second) else (first, second)
