"""The table of the command `plan`."""

import dataclasses
import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from pretrain._errors import alternatives
from pretrain._formats import count, decimal_bytes
from pretrain._screen.printing import print_line, print_table

MFU_RANGE = (0.3, 0.5)
"""Shares of the peak around those of good runs: 41 % of llm.c's GPT-2 124M on eight H100 (140 ms for 0.5 M tokens),
46 % of PaLM 540B (Chowdhery et al., 2022, arXiv:2204.02311, table 3)."""

_MIB, _GIB = 2**20, 2**30
# Units of an interval, and how many of them an hour has.
_UNITS = {"hours": 1, "minutes": 60, "seconds": 3600}
_UNKNOWN = "unknown: give --peak-tflops"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The needs of a run. Memory is that of each device, in bytes."""

    device: str
    num_devices: int
    mesh: dict[str, int]
    worker_counts: tuple[int, ...]
    """Numbers of workers that elastic hardware may have, of which the first is planned; empty for other hardware."""
    num_parameters: int
    tokens_per_step: int
    num_steps: int
    num_tokens: int
    epochs: float | None
    """None if the number of training windows is not known."""
    source_epochs: dict[str, float]
    """Epochs of each name of a mixture, by its label; empty for other data, and for text that is not prepared."""
    micro_batch_size: int
    grad_accum_steps: int
    flops: float
    tokens_bytes: int | None
    checkpoints_bytes: int
    """Checkpoints on disk, with the one that is being written."""
    logs_bytes: int
    state_bytes: int
    temporary_bytes: int | None
    """None if the compiler rejected the step, or is not there."""
    usable_bytes: int
    """Memory that jax can use."""
    fits: bool | None
    """None if only the compiler of the devices can tell."""
    reason: str
    """Why the run does not fit, or why this is not known; empty if it fits."""
    hours: tuple[float, float] | None
    """At 50 % and 30 % of the devices' peak; None if the peak is not known."""
    price_per_hour: float | None
    """The price of all devices."""
    price: tuple[float, float] | None
    """None without `hours` or `price_per_hour`."""
    measured_step_s: float | None
    """Median time of a step on these devices, in seconds."""
    measured_hours: float | None
    """The time of the run at this step time."""
    measured_price: float | None
    """None without `measured_hours` or `price_per_hour`."""


def show_plan(found: Plan, *, console: Console, as_json: bool = False) -> None:
    """Print a plan, as a table or as one line of JSON."""
    if as_json:
        console.file.write(json.dumps(dataclasses.asdict(found)) + "\n")
        return
    mesh = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items() if size > 1)
    rows = {
        "devices": f"{found.num_devices} x {found.device}" + (f", {mesh}" if mesh else ""),
        **({"workers": f"{alternatives(found.worker_counts)}; planned with the fewest"} if found.worker_counts else {}),
        "parameters": count(found.num_parameters),
        "tokens": f"{count(found.num_tokens)}: {found.num_steps:,} steps of {found.tokens_per_step:,}",
        "epochs": _epochs(found),
        "microbatch": f"{found.micro_batch_size:,} on each device; {found.grad_accum_steps:,} in a step",
        "FLOPs": f"{found.flops:.2e}",
        "disk": _disk(found),
        "memory": _memory(found),
        "time": _UNKNOWN if found.hours is None else _time(found.hours),
    }
    if found.price_per_hour is not None:
        rows["price"] = _UNKNOWN if found.price is None else _interval(found.price)
    if found.measured_step_s is not None and found.measured_hours is not None:
        size, unit = _in_unit(found.measured_hours)
        time = f"{found.measured_hours * size:,.2f} {unit}"
        rows["measured"] = f"{1000 * found.measured_step_s:,.1f} ms a step here: {time}"
        if found.measured_price is not None:
            rows["measured"] += f", price {found.measured_price:,.2f}"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(console, table)
    match found.fits:
        case None:
            verdict = f"Whether it fits is not known. {found.reason}"
        case True:
            verdict = "It fits."
        case False:
            verdict = f"It does not fit. {_remedy(found)}"
    print_line(console, verdict)


def _epochs(found: Plan) -> str:
    if found.epochs is None:
        return "unknown before the text is prepared"
    of_sources = ", ".join(f"{label} {epochs:,.2f}" for label, epochs in found.source_epochs.items())
    return f"{found.epochs:,.2f}" + (f": {of_sources}" if of_sources else "")


def _remedy(found: Plan) -> str:
    if found.state_bytes > found.usable_bytes:
        return "Take more devices with --mesh.fsdp, or a smaller model."
    smaller = ", a smaller --train.micro-batch-size" if found.micro_batch_size > 1 else ""
    return f"Take more devices with --mesh.fsdp, --model.remat full{smaller}, or a smaller model."


def _memory(found: Plan) -> str:
    if found.temporary_bytes is None and found.fits is False and found.state_bytes <= found.usable_bytes:
        return f"the compiler rejects the step: {found.reason}"
    needed_bytes = found.state_bytes + (found.temporary_bytes or 0)
    size, unit = (_GIB, "GiB") if needed_bytes > _GIB / 10 else (_MIB, "MiB")
    limit = f" of {found.usable_bytes / size:,.1f}"
    if found.temporary_bytes is None:
        return f"at least {needed_bytes / size:,.2f}{limit} {unit} on each device, for the state alone"
    parts = f"state {found.state_bytes / size:,.2f}, temporary {found.temporary_bytes / size:,.2f}"
    return f"{needed_bytes / size:,.2f}{limit} {unit} on each device, by its compiler: {parts}"


def _disk(found: Plan) -> str:
    tokens = "unknown" if found.tokens_bytes is None else decimal_bytes(found.tokens_bytes)
    checkpoints, logs = decimal_bytes(found.checkpoints_bytes), decimal_bytes(found.logs_bytes)
    return f"tokens {tokens}, checkpoints {checkpoints} at most, logs {logs}"


def _in_unit(hours: float) -> tuple[float, str]:
    """Return how many units an hour has, and the unit: the largest in which a time is at least 1."""
    return next(((size, unit) for unit, size in _UNITS.items() if hours * size >= 1), (_UNITS["seconds"], "seconds"))


def _time(hours: tuple[float, float]) -> str:
    size, unit = _in_unit(hours[1])
    return _interval((hours[0] * size, hours[1] * size), f" {unit}")


def _interval(ends: tuple[float, float], unit: str = "") -> str:
    high, low = (f"{share:.0%}" for share in reversed(MFU_RANGE))
    return f"{ends[0]:,.2f} to {ends[1]:,.2f}{unit}, at {high} to {low} of the peak"
