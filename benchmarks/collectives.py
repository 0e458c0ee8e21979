"""Collectives of one compiled train step against the textbook minimum, for up to 512 simulated devices.

    uv run benchmarks/collectives.py --num-layers 4

Compiles each step for simulated CPU devices, does not run it, and reads its collectives from the text of the compiled
program. Writes benchmarks/results/collectives.md and collectives.json.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from environment import environment
from options import count

import nnx_gpt2

ROOT = Path(__file__).parent.parent
DEVICES = (8, 64, 512)
# (fsdp, tensor): fsdp must divide the width 768, and tensor the 12 heads. The axis data has the remaining factor.
LAYOUTS = {"data": (1, 1), "fsdp": (64, 1), "tensor": (1, 4)}
NUM_LARGEST = 6

NOTES = """\
MB (10^6 bytes) that a device sends per step if each collective is a ring over a group of n devices: (n-1)/n of the
full array for an all-gather, reduce-scatter or all-to-all; twice that for an all-reduce; the array for a permutation.

- *Scattered*: MB if each all-reduce whose result is read only in slices of 1/n were a reduce-scatter, which sends half
  the bytes. XLA's pipelines for GPU and TPU have a pass that makes this change. Its CPU pipeline keeps the
  all-reduces. *Ratio* is this column divided by the textbook.
- *Textbook*: gradients are all-reduced over data. Parameters that fsdp shards are all-gathered once (ZeRO-3 gathers
  them twice; this program keeps them for the backward pass), their gradients are reduce-scattered, and the shards of
  the gradients are all-reduced over data. The axis tensor needs 4 all-reduces of the activations per layer, 2 for the
  embedding and the head, and 3 of one number per token for the loss.
- *wte*: scattered and textbook MB of the token embedding and its gradient. The gradients of the lookup and of the tied
  head are added before their sum is sent."""


class Instruction(NamedTuple):
    """One line of a compiled program."""

    name: str
    shapes: list[str]
    op: str
    operands: list[str]
    text: str


_LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\((.*?)\)(?:, (.*))?$")
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COPIES = ("bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element", "all-reduce-done")


class Program:
    """Computations of a compiled program, parsed from its text."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
                name = header[2]
                self.computations[name] = []
                self.entry = name if header[1] else self.entry
            elif parts := _LINE.match(line):
                shapes = re.findall(r"\w+\[[\d,]*\]", parts[2])
                operands = re.findall(r"%([\w.\-]+)", parts[4])
                self.computations[name].append(Instruction(parts[1], shapes, parts[3], operands, line))

    def instructions(self, computation: str = "", times: int | None = 1) -> Iterator[tuple[str, Instruction, int]]:
        """Yield the computation of each dot and collective, the instruction, and the iterations of the loops around it.

        Raises:
            ValueError: the program does not state the trip count of a loop around one.
        """
        computation = computation or self.entry
        for line in self.computations[computation]:
            if line.op in ("while", "call", "conditional", "fusion"):
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line.text)
                inside = int(trips[1]) if trips else None if line.op == "while" else 1
                names = set(re.findall(r"%([\w.\-]+)", line.text)) & self.computations.keys()
                for called in sorted(names - {*line.operands}):
                    yield from self.instructions(called, None if times is None or inside is None else times * inside)
            elif line.op == "dot" or line.op.removesuffix("-start") in _KINDS:
                if times is None:
                    raise ValueError(f"The trip count of a loop around this instruction is unknown: {line.text}")
                yield computation, line, times

    def flops(self) -> int:
        """Return the floating-point operations of the matrix products, which are nearly all of a step's."""
        total = 0
        for computation, line, times in self.instructions():
            if line.op == "dot":
                left = next(other for other in self.computations[computation] if other.name == line.operands[0])
                sizes, dims = shape_dims(left.shapes[0]), re.search(r"lhs_contracting_dims=\{([\d,]+)\}", line.text)
                assert dims is not None, line.text
                contracted = math.prod(sizes[int(dim)] for dim in dims[1].split(","))
                total += 2 * times * contracted * math.prod(shape_dims(line.shapes[0]))
        return total

    def collectives(self) -> list[dict[str, Any]]:
        """Return each array of each collective; `times` counts the iterations of the loops around it."""
        found = []
        for computation, line, times in self.instructions():
            kind = line.op.removesuffix("-start")
            if kind in _KINDS and (group := group_size(line.text)) > 1:
                shapes = line.shapes[-len(line.operands) :]  # some starts list their operands, then their results
                for i, shape in enumerate(shapes):
                    slice_bytes, element = num_bytes(shape) // group, i if len(shapes) > 1 else None
                    could_scatter = kind == "all-reduce" and self.is_sliced(
                        computation, line.name, slice_bytes, element
                    )
                    sent = times * sent_bytes(kind, shape, group)
                    found.append({
                        "kind": kind, "shape": shape, "group": group, "times": times, "is_first": i == 0,
                        "sent_bytes": sent, "scattered_bytes": sent / (1 + could_scatter),
                        "source": "".join(re.findall(r'op_name="(.*?)"', line.text))[:200],
                    })  # fmt: skip
        return found

    def is_sliced(self, computation: str, name: str, slice_bytes: int, element: int | None = None) -> bool:
        """Return whether all readers of a value, or of one element of a tuple, take slices of this size.

        Follows copies and fusions.
        """
        users = [line for line in self.computations[computation] if name in line.operands]
        if element is not None:
            users = [line for line in users if f"index={element}," in line.text + ","]
        return bool(users) and all(self._slices(computation, line, name, slice_bytes) for line in users)

    def _slices(self, computation: str, user: Instruction, name: str, slice_bytes: int) -> bool:
        if user.op == "dynamic-slice":
            return num_bytes(user.shapes[0]) == slice_bytes
        if user.op in _COPIES:
            return self.is_sliced(computation, user.name, slice_bytes)
        called = re.search(r"(?:calls|to_apply)=%([\w.\-]+)", user.text)
        if user.op not in ("fusion", "call") or called is None:
            return False
        inside = {line.text.split("parameter(")[1].split(")")[0]: line.name
                  for line in self.computations[called[1]] if line.op == "parameter"}  # fmt: skip
        indices = [str(i) for i, operand in enumerate(user.operands) if operand == name]
        return all(self.is_sliced(called[1], inside[i], slice_bytes) for i in indices)


def group_size(text: str) -> int:
    """Return the number of devices in a group; reads all forms in which XLA writes the groups."""
    if "source_target_pairs=" in text:
        return 2
    if named := re.search(r"replica_groups=mesh\[(.*?)\].*?\{('.*?)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(size) if size else sizes[axis] for axis, size in axes)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return len(listed[1].split(","))
    return jax.device_count()  # an empty list means all devices


def shape_dims(shape: str) -> list[int]:
    """Return the dimensions of an array written as `f32[8,16]`."""
    return [int(dim) for dim in shape.rstrip("]").split("[")[1].split(",") if dim]


def num_bytes(shape: str) -> int:
    """Return the bytes of an array written as `f32[8,16]`."""
    bits = re.search(r"\d+", shape.split("[")[0])
    return math.prod(shape_dims(shape)) * (int(bits[0]) if bits else 8) // 8


def sent_bytes(kind: str, shape: str, group: int) -> float:
    """Return the bytes that a device sends in a ring; `shape` is the collective's result on one device."""
    factor = {"all-reduce": 2 * (group - 1) / group, "reduce-scatter": group - 1.0, "collective-permute": 1.0}
    return num_bytes(shape) * factor.get(kind, (group - 1) / group)


def textbook_bytes(params: Any, mesh: jax.sharding.Mesh) -> float:
    """Return the fewest bytes that a device sends for parameters and gradients in this layout; see `NOTES`."""
    data, fsdp, _ = mesh.shape.values()
    total = 0.0
    for leaf in jax.tree.leaves(params):
        shard_bytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        is_sharded = fsdp > 1 and "fsdp" in leaf.sharding.spec
        group = data if is_sharded else data * fsdp
        total += shard_bytes * (2 * (group - 1) / group + 2 * (fsdp - 1) * is_sharded)
    return total


def compile_step(
    layout: str, config: nnx_gpt2.GPT2Config, windows_per_row: int
) -> tuple[Any, Any, jax.stages.Compiled]:
    """Compile the step in one layout for all devices of this process. Return its mesh, abstract state and program.

    Each row of the batch axes, `data` and `fsdp`, has `windows_per_row` windows.
    """
    most_fsdp, tensor = LAYOUTS[layout]
    mesh = nnx_gpt2.make_mesh(fsdp=min(most_fsdp, jax.device_count()), tensor=tensor)
    optimizer = nnx_gpt2.create_optimizer(nnx_gpt2.OptimizerConfig(), 1000)
    num_windows = windows_per_row * mesh.shape["data"] * mesh.shape["fsdp"]
    batch = nnx_gpt2.batch_sharding(mesh)
    windows = jax.ShapeDtypeStruct((num_windows, config.seq_len + 1), jnp.uint16, sharding=batch)
    key_type = jax.eval_shape(lambda: jax.random.key(0)).dtype
    key = jax.ShapeDtypeStruct((), key_type, sharding=nnx_gpt2.replicated(mesh))
    state = nnx_gpt2.abstract_train_state(config, optimizer, mesh)
    lowered = nnx_gpt2.make_train_step(config, optimizer, mesh).lower(state, windows, key)
    # Without this option, XLA's library for CPU adds temporary arrays that other backends do not have.
    return mesh, state, lowered.compile(compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})


def measure(layout: str, num_layers: int) -> dict[str, Any]:
    """Count the collectives of the step in one layout for all devices of this process."""
    config, tensor = nnx_gpt2.gpt2(num_layers=num_layers), LAYOUTS[layout][1]
    mesh, state, compiled = compile_step(layout, config, 1)
    found = Program(compiled.as_text() or "").collectives()
    is_wte = re.compile(rf"\[{config.padded_vocab_size // tensor},").search
    activation_bytes = config.seq_len * ((4 * num_layers + 2) * config.embed_dim + 3) * 4
    return {
        "layout": layout,
        "devices": jax.device_count(),
        "mesh": dict(mesh.shape),
        "counts": {kind: sum(p["times"] for p in found if p["kind"] == kind and p["is_first"]) for kind in _KINDS},
        "sent_bytes": sum(p["sent_bytes"] for p in found),
        "scattered_bytes": sum(p["scattered_bytes"] for p in found),
        "textbook_bytes": textbook_bytes(state.params, mesh) + 2 * (tensor - 1) / tensor * activation_bytes,
        "wte_bytes": sum(p["scattered_bytes"] for p in found if is_wte(p["shape"])),
        "textbook_wte_bytes": textbook_bytes(state.params["wte"], mesh),
        "largest": sorted(found, key=lambda p: -p["sent_bytes"])[:NUM_LARGEST],
    }


def measure_all(script: str, *options: str) -> list[dict[str, Any]]:
    """Run a script with `--here LAYOUT` in a process of its own for each number of devices and layout.

    Return the rows that it prints.
    """
    rows = []
    for num_devices in DEVICES:
        flags = f"--xla_force_host_platform_device_count={num_devices}"
        for layout in LAYOUTS:
            command = [sys.executable, script, "--here", layout, *options]
            env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            rows.append(json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout))
            print(f"{layout}, {num_devices} devices: done", flush=True)
    return rows


def table(header: str, rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [[cell.strip() for cell in header.split("|")], ["---"] * (header.count("|") + 1), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def main() -> None:
    """Measure each layout and number of devices in a separate process, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=count, default=4, help="layers of the model (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--here", choices=LAYOUTS, help="print the row of one layout for the devices of this process")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here, options.num_layers)))
        return
    measured = measure_all(__file__, "--num-layers", str(options.num_layers))
    result = {
        "config": f"GPT-2 124M's widths, {options.num_layers} layers, unrolled, no remat; float32 (XLA for CPU widens "
        "bfloat16 collectives); AdamW; one window of 1024 tokens per device of the axes data and fsdp",
        **environment("jax", "jaxlib", "flax"),
        "rows": measured,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "collectives.json").write_text(json.dumps(result, indent=2) + "\n")
    totals, largest = [], []
    for row in measured:
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        mb = [f"{value / 1e6:.0f}" for name, value in row.items() if name.endswith("_bytes")]
        ratio = f"{row['scattered_bytes'] / row['textbook_bytes']:.2f}"
        totals.append([row["layout"], row["devices"], mesh, *row["counts"].values(), *mb[:3], ratio, *mb[3:]])
        for p in row["largest"] if row["devices"] == DEVICES[-1] else []:
            mb = [f"{p[name] / 1e6:.0f}" for name in ("sent_bytes", "scattered_bytes")]
            largest += [[row["layout"], *mb, p["kind"], p["shape"], p["group"]]]
    header = f"layout | devices | mesh | {' | '.join(_KINDS)} | MB | scattered | textbook | ratio | wte | textbook wte"
    (options.out / "collectives.md").write_text(
        "# Collectives of one train step\n\n"
        f"{result['config']}; simulated devices, compiled on {result['hardware']}; {result['date']}; "
        f"{result['versions']}\n\n"
        f"{table(header, totals)}\n{NOTES}\n\nLargest collectives on {DEVICES[-1]} devices:\n\n"
        f"{table('layout | MB | scattered | kind | array | devices per group', largest)}"
    )
    print((options.out / "collectives.md").read_text())


if __name__ == "__main__":
    main()
