"""Memory of a train step of each size of GPT-2 on GPUs and TPU slices, from their own compilers.

    uv run --package nnx-gpt2 --extra cuda12 benchmarks/accelerators.py gpu
    uv run --package nnx-gpt2 --extra tpu benchmarks/accelerators.py tpu

No GPU and no TPU is needed. Writes benchmarks/results/accelerators_gpu.md and .json, or accelerators_tpu.md and .json.
"""

import argparse
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from environment import environment

from nnx_gpt2 import (
    GPT2Config,
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
# The presets of apps/pretrain, with the windows of their microbatches on each device.
PRESETS: dict[str, tuple[GPT2Config, int]] = {
    "tutorial": (gpt2(dropout_rate=0.1, **MIXED), 16),
    "tutorial in float32, 4 microbatches": (gpt2(dropout_rate=0.1), 4),
    "wikitext": (gpt2(seq_len=256, dropout_rate=0.1), 16),
    "gpt2": (gpt2(**MIXED), 12),
    "gpt2-medium": (gpt2_medium(**MIXED), 6),
    "gpt2-large": (gpt2_large(**MIXED), 4),
    "gpt2-xl": (gpt2_xl(**MIXED), 2),
    "gpt2-xl, scanned layers": (gpt2_xl(scan_layers=True, **MIXED), 2),
}
# The preset, the devices and the mesh.
CASES: dict[str, list[tuple[str, str, dict[str, int]]]] = {
    "gpu": [
        ("tutorial", "gpu:2:h100", {}),
        ("tutorial", "gpu:1:l4", {}),
        ("tutorial in float32, 4 microbatches", "gpu:1:t4", {}),
        ("wikitext", "gpu:4:t4", {}),
        ("gpt2", "gpu:1:h100", {}),
        ("gpt2", "gpu:8:h100", {}),
        ("gpt2", "gpu:2x8:h100", {}),
        ("gpt2", "gpu:8x8:h100", {}),
        ("gpt2", "gpu:8:a100", {}),
        ("gpt2", "gpu:8:b200", {}),
        ("gpt2-medium", "gpu:8:h100", {}),
        ("gpt2-large", "gpu:8:h100", {"fsdp": 8}),
        ("gpt2-xl", "gpu:8:h100", {"fsdp": 8}),
        ("gpt2-xl", "gpu:8x8:h100", {"fsdp": 8}),
        ("gpt2-xl", "gpu:1:t4", {}),
    ],
    "tpu": [
        ("gpt2-xl, scanned layers", "tpu:v6e:4x4", {"fsdp": 16}),
        ("gpt2-xl, scanned layers", "tpu:v5e:2x4", {"fsdp": 8}),
        ("gpt2", "tpu:v6e:4x4", {}),
        ("gpt2", "tpu:v5e:2x4", {}),
        ("tutorial", "tpu:v6e:2x4", {}),
        ("gpt2", "tpu:v5p:2x2x4", {}),
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
    memory_gib: float | None
    compile_s: float
    error: str = ""


def measure(preset: str, name: str, axes: dict[str, int]) -> Row:
    """Compile a step of two microbatches."""
    config, windows = PRESETS[preset]
    mesh, begin = make_mesh(devices=absent_devices(name), **axes), time.perf_counter()
    facts = device_facts(name)
    limit = None if facts.platform == "tpu" else facts.memory_bytes  # the compiler of TPUs checks it
    state = temporary = 0
    error = ""
    try:
        found = estimate_memory(config, global_batch_size=2 * windows * mesh.size, grad_accum_steps=2, mesh=mesh)
        state, temporary = found.state_bytes, found.temporary_bytes + found.code_bytes
    except jax.errors.JaxRuntimeError as failure:  # the compiler of TPUs rejects what does not fit
        needed = re.search(r"\(([\d.]+)G\).*\(([\d.]+)G\)", str(failure))
        error = f"no: {needed[1]} of {needed[2]} GiB" if needed else str(failure).splitlines()[0][:120]
    return Row(
        preset=preset,
        devices=name,
        mesh=", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device",
        windows_per_device=windows,
        state_gib=state / GIB,
        temporary_gib=temporary / GIB,
        memory_gib=None if limit is None else limit / GIB,
        compile_s=time.perf_counter() - begin,
        error=error,
    )


def fits(row: Row) -> str:
    """Say whether the step fits, by the compiler of a TPU, or the memory of a GPU."""
    if row.error or row.memory_gib is None:
        return row.error or "yes"
    return "yes" if row.state_gib + row.temporary_gib < row.memory_gib else "no"


def table(target: str, found: dict[str, Any], rows: list[Row]) -> str:
    """Return the table of a target's rows."""
    lines = [
        f"# Memory of a train step, from the compiler of {target.upper()}s",
        "",
        "GiB on each device; two microbatches of the given windows, AdamW. Compiled without the devices, on "
        f"{found['hardware']}; {found['date']}; {found['versions']}",
        "",
        "| preset | devices | mesh | windows | state | temporary | sum | memory | fits | compiled in s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        memory = "" if row.memory_gib is None else f"{row.memory_gib:.1f}"
        sizes = (row.state_gib, row.temporary_gib, row.state_gib + row.temporary_gib)
        shown = " | ".join("" if row.error else f"{size:.2f}" for size in sizes)
        lines.append(
            f"| {row.preset} | {row.devices} | {row.mesh} | {row.windows_per_device} | {shown} | {memory} | "
            f"{fits(row)} | {row.compile_s:.0f} |"
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
