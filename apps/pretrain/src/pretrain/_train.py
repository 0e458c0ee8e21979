"""The command `train`: from a configuration to a finished run."""

import dataclasses
import json
import time
from pathlib import Path

from rich.console import Console

import ray_jax_launch
from owt_data import TokenData
from pretrain._config import PretrainConfig
from pretrain._data import data_label, load_tokens
from pretrain._errors import UsageError
from pretrain._progress import ProgressDisplay
from pretrain._report import write_report
from pretrain._run import RunFolder, check_layout, check_same_data, check_same_settings, claim, describe, write_json
from pretrain._worker import train_worker
from ray_jax_launch import Hardware, LaunchError, is_uri, join_path, latest_step, parse_hardware

# The training windows are read by tasks of Ray Data, which need a CPU beside the workers'.
DATA_CPUS = 1


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
    storage_path = config.storage_path if is_uri(config.storage_path) else Path(config.storage_path).expanduser()
    with claim(str(join_path(storage_path, name))) as folder:
        stored = json.loads(folder.config.read_text()) if folder.config.exists() else None
        if stored is not None:
            check_layout(stored, folder)
            if not vocab_size_given:
                config = _with_vocab_size(config, stored["config"]["model"]["vocab_size"])
            check_same_settings(stored, config, folder)
        data = load_tokens(config, console)
        config = _fit_vocabulary(config, data, vocab_size_given)
        identity = {
            "tokens": data.names,
            "tokenizer": data.tokenizer,
            "fingerprint": data.fingerprint,
        }
        if stored is not None:
            check_same_data(stored, data.fingerprint, folder)
        if folder.result.exists():
            _say_finished(folder, console)
            return
        console.print("starting Ray", highlight=False)
        ray_jax_launch.connect(hardware)
        if hardware is None:
            hardware = ray_jax_launch.auto()
            check_batch(config, hardware)
        wait_s = config.wait_for_resources_s
        ray_jax_launch.check_resources(hardware, data_cpus=DATA_CPUS, wait_for_resources_s=wait_s)
        if stored is None:
            write_json(folder.config, describe(config, identity, str(hardware)))
            folder.push()
        _introduce(config, data, hardware, folder, console)
        with ProgressDisplay(config.train.max_steps, console) as progress:
            result = ray_jax_launch.launch(
                train_worker,
                {"config": config, "data": data, "folder": folder},
                hardware=hardware,
                storage_path=storage_path,
                name=name,
                on_metrics=lambda rank, record: progress.show(record),
                data_cpus=DATA_CPUS,
                max_failures=config.train.max_failures,
                wait_for_resources_s=wait_s,
            )
        folder.pull()
        folder.sample.write_text(str(result.return_value))
        write_report(folder, name, wall_s=time.monotonic() - began)
        folder.push()
        _say_done(folder, console)


def check_batch(config: PretrainConfig, hardware: Hardware) -> None:
    """Refuse a batch that does not divide over the devices.

    Raises:
        LaunchError: it does not.
    """
    batch_size, parts, mesh = config.train.global_batch_size, config.train.grad_accum_steps, config.mesh
    if hardware.devices_per_worker % mesh.tensor:
        raise LaunchError(
            f"expected a mesh.tensor that divides the devices of a worker, {hardware.devices_per_worker} on "
            f"{hardware}, got {mesh.tensor}: change it or --hardware"
        )
    for num_devices in (count * hardware.devices_per_worker for count in hardware.worker_counts):
        if num_devices % (mesh.fsdp * mesh.tensor):
            raise LaunchError(
                f"expected mesh.fsdp and mesh.tensor whose product divides the {num_devices} devices of "
                f"{hardware}, got {mesh.fsdp} and {mesh.tensor}: change them or --hardware"
            )
        num_shares = num_devices // mesh.tensor
        if batch_size % (num_shares * parts):
            accumulated = f" in {parts} parts each" if parts > 1 else ""
            raise LaunchError(
                f"expected a train.global_batch_size that the {num_shares} devices of {hardware} that share it divide"
                f"{accumulated}, got {batch_size}: change it, train.grad_accum_steps or --hardware"
            )


def _fit_vocabulary(config: PretrainConfig, data: TokenData, given: bool) -> PretrainConfig:
    """Give the model the tokenizer's vocabulary, unless the user asked for a larger one."""
    if given and config.model.vocab_size < data.vocab_size:
        raise UsageError(
            f"expected a model.vocab_size of at least {data.vocab_size}, which the tokenizer {data.tokenizer} has, got "
            f"{config.model.vocab_size}: leave it out to take the tokenizer's"
        )
    return config if given else _with_vocab_size(config, data.vocab_size)


def _with_vocab_size(config: PretrainConfig, vocab_size: int) -> PretrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def _introduce(
    config: PretrainConfig, data: TokenData, hardware: Hardware, folder: RunFolder, console: Console
) -> None:
    model = config.model
    start = latest_step(folder.checkpoints)  # the workers verify it, and say so if they begin earlier
    doing = "training" if start is None else f"continuing from step {start}:"
    console.print(
        f"{doing} {model.num_layers} layers of width {model.embed_dim}, context {model.seq_len}, on {hardware}\n"
        f"{len(data.train):,} tokens to train on, {len(data.val):,} to validate on ({data.tokenizer})\n"
        f"run folder: {folder}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _say_done(folder: RunFolder, console: Console) -> None:
    result = json.loads(folder.result.read_text())
    console.rule("sample")
    console.print(folder.sample.read_text(), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(
        f"done: {result['steps']} steps in {result['wall_s']:.0f} s, "
        f"validation loss {result['metrics']['val_loss']:.4f}\n"
        f"run folder: {folder}\n"
        f"more text: uv run apps/pretrain sample {folder}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _say_finished(folder: RunFolder, console: Console) -> None:
    result = json.loads(folder.result.read_text())
    console.print(
        f"the run in {folder} is finished: {result['steps']} steps, validation loss "
        f"{result['metrics']['val_loss']:.4f}; choose another --name for a new one",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
