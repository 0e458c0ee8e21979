"""FLOPs, bytes sent and memory of a train step on 8, 64 and 512 devices, and the tokens/s that links allow.

    uv run benchmarks/scale.py --windows 8

Compiles each step for simulated CPU devices, as `collectives.py` does, and does not run it. The tokens/s are a
prediction from the peak rates of H100 and TPU v6e. Writes benchmarks/results/scale.md and scale.json.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from collectives import LAYOUTS, ROOT, Program, compile_step, measure_all, table
from environment import environment
from options import count

import nnx_gpt2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Peak rates of one device and of its links."""

    name: str
    peak_flops_per_s: float
    """Dense bfloat16."""
    island: int
    """Devices that the fast links connect."""
    inside_bytes_per_s: float
    """Bytes that a device sends per second over the fast links."""
    outside_bytes_per_s: float
    """A device's share of the bytes per second that its island sends to other islands."""

    def bytes_per_s(self, devices: np.ndarray) -> float:
        """Return the rate of a ring over these devices.

        A ring over several islands enters and leaves each of them once. Its bytes are split over as many rings as an
        island has devices of the group, each with the share of the network of one device.
        """
        members = int((devices // self.island == devices[0] // self.island).sum())
        if members == len(devices):
            return self.inside_bytes_per_s
        return min(self.inside_bytes_per_s, members * self.outside_bytes_per_s)


MACHINES = [
    # NVIDIA H100 datasheet, SXM: NVLink 4 has 900 GB/s per GPU, both directions together. NVIDIA DGX H100 datasheet:
    # 8 GPUs, and a ConnectX-7 adapter of 400 Gb/s (InfiniBand NDR) for each.
    Machine(
        name="H100",
        peak_flops_per_s=nnx_gpt2.peak_flops_per_s("NVIDIA H100 80GB HBM3") or math.nan,
        island=8,
        inside_bytes_per_s=450e9,
        outside_bytes_per_s=50e9,
    ),
    # Google Cloud documentation, page "TPU v6e": ICI has 800 GB/s per chip, both directions together, over 4 ports.
    # A pod has 256 chips, and 25.6 Tb/s to the data center network.
    Machine(
        name="v6e",
        peak_flops_per_s=nnx_gpt2.peak_flops_per_s("TPU v6e") or math.nan,
        island=256,
        inside_bytes_per_s=400e9,
        outside_bytes_per_s=12.5e9,
    ),
]

NOTES = """\
**A prediction, not a measurement.** No step ran on these devices.

- *GFLOP*: matrix products of the compiled program, per device and step. *MB sent*: as *scattered* in
  [collectives.md](collectives.md). Arrays are float32. A step in bfloat16 sends less, but not less than half.
  *State* and *temporary*: GB per device, by XLA's analysis of the program for CPU. Its attention stores the attention
  weights of all heads. Fused attention on a GPU or TPU does not, and needs less than *temporary*.
- *links*: tokens/s per device if the device only sends: its tokens divided by the time of its bytes on its links, at
  the full rate of the links and without latency.
- *peak*: tokens/s per device if the device only computes, at its full bfloat16 peak. Real steps reach a part of it.
- *no overlap, full overlap*: tokens/s per device at both peaks, if the device sends nothing while it computes, and if
  it sends everything while it computes. A device that computes below its peak has fewer tokens/s, and sending takes a
  smaller share of its step.
- H100: nodes of 8, NVLink 4 with 450 GB/s in each direction inside, InfiniBand NDR with 50 GB/s per GPU between them.
  v6e: pods of 256, ICI with 400 GB/s in each direction inside, 12.5 GB/s per chip between them.
- The bytes of `data` and `fsdp` do not depend on the windows per step. *links* is proportional to the windows of a
  device; each microbatch of gradient accumulation sends the same bytes again."""


def group_devices(mesh_shape: dict[str, int], group: int) -> np.ndarray:
    """Return the devices that form a group of this size with device 0: a product of mesh axes.

    Raises:
        ValueError: several products of axes have this size, or no product has it.
    """
    devices = np.arange(math.prod(mesh_shape.values())).reshape(*mesh_shape.values())
    found = {
        tuple(devices[index].reshape(-1))
        for chosen in np.ndindex(*[2] * devices.ndim)
        for index in [tuple(slice(None) if all_ else 0 for all_ in chosen)]
        if devices[index].size == group
    }
    if len(found) != 1:
        raise ValueError(f"group must be one product of the axes {mesh_shape}, got {group}.")
    return np.array(found.pop())


def measure(layout: str, num_layers: int, num_windows: int) -> dict[str, Any]:
    """Compile the step in one layout for all devices of this process, and predict its tokens/s."""
    config, tensor = nnx_gpt2.gpt2(num_layers=num_layers), LAYOUTS[layout][1]
    mesh, _, compiled = compile_step(layout, config, num_windows * tensor)
    program, memory = Program(compiled.as_text() or ""), compiled.memory_analysis()
    assert memory is not None, "XLA analyses every program on CPU"
    flops, found, tokens = program.flops(), program.collectives(), num_windows * config.seq_len
    predicted = {}
    for machine in MACHINES:
        rates = [machine.bytes_per_s(group_devices(dict(mesh.shape), p["group"])) for p in found]
        send_s = sum(p["scattered_bytes"] / rate for p, rate in zip(found, rates, strict=True))
        compute_s = flops / machine.peak_flops_per_s
        predicted[machine.name] = {
            "links_tokens_per_s": tokens / send_s,
            "peak_tokens_per_s": tokens / compute_s,
            "no_overlap_tokens_per_s": tokens / (send_s + compute_s),
            "full_overlap_tokens_per_s": tokens / max(send_s, compute_s),
        }
    return {
        "layout": layout,
        "devices": jax.device_count(),
        "mesh": dict(mesh.shape),
        "flops": flops,
        "sent_bytes": sum(p["scattered_bytes"] for p in found),
        "state_bytes": memory.argument_size_in_bytes,  # the new state takes the memory of the old one
        "temporary_bytes": memory.temp_size_in_bytes,
        "predicted": predicted,
    }


def main() -> None:
    """Measure each layout and number of devices in a separate process, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=count, default=12, help="layers of the model (default: %(default)s)")
    parser.add_argument("--windows", type=count, default=8, help="windows per device and step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--here", choices=LAYOUTS, help="print the row of one layout for the devices of this process")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here, options.num_layers, options.windows)))
        return
    rows = measure_all(__file__, "--num-layers", str(options.num_layers), "--windows", str(options.windows))
    config = (
        f"GPT-2 124M's widths, {options.num_layers} layers, unrolled, no remat; float32; AdamW; {options.windows} "
        "windows of 1024 tokens per device"
    )
    result = {"config": config, **environment("jax", "jaxlib", "flax"), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.json").write_text(json.dumps(result, indent=2) + "\n")
    sizes, predictions = [], []
    for row in rows:
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        state, temporary = (f"{row[name] / 1e9:.2f}" for name in ("state_bytes", "temporary_bytes"))
        per_step = [f"{row['flops'] / 1e9:.0f}", f"{row['sent_bytes'] / 1e6:.0f}", state, temporary]
        sizes.append([row["layout"], row["devices"], mesh, *per_step])
        for name, predicted in row["predicted"].items():
            predictions.append([name, row["layout"], row["devices"], *(f"{x / 1e3:.0f}" for x in predicted.values())])
    predictions.sort(key=lambda line: line[0])
    (options.out / "scale.md").write_text(
        f"# A train step on 8, 64 and 512 devices\n\n{config}; simulated devices, compiled on {result['hardware']}; "
        f"{result['date']}; {result['versions']}\n\n"
        f"{table('layout | devices | mesh | GFLOP | MB sent | state | temporary', sizes)}\n"
        "Predicted thousands of tokens/s per device:\n\n"
        f"{table('device | layout | devices | links | peak | no overlap | full overlap', predictions)}\n{NOTES}\n"
    )
    print((options.out / "scale.md").read_text())


if __name__ == "__main__":
    main()
