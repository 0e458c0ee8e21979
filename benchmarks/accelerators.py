"""Memory of a train step of each size of GPT-2 on GPUs and TPU slices, from their own compilers.

    uv run --package nnx-gpt2 --extra cuda12 benchmarks/accelerators.py gpu
    uv run --package nnx-gpt2 --extra tpu benchmarks/accelerators.py tpu

No GPU and no TPU is needed. Writes benchmarks/results/accelerators_gpu.md and .json, or accelerators_tpu.md and .json.
"""

import argparse
import json
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
from environment import environment

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    absent_devices,
    device_facts,
    estimate_memory,
    gpt2,
    gpt2_large,
    gpt2_medium,
    gpt2_xl,
    make_mesh,
)

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
MIXED: dict[str, Any] = {"dtype": "bfloat16", "residual_dtype": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A preset of apps/pretrain."""

    model: GPT2Config
    windows: int
    """Windows of a microbatch on each device."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp: int = 1
    """Devices that share the parameters, where there are so many."""


PRESETS = {
    "baby": Preset(model=GPT2Config(vocab_size=65, seq_len=64, num_layers=4, num_heads=4, embed_dim=128), windows=12),
    "tutorial": Preset(model=gpt2(dropout_rate=0.1, **MIXED), windows=16),
    "tutorial in float32, 4 microbatches": Preset(model=gpt2(dropout_rate=0.1), windows=4),
    "wikitext": Preset(model=gpt2(seq_len=256, dropout_rate=0.1), windows=16),
    "gpt2": Preset(model=gpt2(**MIXED), windows=12),
    "speedrun": Preset(model=gpt2(**MIXED), windows=12, optimizer=OptimizerConfig(name="muon")),
    "gpt2-medium": Preset(model=gpt2_medium(**MIXED), windows=6),
    "gpt2-large": Preset(model=gpt2_large(**MIXED), windows=4, fsdp=8),
    "gpt2-xl": Preset(model=gpt2_xl(**MIXED), windows=2, fsdp=8),
    "gpt2-xl, scanned layers": Preset(model=gpt2_xl(scan_layers=True, **MIXED), windows=2, fsdp=16),
}
MAIN = ("baby", "tutorial", "wikitext", "gpt2", "speedrun", "gpt2-medium", "gpt2-large", "gpt2-xl")
# The preset and the devices.
CASES: dict[str, list[tuple[str, str]]] = {
    "gpu": [
        *((preset, name) for preset in MAIN for name in ("gpu:1:h100", "gpu:8:h100", "gpu:2x8:h100", "gpu:8x8:h100")),
        ("tutorial", "gpu:2:h100"),
        ("tutorial", "gpu:1:l4"),
        ("tutorial in float32, 4 microbatches", "gpu:1:t4"),
        ("wikitext", "gpu:4:t4"),
        ("gpt2", "gpu:8:a100"),
        ("gpt2", "gpu:8:b200"),
        ("gpt2-xl", "gpu:1:t4"),
    ],
    "tpu": [
        ("gpt2-xl, scanned layers", "tpu:v6e:4x4"),
        ("gpt2-xl, scanned layers", "tpu:v5e:2x4"),
        ("gpt2", "tpu:v6e:4x4"),
        ("gpt2", "tpu:v5e:2x4"),
        ("gpt2", "tpu:v5p:2x2x4"),
        ("tutorial", "tpu:v6e:2x4"),
        ("baby", "tpu:v6e:4x4"),
        ("wikitext", "tpu:v6e:4x4"),
        ("speedrun", "tpu:v6e:4x4"),
        ("gpt2-medium", "tpu:v6e:4x4"),
    ],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A step, and its memory on each device."""

    preset: str
    devices: str
    mesh: str
    windows_per_device: int
    state_gib: float
    temporary_gib: float
    memory_gib: float
    compile_s: float
    error: str = ""


def measure(name: str, devices: str) -> Row:
    """Compile a step of two microbatches."""
    preset, places, begin = PRESETS[name], absent_devices(devices), time.perf_counter()
    mesh = make_mesh(devices=places, fsdp=math.gcd(preset.fsdp, len(places)))
    limit = device_facts(devices).memory_bytes
    state = temporary = 0
    error = ""
    try:
        found = estimate_memory(
            preset.model, global_batch_size=2 * preset.windows * mesh.size, optimizer=preset.optimizer,
            grad_accum_steps=2, mesh=mesh,
        )  # fmt: skip
        state, temporary = found.state_bytes, found.temporary_bytes + found.code_bytes
    except jax.errors.JaxRuntimeError as failure:  # the compiler of TPUs rejects what does not fit
        needed = re.search(r"\(([\d.]+)G\).*\(([\d.]+)G\)", str(failure))
        error = f"no: {needed[1]} of {needed[2]} GiB" if needed else str(failure).splitlines()[0][:120]
    return Row(
        preset=name,
        devices=devices,
        mesh=", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device",
        windows_per_device=preset.windows,
        state_gib=state / GIB,
        temporary_gib=temporary / GIB,
        memory_gib=limit / GIB,
        compile_s=time.perf_counter() - begin,
        error=error,
    )


def fits(row: Row) -> str:
    """Say whether the step fits, by the compiler of a TPU, or the memory of a GPU."""
    if row.error or row.devices.startswith("tpu"):
        return row.error or "yes"
    return "yes" if row.state_gib + row.temporary_gib < row.memory_gib else "no"


def table(target: str, found: dict[str, Any], rows: list[Row]) -> str:
    """Return the table of a target's rows."""
    lines = [
        f"# Memory of a train step, from the compiler of {target.upper()}s",
        "",
        "GiB on each device; two microbatches of the given windows; AdamW, and for `speedrun` Muon. Compiled without "
        f"the devices and without the workers' flags, on {found['hardware']}; {found['date']}; {found['versions']}",
        "",
        "| preset | devices | mesh | windows | state | temporary | sum | memory | fits | compiled in s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        sizes = (row.state_gib, row.temporary_gib, row.state_gib + row.temporary_gib)
        shown = " | ".join("" if row.error else f"{size:.2f}" for size in sizes)
        lines.append(
            f"| {row.preset} | {row.devices} | {row.mesh} | {row.windows_per_device} | {shown} "
            f"| {row.memory_gib:.1f} | {fits(row)} | {row.compile_s:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=CASES)
    target = parser.parse_args().target
    compiler = {"gpu": "jax-cuda12-plugin", "tpu": "libtpu"}[target]
    found = environment("jax", "jaxlib", "flax", compiler)
    rows: list[Row] = []
    for case in CASES[target]:
        rows.append(measure(*case))
        text = table(target, found, rows)
        print(text.splitlines()[-1], flush=True)
        (RESULTS / f"accelerators_{target}.md").write_text(text)
        (RESULTS / f"accelerators_{target}.json").write_text(
            json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
