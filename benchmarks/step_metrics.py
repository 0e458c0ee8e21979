"""Cost of the metrics of each step: their mean every 25 steps, against a loop that reads none, and one that reads each.

    uv run benchmarks/step_metrics.py --rounds 9

The three loops train the model of the preset quickstart on one batch in memory, in turns. `mean` is the training loop's
meter: each step's metrics stay on the device until a record is due. `fetched` waits for the loss of each step. The
means of the two are compared. Writes benchmarks/results/step_metrics.md and step_metrics.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from environment import environment
from options import count

from nnx_gpt2 import create_optimizer, create_train_state, make_mesh, make_train_step, put_batch
from owt_data import TokenSequence, TokenSpan
from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._training.step_meter import StepMeter

RESULTS = Path(__file__).parent / "results"
RECORD_EVERY, STEPS = 25, 100
CONFIG = with_vocab_size(PRESETS["quickstart"](), 257).with_options({"train.order": "shuffle"})
TRAIN = TokenSequence((TokenSpan(path="not read", start=0, stop=10_000_000),))


def make_loops() -> dict[str, Callable[[], tuple[float, list[float]]]]:
    """Return the loops. Each trains `STEPS` steps, and returns the seconds of a step and the recorded losses."""
    mesh = make_mesh()
    optimizer = create_optimizer(CONFIG.optimizer, CONFIG.train.max_steps)
    step: Any = make_train_step(CONFIG.model, optimizer, mesh)
    shape = (CONFIG.train.global_batch_size, CONFIG.model.seq_len + 1)
    windows = put_batch(np.random.default_rng(0).integers(0, 256, shape).astype(np.uint16), mesh)
    key = jax.random.key(0)

    def run(after_step: Callable[[int, dict[str, jax.Array]], None]) -> float:
        state = create_train_state(CONFIG.model, optimizer, key, mesh)
        metrics: dict[str, jax.Array] = {}
        jax.block_until_ready(state)
        began = time.perf_counter()
        for number in range(1, STEPS + 1):
            state, metrics = step(state, windows, key)
            after_step(number, metrics)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / STEPS

    def without() -> tuple[float, list[float]]:
        return run(lambda number, metrics: None), []

    def mean() -> tuple[float, list[float]]:
        meter, losses = StepMeter(CONFIG, TRAIN, mesh.local_devices[0], mesh.size), []
        meter.start()

        def after_step(number: int, metrics: dict[str, jax.Array]) -> None:
            if number > 1 and (number - 1) % RECORD_EVERY == 0:  # as in the training loop, after the next step's start
                losses.append(meter.wait_for_record(number - 1)["loss"])
            meter.add(metrics)

        seconds = run(after_step)
        return seconds, [*losses, meter.wait_for_record(STEPS)["loss"]]

    def fetched() -> tuple[float, list[float]]:
        losses: list[float] = []
        seconds = run(lambda number, metrics: losses.append(float(metrics["loss"])))
        return seconds, [float(np.mean(losses[i : i + RECORD_EVERY])) for i in range(0, STEPS, RECORD_EVERY)]

    return {"without": without, "mean": mean, "fetched": fetched}


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=9, help="turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    loops = make_loops()
    for loop in loops.values():
        loop()  # compiles
    milliseconds: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name, loop in loops.items():
            seconds, losses[name] = loop()
            milliseconds[name].append(1000 * seconds)
        print(f"round {number + 1}: " + ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in milliseconds.items()))
    difference = max(abs(a - b) for a, b in zip(losses["mean"], losses["fetched"], strict=True))
    medians = {name: statistics.median(values) for name, values in milliseconds.items()}
    result = {
        "milliseconds": milliseconds,
        "medians": medians,
        "ratio": medians["mean"] / medians["without"],
        "largest_difference_of_means": difference,
        "config": f"quickstart model, a record every {RECORD_EVERY} of {STEPS} steps, {options.rounds} rounds",
        **environment("jax", "flax", device=jax.devices()[0].device_kind),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step_metrics.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "step_metrics.md").write_text(
        "# Cost of the metrics of each step\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| no metrics | mean and largest every 25 steps | each loss fetched | mean / no metrics |\n|---|---|---|---|\n"
        f"| {medians['without']:.1f} ms | {medians['mean']:.1f} ms | {medians['fetched']:.1f} ms "
        f"| {result['ratio']:.3f} |\n\n"
        f"Largest difference of a recorded mean from the mean of the fetched losses: {difference:.1e}. A record has 6 "
        "significant digits.\n"
    )
    print((options.out / "step_metrics.md").read_text())


if __name__ == "__main__":
    main()
