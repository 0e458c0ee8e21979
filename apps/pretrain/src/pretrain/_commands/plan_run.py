"""The command `plan`: the needs of a run, before anything starts."""

import dataclasses
import json
import math
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from nnx_gpt2 import (
    absent_devices,
    abstract_train_state,
    create_optimizer,
    device_memory,
    estimate_memory,
    flops_per_token,
    make_mesh,
    num_params,
)
from nnx_gpt2 import peak_flops_per_s as known_peak
from owt_data import vocab_size
from pretrain._config import PretrainConfig, with_length, with_vocab_size
from pretrain._errors import UsageError, one_line
from pretrain._formats import count
from pretrain._screen.facts import print_line, print_table
from pretrain._training.device_memory import device_memory_bytes

MFU_RANGE = (0.3, 0.5)
"""Shares of the peak around those of good runs: 41 % of llm.c's GPT-2 124M on eight H100 (140 ms for 0.5 M tokens),
46 % of PaLM 540B (Chowdhery et al., 2022, arXiv:2204.02311, table 3)."""

_PREALLOCATED = 0.75
"""The share of a GPU's memory that jax takes by default. XLA_PYTHON_CLIENT_MEM_FRACTION is not read."""
_HOUR_S = 3600
_GIB = 2**30
# Units of an interval, and how many of them an hour has.
_UNITS = {"hours": 1, "minutes": 60}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The needs of a run. Memory is that of each device, in bytes."""

    device: str
    num_devices: int
    mesh: dict[str, int]
    num_parameters: int
    tokens_per_step: int
    num_steps: int
    num_tokens: int
    flops: float
    checkpoints_bytes: int
    """Checkpoints on disk, with the one that is being written."""
    state_bytes: int | None
    temporary_bytes: int | None
    """None if the compiler rejected the step."""
    usable_bytes: int | None
    """Memory that jax can use; None if the compiler knows it alone."""
    fits: bool
    reason: str
    hours: tuple[float, float] | None
    """At 50 % and 30 % of the devices' peak; None if the peak is not known."""
    price: tuple[float, float] | None


def plan(config: PretrainConfig, *, devices: str | None = None, price_per_hour: float | None = None) -> Plan:
    """Say what a run needs, from the configuration and the compiler of the devices. Reads no data.

    Args:
        config: the run.
        devices: see `nnx_gpt2.absent_devices`. None is the devices of this machine.
        price_per_hour: the price of all devices.

    Raises:
        UsageError: the number of steps depends on the data, the price is negative, or the devices are unknown or do not
            fit the mesh, the model or the batch.
    """
    if price_per_hour is not None and not 0 <= price_per_hour < float("inf"):
        raise UsageError(f"--price-per-hour must be a number of at least 0, got {price_per_hour}. Change it.")
    if config.train.max_epochs is not None:
        raise UsageError(
            f"train.max_epochs must be none in a plan, which reads no data, got {config.train.max_epochs}. Give "
            "--train.max-epochs none and --train.max-steps or --train.max-tokens."
        )
    if devices is not None:
        # An absent GPU's compiler looks for a driver, unless jax is told to use the CPU.
        jax.config.update("jax_platforms", "cpu")
    try:
        if config.model.vocab_size is None:
            config = with_vocab_size(config, vocab_size(config.prepare.tokenizer))
        return _plan(with_length(config, num_windows=0), devices, price_per_hour)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _plan(config: PretrainConfig, devices: str | None, price_per_hour: float | None) -> Plan:
    train, model = config.train, config.model
    chosen = jax.devices() if devices is None else absent_devices(devices)
    mesh = make_mesh(devices=chosen, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    state = abstract_train_state(model, create_optimizer(config.optimizer, train.max_steps))
    saved_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    estimate, reason = None, ""
    try:
        estimate = estimate_memory(
            model,
            global_batch_size=train.global_batch_size,
            optimizer=config.optimizer,
            grad_accum_steps=train.grad_accum_steps,
            mesh=mesh,
            # A mask has the same size for any token.
            end_of_text=0 if train.mask_documents else None,
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = one_line(str(error).partition("RESOURCE_EXHAUSTED: ")[2])
    usable = device_memory_bytes() if devices is None else device_memory(devices)
    if usable is not None and chosen[0].platform == "gpu" and devices is not None:
        usable = int(_PREALLOCATED * usable)
    needed = None if estimate is None else estimate.peak_bytes
    tokens = train.max_steps * train.global_batch_size * model.seq_len
    flops = float(tokens * flops_per_token(model))
    peak = known_peak(chosen[0].device_kind) if config.peak_tflops is None else config.peak_tflops * 1e12
    hours = price = None
    if peak is not None:
        slow, fast = (flops / (share * peak * len(chosen)) / _HOUR_S for share in MFU_RANGE)
        hours = (fast, slow)
        price = None if price_per_hour is None else (fast * price_per_hour, slow * price_per_hour)
    return Plan(
        device=chosen[0].device_kind,
        num_devices=len(chosen),
        mesh=dict(mesh.shape),
        num_parameters=num_params(model),
        tokens_per_step=train.global_batch_size * model.seq_len,
        num_steps=train.max_steps,
        num_tokens=tokens,
        flops=flops,
        checkpoints_bytes=saved_bytes * (train.checkpoints_to_keep + 1),
        state_bytes=None if estimate is None else estimate.state_bytes,
        temporary_bytes=None if estimate is None else estimate.temporary_bytes + estimate.code_bytes,
        usable_bytes=usable,
        fits=needed is not None and (usable is None or needed <= usable),
        reason=reason,
        hours=hours,
        price=price,
    )


def show_plan(found: Plan, *, console: Console, as_json: bool = False) -> None:
    """Print a plan, as a table or as one line of JSON."""
    if as_json:
        console.file.write(json.dumps(dataclasses.asdict(found)) + "\n")
        return
    mesh = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items() if size > 1)
    rows = {
        "devices": f"{found.num_devices} x {found.device}" + (f", {mesh}" if mesh else ""),
        "parameters": count(found.num_parameters),
        "tokens": f"{count(found.num_tokens)}: {found.num_steps:,} steps of {found.tokens_per_step:,}",
        "FLOPs": f"{found.flops:.2e}",
        "checkpoints": f"{found.checkpoints_bytes / 1e9:,.2f} GB on disk, at most",
        "memory": _memory(found),
        "time": "unknown: give --peak-tflops" if found.hours is None else _time(found.hours),
    }
    if found.price is not None:
        rows["price"] = _interval(found.price)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(console, table)
    print_line(console, "It fits." if found.fits else f"It does not fit. {_REMEDY}")


_REMEDY = "Raise --train.grad-accum-steps or --mesh.fsdp, set --model.remat, or lower --train.global-batch-size."


def _memory(found: Plan) -> str:
    if found.state_bytes is None or found.temporary_bytes is None:
        return f"the compiler rejects the step: {found.reason}"
    needed = (found.state_bytes + found.temporary_bytes) / _GIB
    parts = f"state {found.state_bytes / _GIB:,.2f}, temporary {found.temporary_bytes / _GIB:,.2f}"
    limit = "" if found.usable_bytes is None else f" of {found.usable_bytes / _GIB:,.1f}"
    return f"{needed:,.2f}{limit} GiB on each device, by its compiler: {parts}"


def _time(hours: tuple[float, float]) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS.items() if hours[1] * size >= 1), ("seconds", _HOUR_S))
    return _interval((hours[0] * size, hours[1] * size), f" {unit}")


def _interval(ends: tuple[float, float], unit: str = "") -> str:
    high, low = (f"{share:.0%}" for share in reversed(MFU_RANGE))
    return f"{ends[0]:,.2f} to {ends[1]:,.2f}{unit}, at {high} to {low} of the peak"
