"""Delay of the train steps of gpt2 by a save, over the time of a step.

    uv run benchmarks/save_steps.py --rounds 3

The model is GPT-2 124M: parameters and AdamW in float32, 1.49 GB. A step trains on one window of 1024 tokens, on all
CPUs, in the environment of a worker. Two cases take turns in one process, on the same disk. A turn is a save with
`Checkpoints`, two steps, and the wait until the save is durable; or, as the baseline, only the steps.

The delay of a turn is its time minus the median time of a turn of the baseline. `saves.py` measures steps that compute
on one CPU, or wait for a device, also with Orbax's CheckpointManager. Writes benchmarks/results/save_steps.md and
save_steps.json after each round.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment
from options import count

ROOT = Path(__file__).parent.parent
STEPS_PER_TURN = 2
CASES = ("no save", "save")


def train(rounds: int, folder: Path, results: Path) -> None:
    """Run the cases in turns. Write the results after each round."""
    import jax  # the environment of this process is that of a worker, see `main`
    import numpy as np

    from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state, gpt2, make_mesh, make_train_step
    from ray_jax_launch import Checkpoints

    config, optimizer = dataclasses.replace(gpt2(), dtype="float32"), create_optimizer(OptimizerConfig(), 1000)
    state, key = create_train_state(config, optimizer, jax.random.key(0), make_mesh()), jax.random.key(1)
    step = make_train_step(config, optimizer)
    window = np.random.default_rng(0).integers(0, config.vocab_size, (1, config.seq_len + 1)).astype(np.uint16)

    def run_steps() -> list[float]:
        nonlocal state
        times = [time.perf_counter()]
        for _ in range(STEPS_PER_TURN):
            state, metrics = step(state, window, key)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(times)]

    run_steps()  # compile
    turns: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    numbers = itertools.count(1)
    with Checkpoints(folder, num_to_keep=1) as checkpoints:
        for _ in range(rounds):
            for case in CASES:
                began = time.perf_counter()
                if case == "save":
                    items = {"params": state.params, "opt_state": state.opt_state}
                    checkpoints.save(next(numbers), items, metadata={})
                    del items  # the step reuses the memory of its input
                saved = time.perf_counter()
                steps = run_steps()
                waited = time.perf_counter()
                checkpoints.wait()
                ended = time.perf_counter()
                turns[case].append(
                    {"turn": ended - began, "save": saved - began, "steps": steps, "wait": ended - waited}
                )
                print(case, turns[case][-1], flush=True)
            write(turns, results)


def write(turns: dict[str, list[dict[str, Any]]], results: Path) -> None:
    """Write the results of the turns so far."""
    turn_s = statistics.median(turn["turn"] for turn in turns["no save"])
    step_s = statistics.median(seconds for turn in turns["no save"] for seconds in turn["steps"])
    delays = {case: [(turn["turn"] - turn_s) / step_s for turn in turns[case]] for case in CASES}
    result = {
        "step_s": step_s,
        "delay_steps": {case: statistics.median(values) for case, values in delays.items()},
        "config": f"gpt2 (124M) in float32, one window of 1024 tokens, {STEPS_PER_TURN} steps in a turn, "
        f"{len(turns['no save'])} turns of each case",
        **environment("jax", "orbax-checkpoint", "ray-jax-launch"),
        "turns": turns,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / "save_steps.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = ""
    for case, values in delays.items():
        save_s, first_s, wait_s = (
            statistics.median(times)
            for times in zip(*((turn["save"], turn["steps"][0], turn["wait"]) for turn in turns[case]), strict=True)
        )
        rows += (
            f"| {case} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} "
            f"| {save_s:.2f} s | {first_s:.2f} s | {wait_s:.2f} s |\n"
        )
    (results / "save_steps.md").write_text(
        "# Delay of the train steps of gpt2 by a save\n\n"
        f"{result['config']}; a step takes {step_s:.2f} s; {result['hardware']}; {result['date']}; "
        f"{result['versions']}\n\n"
        "| case | median delay in steps | minimum and maximum | `save` returns after | first step after it | "
        "`wait` takes |\n|---|---|---|---|---|---|\n" + rows
    )


def main() -> None:
    """Run the turns in a process with the environment of a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3, help="turns of each case (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure (default: the system's temporary folder)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.rounds, options.train, options.out)
        return
    from ray_jax_launch import cpu, worker_environment

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        command = [sys.executable, __file__, "--rounds", str(options.rounds), "--out", str(options.out)]
        environment = os.environ | worker_environment(cpu(1))
        subprocess.run([*command, "--train", str(folder)], env=environment, check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
