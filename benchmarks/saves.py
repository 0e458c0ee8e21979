"""Delay of the steps by a save that is waited for at once, and by one that is waited for at the next save.

    uv run benchmarks/saves.py --rounds 5

The state is that of GPT-2 124M with AdamW: 124 439 808 parameters and two moments of each, in float32, 1.49 GB. A step
computes on one CPU, or waits, as the host of an accelerator does while that computes. Four ways take turns in one
process, on the same disk. A turn is one save and the steps until the next:

none       the same steps without a save, which the others are compared with
orbax      save with Orbax's CheckpointManager as it comes, which compresses and notes no checksums; wait; go on
at once    save with `Checkpoints`, wait, go on: what the training loop did before
next save  save with `Checkpoints`, go on, and wait before the next save

The delay of a turn is its time, and that of the wait that it leaves to the next save, without the median turn of
`none`. So what the save in the background takes from the steps counts as well. Writes
benchmarks/results/saves.md and saves.json.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# One thread computes: set before jax is imported.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state, gpt2, make_mesh
from ray_jax_launch import Checkpoints

ROOT = Path(__file__).parent.parent
STEPS_PER_TURN, STEP_S = 60, 0.12
KINDS = ("computes on one CPU", "waits")
WAYS = ("none", "orbax", "at once", "next save")


def train_state() -> dict[str, Any]:
    """Parameters and AdamW's state of GPT-2 124M."""
    optimizer = create_optimizer(OptimizerConfig(), 1000)
    state = create_train_state(gpt2(), optimizer, jax.random.key(0), make_mesh())
    # Fresh moments are zeros, which disks and file systems may treat in their own ways.
    params = jax.tree.map(lambda x: x + 0.0, state.params)
    noise = iter(jax.random.split(jax.random.key(1), 1000))
    opt_state = jax.tree.map(
        lambda x: jax.random.normal(next(noise), x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        state.opt_state,
    )
    return jax.block_until_ready({"params": params, "opt_state": opt_state})


def make_step() -> Callable[[], None]:
    """A step that computes for `STEP_S` on one CPU."""

    def timed(repeats: int) -> tuple[Callable[[], None], float]:
        compute = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda i, x: jnp.tanh(x @ x) * 0.1, x))
        x = jnp.eye(512)
        jax.block_until_ready(compute(x))
        began = time.perf_counter()
        jax.block_until_ready(compute(x))
        return lambda: jax.block_until_ready(compute(x)), time.perf_counter() - began

    _, probe_s = timed(100)
    return timed(max(1, round(100 * STEP_S / probe_s)))[0]


def take_turn(
    way: str, number: int, items: dict[str, Any], step: Callable[[], None], checkpoints: Checkpoints, orbax: Any
) -> dict[str, float]:
    """Save, and train until the next save. Returns seconds by name."""
    began = time.perf_counter()

    def passed_s() -> float:
        return time.perf_counter() - began

    times = {}
    if way == "orbax":
        args = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        orbax.save(number, args=ocp.args.Composite(**args))
        times["save"] = passed_s()
        orbax.wait_until_finished()
        times["wait"] = passed_s() - times["save"]
    elif way != "none":
        checkpoints.save(number, items, metadata={"step": number})
        times["save"] = passed_s()
        if way == "at once":
            checkpoints.wait()
            times["wait"] = passed_s() - times["save"]
    for _ in range(STEPS_PER_TURN):
        step()
        if way == "next save" and "durable" not in times and checkpoints.durable_step() == number:
            times["durable"] = passed_s()
    if way == "next save":
        steps_s = passed_s()
        checkpoints.wait()
        times["wait"] = passed_s() - steps_s
    times["turn"] = passed_s()
    return times


def main() -> None:
    """Let the ways take turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the default is for temporary files")
    options = parser.parse_args()

    items = train_state()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(items))
    steps = dict(zip(KINDS, (make_step(), lambda: time.sleep(STEP_S)), strict=True))
    turns: dict[str, dict[str, list[dict[str, float]]]] = {kind: {way: [] for way in WAYS} for kind in KINDS}
    numbers = itertools.count(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with (
            Checkpoints(folder / "checkpoints", num_to_keep=1) as checkpoints,
            ocp.CheckpointManager(folder / "orbax", options=ocp.CheckpointManagerOptions(max_to_keep=1)) as orbax,
        ):
            for round_number in range(options.rounds + 1):  # the first warms up
                for kind in KINDS[: 1 if round_number == 0 else 2]:
                    for way in WAYS:
                        number = next(numbers)
                        times = take_turn(way, number, items, steps[kind], checkpoints, orbax)
                        if round_number:
                            turns[kind][way].append(times)
                        shown = {name: round(seconds, 2) for name, seconds in times.items()}
                        print(round_number, kind, way, shown, flush=True)
    finally:
        shutil.rmtree(folder)

    delays: dict[str, dict[str, list[float]]] = {}
    for kind, taken in turns.items():
        turn_s = statistics.median(turn["turn"] for turn in taken["none"])
        delays[kind] = {way: [turn["turn"] - turn_s for turn in taken[way]] for way in WAYS[1:]}
    results = {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "orbax-checkpoint", "ray-jax-launch")},
        },
        "configuration": {
            "state": "gpt2 (124M), float32 parameters and AdamW", "bytes": num_bytes, "rounds": options.rounds,
            "steps_per_turn": STEPS_PER_TURN, "step_s": STEP_S, "num_to_keep": 1,
        },
        "delay_s": {
            kind: {way: statistics.median(seconds) for way, seconds in ways.items()} for kind, ways in delays.items()
        },
        "turns": turns,
    }  # fmt: skip
    (ROOT / "benchmarks/results/saves.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "# How long a save delays the steps",
        "",
        f"gpt2 (124M): parameters and AdamW, {num_bytes / 1e9:.2f} GB float32, in a folder on the local disk; "
        f"{STEPS_PER_TURN} steps of {STEP_S} s between two saves; {options.rounds} turns each; {results['machine']}; "
        f"{results['date']}; {results['versions']}",
        "",
        "| the step | way | median delay by a save | lowest and highest | ratio to `at once` |"
        " `save` returns after | `wait` takes | durable after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, ways in delays.items():
        for way, seconds in ways.items():
            ratio = statistics.median(seconds) / statistics.median(ways["at once"])
            shown = []
            for name in ("save", "wait", "durable"):
                times = [turn[name] for turn in turns[kind][way] if name in turn]
                shown.append(f"{statistics.median(times):.2f} s" if times else "")
            lines.append(
                f"| {kind} | {way} | {statistics.median(seconds):.2f} s | {min(seconds):.2f} to {max(seconds):.2f} s | "
                f"{ratio:.2f} | " + " | ".join(shown) + " |"
            )
    (ROOT / "benchmarks/results/saves.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
