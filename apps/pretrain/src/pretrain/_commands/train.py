"""The command `train`: from a configuration to a finished run."""

import contextlib
import dataclasses
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import ray_jax_launch
from pretrain._best_effort import best_effort
from pretrain._commands.verify_data import verified_data
from pretrain._config import PretrainConfig
from pretrain._data import find_stream, load_tokens
from pretrain._errors import UsageError, rejecting, shown
from pretrain._judge.check_tasks import check_tasks
from pretrain._output import log_lines
from pretrain._report.loss_picture import draw_losses
from pretrain._resolve.devices import given_hardware
from pretrain._resolve.length import has_same_length
from pretrain._resolve.origin import find_origin
from pretrain._resolve.resolve import resolve_settings, resolving
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._run.checkpoint_digests import roots
from pretrain._run.description import (
    RunDescription,
    check_same_data,
    check_same_source,
    describe_data,
    read_description,
    write_description,
)
from pretrain._run.files import read_text
from pretrain._run.folder import RunFolder, locate
from pretrain._run.history import (
    RunHistory,
    last_sign_of_life,
    read_history,
    read_recent,
    read_samples,
    summarize,
    write_end,
)
from pretrain._run.lock import lock_run
from pretrain._run.metrics import last_values, read_records, recent_records
from pretrain._run.names import run_name
from pretrain._run.result import RunResult, read_result, write_result
from pretrain._screen.display import Display
from pretrain._screen.ending import show_finished, show_result, show_stopped
from pretrain._screen.introduction import introduce
from pretrain._screen.run_view import RunView, Tokenizing
from pretrain._task_names import check_installed, parse_tasks
from pretrain._trackers.tracker import check_trackers
from pretrain._training.train_worker import train_worker
from ray_jax_launch import (
    Hardware,
    PermanentError,
    SavedCheckpoint,
    StopRequestedError,
    StoragePath,
    TrainingFailed,
    UnsavedCheckpointError,
    as_storage_path,
    check_local_resources,
    check_run_name,
    join_path,
    latest_step,
    newest_metadata,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of a training run."""

    metrics: dict[str, float]
    """The last value of each metric: step, epoch, tokens, loss, val_loss and others."""

    checkpoint: SavedCheckpoint | None
    """The newest checkpoint, with `step` and `path`; None if there is none."""

    folder: StoragePath
    """The run's folder or URI."""

    error: TrainingFailed | None
    """The failure that ended the training, or None. The same configuration continues from the checkpoint."""

    sample: str
    """A text from the trained model; empty if the training failed or the tokenizer is missing."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`, in the order of steps, for `pandas.DataFrame(result.history)`.

        They have step, tokens, time_s, loss, val_loss and others. A record lacks what is unknown at its step. Each use
        reads the file.
        """
        return read_records(locate(self.folder).metrics)


def train(config: PretrainConfig, *, console: Console | None = None, began_s: float | None = None) -> TrainResult:
    """Train a model, or continue an interrupted run.

    Args:
        config: the configuration.
        console: shows the progress and the result, as `rich.console.Console()` does; None shows nothing.
        began_s: Unix time at which the command began, before its imports; None for now.

    Raises:
        ValueError: the input is wrong, or the run's folder cannot be used; see `rejection` for the subclasses.
        OSError: a file cannot be read or written later.
        RunFailedError: the run has begun, and its storage, its text or its memory has failed. The same configuration
            continues it.
        KeyboardInterrupt: Ctrl-C. The run is saved, and the same configuration continues it.
        Exception: with `hardware="local"`, an exception of the loop of any other kind.
    """
    if not isinstance(config, PretrainConfig):
        raise UsageError(f"config must be a PretrainConfig, got {shown(config)}. Start from PRESETS['quickstart']().")
    if not isinstance(console, Console | None):
        raise UsageError(f"console must be a rich.console.Console or None, got {shown(console)}. Leave it out.")
    began_s = time.time() if began_s is None else began_s
    console = console or Console(quiet=True)
    hardware = given_hardware(config)
    check_trackers(config)
    config = checked_tasks(config)
    name = run_name(config)
    check_run_name(name)
    with contextlib.ExitStack() as stack:
        with rejecting():
            folder = stack.enter_context(lock_run(join_path(as_storage_path(config.storage_path), name)))
        stored = read_description(folder)
        origin = find_origin(config) if stored is None else stored.origin
        config = resolve_settings(config, stored, origin, folder)
        if (
            stored is not None
            and has_same_length(config, stored.config)
            and (result := read_result(folder)) is not None
        ):
            return _finished(config, stored, folder, name, result, console)
        tokenizing = Tokenizing() if config.data_mode == "stream" else None
        if hardware is not None:
            check_local_resources(hardware)  # before text is tokenized
        run = stack.enter_context(resolving(config, hardware, folder, stored, origin, console, report=tokenizing))
        write_description(folder, run.description)
        folder.delete_result()  # that of a run that is extended
        folder.push()
        before = None if stored is None else stored.config
        introduce(run.config, run.data, run.hardware, folder, origin, before, console)
        stack.enter_context(verified_data(run.data, config.verify_data, console, stop=ray_jax_launch.request_stop))
        view = _view(read_recent(folder, run.description), run.hardware, tokenizing, began_s)
        try:
            sample = _run_workers(run, name, view, console, began_s)
        except KeyboardInterrupt:
            show_stopped(folder.checkpoints, console)
            raise
        except TrainingFailed as error:
            write_end(folder, "failed", time.time())
            return _result(folder, run.description, error)
        folder.check_place()
        folder.pull()
        finished = write_result_and_picture(folder, name)
        folder.push(with_logs=True)
        outcome = _result(folder, run.description)
        history = dataclasses.replace(read_recent(folder, run.description), samples=read_samples(folder))
    show_result(history, finished, console, sample=sample)
    return outcome


def checked_tasks(config: PretrainConfig) -> PretrainConfig:
    """Return the configuration with absolute paths of the tasks' files: the workers have other working folders.

    Raises:
        UsageError: lm-eval is not installed, or there is no such task, or its file is wrong.
    """
    tasks = config.train.eval_tasks
    if not tasks:
        return config
    check_installed()
    check_tasks(tasks, option="train.eval_tasks")
    found: list[str] = []
    for task in parse_tasks(tasks):
        name = str(Path(task.name).absolute()) if task.is_path else task.name
        found.append(name if task.limit is None else f"{name}:{task.limit}")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, eval_tasks=tuple(found)))


def _run_workers(run: ResolvedRun, name: str, view: RunView, console: Console, began_s: float) -> str:
    """Run the training loop on the workers, and show it. Return the sample.

    Args:
        run: the run.
        name: its name.
        view: its state.
        console: shows it.
        began_s: Unix time at which the command began.

    Raises:
        TrainingFailed: the loop has failed too often, or with an error that a restart cannot mend.
        StopRequestedError: the run stopped by itself, and is saved.
        UnsavedCheckpointError: a checkpoint could not be saved.
    """
    config, hardware = run.config, run.hardware
    try:
        with Display(view, console, with_time=True) as display, log_lines(display.print):
            result = ray_jax_launch.launch(
                train_worker,
                {"resolved": run, "began_s": began_s},
                hardware=hardware,
                storage_path=as_storage_path(config.storage_path),
                name=name,
                on_metrics=lambda rank, metrics: display.add(metrics),
                on_event=display.add_event,
                data_cpus=0 if hardware.kind == "local" else hardware.data_cpus,
                env_vars=run.worker_variables,
                max_failures=config.train.max_failures,
                wait_for_resources_s=config.wait_for_resources_s,
                hang_timeout_s=config.train.hang_timeout_s,
            )
    except (StopRequestedError, UnsavedCheckpointError):
        raise  # `lock_run` makes it a failure of the run
    except PermanentError as error:  # of a loop in this process
        raise TrainingFailed(str(error), 0, traceback.format_exc(), "") from error
    return str(result.return_value)


def write_result_and_picture(folder: RunFolder, name: str) -> RunResult:
    """Write `result.json`, which marks the run as finished, then `loss.png`, which the next start can draw too.

    Args:
        folder: the run's folder.
        name: the title of the picture.
    """
    history = read_history(folder)
    metadata = newest_metadata(folder.checkpoints)
    result = summarize(history, digests=roots(metadata) if metadata else None)
    write_result(folder, result)
    _draw(history, name)
    return result


def _finished(
    config: PretrainConfig,
    stored: RunDescription,
    folder: RunFolder,
    name: str,
    result: RunResult,
    console: Console,
) -> TrainResult:
    """Return the result of a run that is finished already. A picture that a kill has prevented is drawn.

    Raises:
        UsageError: the data differs from that of the run.
        DataError: the data cannot be read.
    """
    if config.data_mode == "prepared":
        check_same_data(stored, describe_data(load_tokens(config, console), config.data_mode), folder)
    else:
        text = find_stream(config)
        check_same_source(stored, text.sha256, text.options, folder)
    write_description(folder, stored)
    if not folder.loss_picture.exists():
        _draw(read_history(folder), name)
    folder.push()
    show_finished(read_recent(folder, stored), result, console)
    return _result(folder, stored)


def _draw(history: RunHistory, name: str) -> None:
    with best_effort(f"the picture {history.folder.loss_picture}"):
        draw_losses(history, name)


def _view(history: RunHistory, hardware: Hardware, tokenizing: Tokenizing | None, began_s: float) -> RunView:
    """Return the state of a run that starts, or that continues after its last sign of life."""
    view = RunView.of(history, is_local=hardware.kind == "local", tokenizing=tokenizing)
    if (stopped_s := last_sign_of_life(history.phases, history.records)) is not None:
        view.enter("stopped", stopped_s)
    view.num_restarts = len(history.starts)
    view.enter("starting", began_s)
    return view


def _result(folder: RunFolder, description: RunDescription, error: TrainingFailed | None = None) -> TrainResult:
    """Read the result of a run from its files."""
    step = latest_step(folder.checkpoints)
    sample = ""
    if error is None and folder.sample.is_file():  # a run without a tokenizer has no sample
        with best_effort(f"the sample {folder.sample}"):
            sample = read_text(folder.sample)
    records, result = recent_records(folder.metrics, description.config.train.eval_every), read_result(folder)
    return TrainResult(
        metrics=(result.metrics if result is not None else {}) | last_values(records),
        checkpoint=None if step is None else SavedCheckpoint(folder.checkpoints, step),
        folder=folder.uri or folder.path,
        error=error,
        sample=sample,
    )
