"""From a configuration to a run that can start: the data is opened, Ray has the devices, and all fit each other."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import ray
from rich.console import Console

from owt_data import DataError, Progress, TokenData, load_tokenizer, same_tokenizer
from pretrain._config import PretrainConfig
from pretrain._data import find_stream, load_tokens, stream_tokens
from pretrain._errors import UsageError
from pretrain._resolve.devices import check_shares, connect, data_devices
from pretrain._resolve.length import check_length, has_same_length
from pretrain._resolve.microbatches import resolve_microbatches
from pretrain._resolve.origin import check_steps, resolve_anneal
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._resolve.settings import DataFacts, check_schedule, resolve_as_before, resolve_from_data, resolve_order
from pretrain._run.description import (
    Origin,
    RunDescription,
    check_same_data,
    check_same_settings,
    describe,
    describe_data,
)
from pretrain._run.folder import RunFolder
from pretrain._screen.printing import print_line
from ray_jax_launch import Hardware, latest_step


def resolve_settings(
    config: PretrainConfig, stored: RunDescription | None, origin: Origin | None, folder: RunFolder
) -> PretrainConfig:
    """Return the configuration with the settings that are known before the data is: for a run that continues, all.

    Args:
        config: the configuration.
        stored: the description of a run that continues; None for a new run.
        origin: the checkpoint or the weights that the run starts from, or None.
        folder: the run's folder.

    Raises:
        UsageError: settings do not fit each other, or one that changes the result is not that of the run.
    """
    config = resolve_anneal(resolve_order(config), origin)
    if stored is None:
        check_schedule(config)
        return config
    config = resolve_as_before(config, stored.config)
    check_same_settings(stored, config, folder)
    return config


@contextlib.contextmanager
def resolving(
    config: PretrainConfig,
    hardware: Hardware | None,
    folder: RunFolder,
    stored: RunDescription | None,
    origin: Origin | None,
    console: Console,
    *,
    report: Callable[[Progress], None] | None,
) -> Iterator[ResolvedRun]:
    """Open the data, connect to Ray, and resolve a run. The text of a stream is tokenized during the block.

    Args:
        config: the result of `resolve_settings`.
        hardware: the checked hardware; None takes the best of the cluster.
        folder: the run's folder.
        stored: the description of a run that continues; None for a new run.
        origin: the checkpoint or the weights that the run starts from, or None.
        console: shows the progress.
        report: gets the progress of a stream; None if the data is prepared.

    Raises:
        DataError: the data cannot be read, or training needs the tokenizer, and it cannot be loaded.
        UsageError: the data is not that of the run, or data, devices and settings do not fit each other.
        LaunchError: the devices are not in the cluster, or Ray cannot start.
    """
    with contextlib.ExitStack() as stack:
        if config.data_mode == "prepared":
            data = load_tokens(config, console)
            # Before Ray starts, which takes seconds.
            config = _resolve_data(config, data, stored, origin, folder, console)
            hardware = connect(config, hardware, console)
        else:
            assert report is not None, "a stream has one"
            stream = find_stream(config)
            hardware = connect(config, hardware, console)
            num_tasks = _num_tokenizing_tasks(config, hardware)
            data = stack.enter_context(stream_tokens(stream, config, console, num_tasks=num_tasks, report=report))
            config = _resolve_data(config, data, stored, origin, folder, console)
        if stored is None:
            config = resolve_microbatches(config, hardware, console)
        check_shares(config, data_devices(config, hardware))
        if stored is None:
            description = describe(config, describe_data(data, config.data_mode), str(hardware), origin)
        else:
            description = dataclasses.replace(stored, config=config)
        yield ResolvedRun(config=config, folder=folder, data=data, hardware=hardware, description=description)


def _resolve_data(
    config: PretrainConfig,
    data: TokenData,
    stored: RunDescription | None,
    origin: Origin | None,
    folder: RunFolder,
    console: Console,
) -> PretrainConfig:
    """Return the configuration with the values that follow from the data. Check the data and length of a known run."""
    _check_tokenizer(config, data, console)
    if stored is not None:
        check_same_data(stored, describe_data(data, config.data_mode), folder)
        if has_same_length(config, stored.config):
            return config
    elif origin is not None and origin.tokenizer is not None and not same_tokenizer(origin.tokenizer, data.tokenizer):
        raise UsageError(
            f"{config.data} must have tokens of {origin.tokenizer}, the tokenizer of {origin.place}, got "
            f"tokens of {data.tokenizer}. Give other --data or --tokenizer."
        )
    num_windows = 0 if config.data_mode == "stream" else data.train.num_windows(config.model.seq_len)
    config = resolve_from_data(config, DataFacts(data.tokenizer, data.vocab_size, num_windows))
    if stored is not None:
        check_length(config, stored.config, latest_step(folder.checkpoints) or 0)
    elif origin is not None:
        check_steps(config, origin.start_step)
    return config


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


def _num_tokenizing_tasks(config: PretrainConfig, hardware: Hardware) -> int | None:
    """Return the number of tasks that tokenize while the workers train, one for each other CPU; None without Ray."""
    if hardware.kind == "local":
        return None
    spare = max(1, int(ray.cluster_resources().get("CPU", 0)) - hardware.num_workers)
    return min(spare, config.prepare.num_processes or spare)
