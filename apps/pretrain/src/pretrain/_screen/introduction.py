"""The introduction of a run: model, data, length and hardware."""

import math

from rich.console import Console

from nnx_gpt2 import num_params
from owt_data import GrowingTokens, TokenData
from pretrain._config import PretrainConfig
from pretrain._errors import alternatives
from pretrain._run.description import Origin
from pretrain._run.differences import option_values
from pretrain._run.folder import RunFolder
from pretrain._run.names import typed_value
from pretrain._screen.printing import print_facts, print_line
from ray_jax_launch import Hardware, latest_step


def introduce(
    config: PretrainConfig,
    data: TokenData,
    hardware: Hardware,
    folder: RunFolder,
    origin: Origin | None,
    before: PretrainConfig | None,
    console: Console,
) -> None:
    """Print the size of the model, the data, and the length of a run.

    Args:
        config: the resolved configuration.
        data: the tokens.
        hardware: the devices.
        folder: the run's folder.
        origin: the checkpoint or the weights that the run starts from, or None.
        before: the configuration of the last start; None for a new run.
        console: the output.
    """
    model = config.model
    num_windows = config.train.global_batch_size
    max_steps = config.train.max_steps
    step_tokens = num_windows * model.seq_len
    worker_counts = sorted({hardware.min_workers, hardware.num_workers}, reverse=True)
    per_worker = "-".join(str(num_windows // count) for count in worker_counts)
    num_microbatches = config.train.grad_accum_steps
    microbatches = f", in {num_microbatches} microbatches" if num_microbatches > 1 else ""
    if isinstance(data.train, GrowingTokens):
        tokens, epochs = "a growing number of", ""
    else:
        tokens = f"{len(data.train):,}"
        epochs = f", {max_steps * num_windows / data.train.num_windows(model.seq_len):,.2f} epochs"
    print_facts(
        console,
        [
            ("model", f"{num_params(model):,} parameters: {model.num_layers} layers of width {model.embed_dim}"),
            ("data", f"{tokens} tokens to train on, {len(data.val):,} to validate on ({data.tokenizer})"),
            (
                "step",
                f"{step_tokens:,} tokens: {num_windows} windows of {model.seq_len}, {per_worker} per worker"
                f"{microbatches}",
            ),
            ("length", f"{max_steps:,} steps: {max_steps * step_tokens:,} tokens{epochs}"),
            ("hardware", _describe_hardware(hardware, config.hardware)),
            *([] if origin is None else [("start", str(origin))]),
        ],
    )
    print_line(console, f"run folder: {folder}")
    if latest_step(folder.checkpoints) is not None:  # the workers verify it, and tell its step
        print_line(console, "the run continues from its newest checkpoint")
        if before is not None:
            _show_changes(before, config, console)


def _describe_hardware(hardware: Hardware, given: str) -> str:
    """Return the hardware, with its numbers of workers if they are not all of those that were given."""
    counts = hardware.allowed_counts
    if counts is None:
        return str(hardware)
    workers = "workers" if counts[-1] > 1 else "worker"
    return f"{given}, with {alternatives(counts)} {workers}: other numbers do not fit the mesh or the batch"


def _show_changes(before: PretrainConfig, config: PretrainConfig, console: Console) -> None:
    """Print the options that are others than at the last start, and whether checkpoints go."""
    old, new = option_values(before), option_values(config)
    changed = [
        f"{name} {typed_value(old[name])} -> {typed_value(new[name])}"
        for name in new
        if new[name] != old[name] and name != "name"
    ]
    if changed:
        print_line(console, f"changed since the last start: {', '.join(changed)}")
    kept = config.train.checkpoints_to_keep
    if kept is not None and kept < (before.train.checkpoints_to_keep or math.inf):
        others = "the best one and those kept for good"
        print_line(console, f"the next save deletes all but the newest {kept} checkpoints, {others}")
