"""The command `train`: from a configuration to a finished run."""

import dataclasses
import time

from rich.console import Console

import ray_jax_launch
from nnx_gpt2 import check_mesh
from owt_data import DataError, TokenData, load_tokenizer
from pretrain._commands.progress_display import ProgressDisplay
from pretrain._config import PretrainConfig
from pretrain._conveniences import convenience
from pretrain._data import data_label, load_tokens
from pretrain._errors import UsageError
from pretrain._run.description import (
    check_same_data,
    check_same_settings,
    describe,
    describe_data,
    read_description,
    write_description,
)
from pretrain._run.folder import RunFolder, claim
from pretrain._run.report import RunResult, read_result, write_report
from pretrain._training.entry import train_worker
from ray_jax_launch import Hardware, as_storage_path, join_path, newest_metadata, parse_hardware

# The training windows are read by tasks of Ray Data, which need a CPU beside the workers'.
DATA_CPUS = 1
# TPU chips of these generations are two devices each to jax; of the others, one.
_DEVICES_PER_CHIP: dict[str | None, int] = {"TPU-V2": 2, "TPU-V3": 2, "TPU-V7X": 2}


def train(config: PretrainConfig, console: Console, *, vocab_size_given: bool = False) -> None:
    """Train a model, or continue a run that was interrupted.

    Args:
        config: what to do.
        console: where progress and the result are shown.
        vocab_size_given: the user set `model.vocab_size`; otherwise it follows the tokenizer.

    Raises:
        ValueError: a subclass that says what is wrong with the input.
        TrainingFailed: workers failed too often.
    """
    began = time.monotonic()
    hardware = None if config.hardware == "auto" else parse_hardware(config.hardware)
    if hardware is not None:
        check_batch(config, hardware)
    name = config.name or f"{config.preset}-{data_label(config.data)}"
    storage_path = as_storage_path(config.storage_path)
    with claim(join_path(storage_path, name)) as folder:
        stored = read_description(folder)
        if stored is not None:
            if not vocab_size_given:
                config = _with_vocab_size(config, stored.config.model.vocab_size)
            check_same_settings(stored, config, folder)
        data = load_tokens(config, console)
        _look_for_tokenizer(config, data, console)
        config = _fit_vocabulary(config, data, vocab_size_given)
        tokens = describe_data(data)
        if stored is not None:
            check_same_data(stored, tokens, folder)
        if (result := read_result(folder)) is not None and stored is not None:
            write_description(folder, stored)
            _say_finished(folder, result, console)
            return
        console.print("starting Ray", highlight=False)
        ray_jax_launch.connect(hardware)
        if hardware is None:
            hardware = ray_jax_launch.auto()
            check_batch(config, hardware)
        wait_s = config.wait_for_resources_s
        ray_jax_launch.check_resources(hardware, data_cpus=DATA_CPUS, wait_for_resources_s=wait_s)
        description = stored or describe(config, tokens, str(hardware))
        write_description(folder, description)
        folder.push()
        _introduce(config, data, hardware, folder, console)
        with ProgressDisplay(config.train.max_steps, console) as progress:
            result = ray_jax_launch.launch(
                train_worker,
                {"config": config, "data": data, "folder": folder, "description": description},
                hardware=hardware,
                storage_path=storage_path,
                name=name,
                on_metrics=lambda rank, record: progress.show(record),
                data_cpus=DATA_CPUS,
                max_failures=config.train.max_failures,
                wait_for_resources_s=wait_s,
            )
        folder.pull()
        report = write_report(folder, name, wall_s=time.monotonic() - began)
        sample = str(result.return_value)
        with convenience(f"the sample {folder.sample}"):
            folder.sample.write_text(sample)
        folder.push()
        _say_done(folder, report, sample, console)


def check_batch(config: PretrainConfig, hardware: Hardware) -> None:
    """Reject a mesh that the devices cannot form, and a batch that does not divide over them, before the launch.

    Args:
        config: the run's.
        hardware: what it is to run on, of each size where it is elastic.

    Raises:
        UsageError: the mesh or the batch does not fit; for the mesh, in the words of `nnx_gpt2.check_mesh`.
    """
    batch_size, parts, mesh = config.train.global_batch_size, config.train.grad_accum_steps, config.mesh
    per_worker = hardware.devices_per_worker * _DEVICES_PER_CHIP.get(hardware.accelerator_type, 1)
    for num_workers in hardware.worker_counts:
        num_devices = num_workers * per_worker
        num_slices = num_workers // hardware.workers_per_slice if hardware.kind == "tpu" else 1
        try:
            check_mesh(
                fsdp=mesh.fsdp,
                tensor=mesh.tensor,
                num_devices=num_devices,
                devices_per_process=per_worker,
                devices_per_slice=num_devices // num_slices if num_slices > 1 else None,
            )
        except ValueError as error:
            raise UsageError(f"--hardware {hardware}: {error}") from None
        num_shares = num_devices // mesh.tensor
        if batch_size % (num_shares * parts):
            of_each = f" times the train.grad_accum_steps, {parts}" if parts > 1 else ""
            raise UsageError(
                f"train.global_batch_size must be a multiple of the {num_shares} devices of {hardware} that share it"
                f"{of_each}, got {batch_size}. Change it, or --hardware."
            )


def _look_for_tokenizer(config: PretrainConfig, data: TokenData, console: Console) -> None:
    """Say now what will be missing at the end. Only attention within documents needs the tokenizer to train.

    Raises:
        DataError: it is needed, and cannot be had.
    """
    try:
        load_tokenizer(data.tokenizer)
    except DataError as error:
        if config.train.mask_documents:
            raise
        console.print(f"there will be no sample at the end: {error}", highlight=False, soft_wrap=True, markup=False)


def _fit_vocabulary(config: PretrainConfig, data: TokenData, given: bool) -> PretrainConfig:
    """Give the model the tokenizer's vocabulary, unless the user asked for a larger one."""
    if given and config.model.vocab_size < data.vocab_size:
        raise UsageError(
            f"--model.vocab-size must be at least {data.vocab_size}, which the tokenizer {data.tokenizer} has, got "
            f"{config.model.vocab_size}. Leave it out to take the tokenizer's."
        )
    return config if given else _with_vocab_size(config, data.vocab_size)


def _with_vocab_size(config: PretrainConfig, vocab_size: int) -> PretrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def _introduce(
    config: PretrainConfig, data: TokenData, hardware: Hardware, folder: RunFolder, console: Console
) -> None:
    model = config.model
    metadata = newest_metadata(folder.checkpoints)  # the workers verify the rest, and say so if they begin earlier
    doing = "training" if metadata is None else f"continuing from step {metadata['record']['step']}:"
    console.print(
        f"{doing} {model.num_layers} layers of width {model.embed_dim}, context {model.seq_len}, on {hardware}\n"
        f"{len(data.train):,} tokens to train on, {len(data.val):,} to validate on ({data.tokenizer})\n"
        f"run folder: {folder}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _say_done(folder: RunFolder, result: RunResult, sample: str, console: Console) -> None:
    if sample:
        console.rule("sample")
        console.print(sample, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    console.print(
        f"done in {result.wall_s:.0f} s: {result.summary()}\n"
        f"run folder: {folder}\n"
        f"more text: uv run apps/pretrain sample {folder}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _say_finished(folder: RunFolder, result: RunResult, console: Console) -> None:
    console.print(
        f"the run in {folder} is finished: {result.summary()}; choose another --name for a new one",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
