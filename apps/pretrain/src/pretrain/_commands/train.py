"""The command `train`: from a configuration to a finished run."""

import contextlib
import time
import traceback
from dataclasses import dataclass
from typing import Any

import ray
from rich.console import Console

import ray_jax_launch
from owt_data import DataError, TokenData, load_tokenizer
from pretrain._best_effort import best_effort
from pretrain._commands.check_devices import (
    check_batch,
    check_shares,
    data_devices,
    resolve_microbatches,
    with_microbatches,
)
from pretrain._commands.verify_data import verified_data
from pretrain._config import (
    PretrainConfig,
    check_vocabulary,
    with_length,
    with_max_steps,
    with_stream_order,
    with_vocab_size,
)
from pretrain._data import find_stream, load_tokens, stream_tokens
from pretrain._data_names import label_of, parse_data
from pretrain._early_interrupt import keeping_handlers
from pretrain._errors import UsageError, rejecting, shown
from pretrain._output import log_lines
from pretrain._report.loss_picture import draw_losses
from pretrain._run.description import (
    RunDescription,
    check_same_data,
    check_same_settings,
    describe,
    describe_data,
    read_description,
    write_description,
)
from pretrain._run.files import read_lines, read_text
from pretrain._run.folder import RunFolder
from pretrain._run.history import RunHistory, last_sign_of_life, read_history, summarize, write_end
from pretrain._run.lock import lock_run
from pretrain._run.metrics import last_values
from pretrain._run.result import RunResult, read_result, write_result
from pretrain._screen.display import Display
from pretrain._screen.ending import show_finished, show_result, show_stopped
from pretrain._screen.introduction import introduce
from pretrain._screen.printing import print_line
from pretrain._screen.run_view import RunView
from pretrain._screen.tokenizing import Tokenizing
from pretrain._screen.waiting import waiting
from pretrain._trackers.tracker import check_trackers
from pretrain._training import train_worker
from ray_jax_launch import (
    Hardware,
    PermanentError,
    SavedCheckpoint,
    StopRequestedError,
    StoragePath,
    TrainingFailed,
    UnsavedCheckpointError,
    as_storage_path,
    check_run_name,
    join_path,
    latest_step,
    parse_hardware,
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


def train(config: PretrainConfig, *, console: Console | None = None) -> TrainResult:
    """Train a model, or continue an interrupted run.

    Args:
        config: the configuration.
        console: shows the progress and the result, as `rich.console.Console()` does; None shows nothing.

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
    began, began_s, console = time.monotonic(), time.time(), console or Console(quiet=True)
    hardware = None if config.hardware == "auto" else parse_hardware(config.hardware)
    if hardware is not None:
        check_batch(config, hardware)
    check_trackers(config)
    if config.data_mode == "stream":
        config = with_stream_order(config)
    name = config.name or f"{config.preset}-{label_of(parse_data(config.data))}"
    check_run_name(name)
    with contextlib.ExitStack() as stack:
        with rejecting():
            folder = stack.enter_context(lock_run(join_path(as_storage_path(config.storage_path), name)))
        stored = read_description(folder)
        if stored is not None:
            config = _resolve_as_before(config, stored.config)
            check_same_settings(stored, config, folder)
            if (result := read_result(folder)) is not None:
                return _finished(config, stored, folder, name, result, console)
        tokenizing = None
        if config.data_mode == "prepared":
            data = load_tokens(config, console)
            config = _resolve_data(config, data, stored, folder, console)
            hardware = _start_ray(config, hardware, console)
        else:
            stream, tokenizing = find_stream(config), Tokenizing()
            hardware = _start_ray(config, hardware, console)
            num_tasks = _num_tokenizing_tasks(config, hardware)
            data = stack.enter_context(stream_tokens(stream, config, console, num_tasks=num_tasks, report=tokenizing))
            config = _resolve_data(config, data, stored, folder, console)
        num_devices = data_devices(config, hardware)
        if stored is None:
            config = with_microbatches(config, num_devices)
        check_shares(config, num_devices)
        description = stored or describe(config, describe_data(data, config.data_mode), str(hardware))
        write_description(folder, description)
        folder.push()
        introduce(config, data, hardware, folder, console)
        stack.enter_context(verified_data(data, config.verify_data, console, stop=ray_jax_launch.request_stop))
        arguments = {
            "config": config,
            "data": data,
            "folder": folder,
            "description": description,
            # Tasks of Ray Data read ahead by megabytes, which a stream does not have yet.
            "uses_ray_data": hardware.kind != "local" and config.data_mode == "prepared",
            "began_s": began_s,
        }
        view = _view(read_history(folder), hardware, tokenizing, began_s)
        try:
            sample = _run_workers(arguments, hardware, name, view, console)
        except KeyboardInterrupt:
            show_stopped(folder.checkpoints, console)
            raise
        except TrainingFailed as error:
            write_end(folder, "failed", time.time())
            return _result(folder, error)
        folder.check_place()
        folder.pull()
        finished = write_result_and_picture(folder, name, wall_s=time.monotonic() - began)
        folder.push(with_logs=True)
        history, outcome = read_history(folder), _result(folder)
    show_result(history, finished, console, sample=sample)
    return outcome


def _resolve_as_before(config: PretrainConfig, stored: PretrainConfig) -> PretrainConfig:
    """Return the configuration with the values that followed from the data and the devices of the first start."""
    config = resolve_vocabulary(config, stored.model.vocab_size)
    return resolve_microbatches(resolve_length(config, stored), stored)


def _resolve_data(
    config: PretrainConfig, data: TokenData, stored: RunDescription | None, folder: RunFolder, console: Console
) -> PretrainConfig:
    """Return the configuration with the values that follow from the data, or check the data of a continued run.

    Raises:
        DataError: training needs the tokenizer, and it cannot be loaded.
        UsageError: the data differs from that of the run, or does not fit the vocabulary or the schedule.
    """
    _check_tokenizer(config, data, console)
    config = resolve_vocabulary(config, data.vocab_size)
    check_vocabulary(config, data.tokenizer, data.vocab_size)
    if stored is not None:
        check_same_data(stored, describe_data(data, config.data_mode), folder)
        return config
    config = with_length(config, num_windows=data.train.num_windows(config.model.seq_len))
    _check_schedule(config)
    return config


def _run_workers(arguments: dict[str, Any], hardware: Hardware, name: str, view: RunView, console: Console) -> str:
    """Run the training loop on the workers, and show it. Return the sample.

    Args:
        arguments: those of the loop.
        hardware: the checked hardware.
        name: the name of the run.
        view: the state of the run.
        console: shows the run.

    Raises:
        TrainingFailed: the loop has failed too often, or with an error that a restart cannot mend.
        StopRequestedError: the run stopped by itself, and is saved.
        UnsavedCheckpointError: a checkpoint could not be saved.
    """
    config: PretrainConfig = arguments["config"]
    try:
        with Display(view, console) as display, log_lines(display.print):
            result = ray_jax_launch.launch(
                train_worker,
                arguments,
                hardware=hardware,
                storage_path=as_storage_path(config.storage_path),
                name=name,
                on_metrics=lambda rank, metrics: display.add(metrics),
                on_event=display.add_event,
                data_cpus=0 if hardware.kind == "local" else hardware.data_cpus,
                max_failures=config.train.max_failures,
                wait_for_resources_s=config.wait_for_resources_s,
            )
    except (StopRequestedError, UnsavedCheckpointError):
        raise  # `lock_run` makes it a failure of the run
    except PermanentError as error:  # of a loop in this process
        raise TrainingFailed(str(error), 0, traceback.format_exc(), "") from error
    return str(result.return_value)


def resolve_vocabulary(config: PretrainConfig, vocab_size: int | None) -> PretrainConfig:
    """Return the configuration with this vocabulary size, unless the user has set one."""
    return config if vocab_size is None or config.model.vocab_size is not None else with_vocab_size(config, vocab_size)


def resolve_length(config: PretrainConfig, stored: PretrainConfig) -> PretrainConfig:
    """Return the configuration with the steps of the continued run, if its epochs or its tokens give the steps."""
    given = (config.train.max_epochs, config.train.max_tokens)
    return config if given == (None, None) else with_max_steps(config, stored.train.max_steps)


def write_result_and_picture(folder: RunFolder, name: str, *, wall_s: float) -> RunResult:
    """Write `result.json`, which marks the run as finished, then `loss.png`, which the next start can draw too.

    Args:
        folder: the run's folder.
        name: the title of the picture.
        wall_s: seconds from the start of the last command.
    """
    history = read_history(folder)
    result = summarize(history, wall_s=wall_s)
    write_result(folder, result)
    _draw(history, name)
    return result


def _start_ray(config: PretrainConfig, hardware: Hardware | None, console: Console) -> Hardware:
    """Connect to the cluster or start one, unless this process trains. Return the checked hardware."""
    if hardware is not None and hardware.kind == "local":
        return hardware
    with waiting(console, "starting Ray"), keeping_handlers():
        ray_jax_launch.connect(hardware, dashboard=config.dashboard)
    if config.dashboard:
        print_line(console, f"dashboard: {ray_jax_launch.dashboard_url()}")
    if hardware is None:
        hardware = ray_jax_launch.auto()
        check_batch(config, hardware)
    ray_jax_launch.check_resources(
        hardware,
        # Tasks of Ray Data read the training windows, or tasks tokenize text.
        data_cpus=hardware.data_cpus,
        wait_for_resources_s=config.wait_for_resources_s,
    )
    return hardware


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
        UsageError: the data differs from that of the run. All text of a stream would be read to find out.
    """
    if config.data_mode == "prepared":
        check_same_data(stored, describe_data(load_tokens(config, console), config.data_mode), folder)
    write_description(folder, stored)
    history = read_history(folder)
    if not folder.loss_picture.exists():
        _draw(history, name)
    folder.push()
    show_finished(history, result, console)
    return _result(folder)


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


def _num_tokenizing_tasks(config: PretrainConfig, hardware: Hardware) -> int | None:
    """Return the number of tasks that tokenize while the workers train, one for each other CPU; None without Ray."""
    if hardware.kind == "local":
        return None
    spare = max(1, int(ray.cluster_resources().get("CPU", 0)) - hardware.num_workers)
    return min(spare, config.prepare.num_processes or spare)


def _check_tokenizer(config: PretrainConfig, data: TokenData, console: Console) -> None:
    """Check that the tokenizer can be loaded. Training needs it only to mask documents; the sample at the end needs it.

    Raises:
        DataError: training needs the tokenizer, and it cannot be loaded.
    """
    try:
        load_tokenizer(data.tokenizer)
    except DataError as error:
        if config.train.mask_documents:
            raise
        print_line(console, f"the run will end without a sample: {error}")


def _check_schedule(config: PretrainConfig) -> None:
    if config.optimizer.schedule == "wsd":
        try:
            config.optimizer.wsd_decay_steps(config.train.max_steps)
        except ValueError as error:
            raise UsageError(str(error)) from None


def _result(folder: RunFolder, error: TrainingFailed | None = None) -> TrainResult:
    """Read the result of a run from its files."""
    step = latest_step(folder.checkpoints)
    sample = ""
    if error is None and folder.sample.is_file():  # a run without a tokenizer has no sample
        with best_effort(f"the sample {folder.sample}"):
            sample = read_text(folder.sample)
    return TrainResult(
        metrics=last_values(read_lines(folder.metrics)),
        checkpoint=None if step is None else SavedCheckpoint(folder.checkpoints, step),
        folder=folder.uri or folder.path,
        error=error,
        sample=sample,
    )
