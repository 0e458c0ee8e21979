"""Delay of the steps by a save, with the wait for it at once, and with the wait at the next save.

    uv run benchmarks/saves.py --rounds 5

The state is GPT-2 124M with AdamW: 124 439 808 parameters and two moments of each, in float32, 1.49 GB. A step computes
on one CPU, or waits, like the host of an accelerator. Four cases take turns in one process, on the same disk. A turn is
one save and the steps until the next save:

none       the steps without a save: the baseline
orbax      save with Orbax's CheckpointManager and its defaults (compression, no checksums); wait; run the steps
at once    save with `Checkpoints`; wait; run the steps
next save  save with `Checkpoints`; run the steps; wait before the next save

The delay of a turn is its time, including the wait before the next save, minus the median time of a turn of `none`. It
includes the time that a save in the background takes from the steps. Writes benchmarks/results/saves.md and saves.json.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import environment

# jax reads these variables at import. One thread computes.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from options import count

from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state, gpt2, make_mesh
from ray_jax_launch import Checkpoints

ROOT = Path(__file__).parent.parent
STEPS_PER_TURN, STEP_S = 60, 0.12
KINDS = ("computes on one CPU", "waits")
CASES = ("none", "orbax", "at once", "next save")


def train_state() -> dict[str, Any]:
    """Return the parameters and the AdamW state of GPT-2 124M."""
    optimizer = create_optimizer(OptimizerConfig(), 1000)
    state = create_train_state(gpt2(), optimizer, jax.random.key(0), make_mesh())
    # Initial moments are zeros, which disks and file systems may store in special ways.
    params = jax.tree.map(lambda x: x + 0.0, state.params)
    noise = iter(jax.random.split(jax.random.key(1), 1000))
    opt_state = jax.tree.map(
        lambda x: jax.random.normal(next(noise), x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        state.opt_state,
    )
    return jax.block_until_ready({"params": params, "opt_state": opt_state})


def make_step() -> Callable[[], None]:
    """Return a step that computes for `STEP_S` on one CPU."""

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
    case: str, number: int, items: dict[str, Any], step: Callable[[], None], checkpoints: Checkpoints, orbax: Any
) -> dict[str, float]:
    """Save, and run the steps until the next save. Return seconds by name."""
    began = time.perf_counter()

    def passed_s() -> float:
        return time.perf_counter() - began

    times = {}
    if case == "orbax":
        args = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        orbax.save(number, args=ocp.args.Composite(**args))
        times["save"] = passed_s()
        orbax.wait_until_finished()
        times["wait"] = passed_s() - times["save"]
    elif case != "none":
        checkpoints.save(number, items, metadata={"step": number})
        times["save"] = passed_s()
        if case == "at once":
            checkpoints.wait()
            times["wait"] = passed_s() - times["save"]
    for _ in range(STEPS_PER_TURN):
        step()
        if case == "next save" and "durable" not in times and checkpoints.durable_step() == number:
            times["durable"] = passed_s()
    if case == "next save":
        steps_s = passed_s()
        checkpoints.wait()
        times["wait"] = passed_s() - steps_s
    times["turn"] = passed_s()
    return times


def main() -> None:
    """Run the cases in turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, help="turns of each case (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure (default: the system's temporary folder)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    items = train_state()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(items))
    steps = dict(zip(KINDS, (make_step(), lambda: time.sleep(STEP_S)), strict=True))
    turns: dict[str, dict[str, list[dict[str, float]]]] = {kind: {case: [] for case in CASES} for kind in KINDS}
    numbers = itertools.count(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with (
            Checkpoints(folder / "checkpoints", num_to_keep=1) as checkpoints,
            ocp.CheckpointManager(folder / "orbax", options=ocp.CheckpointManagerOptions(max_to_keep=1)) as orbax,
        ):
            for round_number in range(options.rounds + 1):  # the first round is a warm-up
                for kind in KINDS[: 1 if round_number == 0 else 2]:
                    for case in CASES:
                        number = next(numbers)
                        times = take_turn(case, number, items, steps[kind], checkpoints, orbax)
                        if round_number:
                            turns[kind][case].append(times)
                        shown = {name: round(seconds, 2) for name, seconds in times.items()}
                        print(round_number, kind, case, shown, flush=True)
    finally:
        shutil.rmtree(folder)

    delays: dict[str, dict[str, list[float]]] = {}
    for kind, taken in turns.items():
        turn_s = statistics.median(turn["turn"] for turn in taken["none"])
        delays[kind] = {case: [turn["turn"] - turn_s for turn in taken[case]] for case in CASES[1:]}
    results = {
        **environment("jax", "orbax-checkpoint", "ray-jax-launch"),
        "configuration": {
            "state": "gpt2 (124M), float32 parameters and AdamW", "bytes": num_bytes, "rounds": options.rounds,
            "steps_per_turn": STEPS_PER_TURN, "step_s": STEP_S, "num_to_keep": 1,
        },
        "delay_s": {
            kind: {case: statistics.median(seconds) for case, seconds in by_case.items()}
            for kind, by_case in delays.items()
        },
        "turns": turns,
    }  # fmt: skip
    (options.out / "saves.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "# Delay of the steps by a save",
        "",
        f"gpt2 (124M): parameters and AdamW, {num_bytes / 1e9:.2f} GB float32, in a folder on the local disk; "
        f"{STEPS_PER_TURN} steps of {STEP_S} s between two saves; {options.rounds} turns of each case; "
        f"{results['hardware']}; {results['date']}; {results['versions']}",
        "",
        "| step | case | median delay | minimum and maximum | ratio to `at once` | `save` returns after | "
        "`wait` takes | durable after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, by_case in delays.items():
        for case, seconds in by_case.items():
            ratio = statistics.median(seconds) / statistics.median(by_case["at once"])
            shown = []
            for name in ("save", "wait", "durable"):
                times = [turn[name] for turn in turns[kind][case] if name in turn]
                shown.append(f"{statistics.median(times):.2f} s" if times else "")
            lines.append(
                f"| {kind} | {case} | {statistics.median(seconds):.2f} s | {min(seconds):.2f} to {max(seconds):.2f} s "
                f"| {ratio:.2f} | " + " | ".join(shown) + " |"
            )
    (options.out / "saves.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
