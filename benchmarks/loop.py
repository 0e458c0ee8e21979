"""Step time of the training loop under Ray against the bare step on one batch in memory.

    uv run benchmarks/loop.py --rounds 3

The loop includes Ray Data, the metrics, and the files that rank 0 writes. The bare step includes none of these. Both
train the model of the preset quickstart on one CPU worker with the same environment, without validation or
checkpoints, and take turns. The first steps of the loop do not count, because Ray still starts processes.
Writes benchmarks/results/loop.md and loop.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import environment
from options import count

from ray_jax_launch import cpu, worker_environment

ROOT = Path(__file__).parent.parent
STEPS, WARMUP_STEPS, LOG_EVERY = 300, 600, 10

BARE = """
import dataclasses, json, sys, time
import jax, numpy as np
from nnx_gpt2 import create_optimizer, create_train_state, make_mesh, make_train_step, put_batch
from pretrain import PRESETS
config, steps, every = PRESETS["quickstart"](), int(sys.argv[1]), int(sys.argv[2])
model = dataclasses.replace(config.model, vocab_size=257)  # of the tokenizer bytes
mesh = make_mesh()
optimizer = create_optimizer(config.optimizer, steps)
state = create_train_state(model, optimizer, jax.random.key(0), mesh)
step = make_train_step(model, optimizer)
rows = np.random.default_rng(0).integers(0, 256, (config.train.global_batch_size, model.seq_len + 1))
batch = put_batch(rows.astype(np.uint16), mesh)
times = []
for i in range(steps + 1):
    state, metrics = step(state, batch, jax.random.key(1))
    if i % every == 0:
        jax.block_until_ready(metrics)
        times.append(time.perf_counter())
print(json.dumps([(b - a) / every for a, b in zip(times, times[1:])]))
"""


def bare_steps() -> list[float]:
    """Return the seconds per bare step, one value per ten steps."""
    command = [sys.executable, "-c", BARE, str(STEPS), str(LOG_EVERY)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def loop_steps() -> list[float]:
    """Return the seconds per step of the loop under Ray after the warm-up, from its metrics."""
    total = str(WARMUP_STEPS + STEPS)
    with tempfile.TemporaryDirectory() as storage:
        command = [
            sys.executable, str(ROOT / "apps/pretrain"),
            "--hardware", "cpu:1", "--storage-path", storage, "--name", "run",
            "--train.max-steps", total, "--train.log-every", str(LOG_EVERY),
            "--train.eval-every", total, "--train.checkpoint-every", total,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(storage) / "run/metrics.jsonl").read_text().splitlines()]
    return [record["step_s"] for record in records if "step_s" in record and record["step"] > WARMUP_STEPS]


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    os.environ.update(worker_environment(cpu(1)))
    rounds = []
    for number in range(options.rounds):
        began = time.monotonic()
        medians = {"bare": statistics.median(bare_steps()), "loop": statistics.median(loop_steps())}
        rounds.append(medians)
        print(f"round {number + 1}: {medians} ({time.monotonic() - began:.0f} s)", flush=True)
    bare, loop = (statistics.median(medians[name] for medians in rounds) for name in ("bare", "loop"))
    result = {
        "bare_step_s": bare,
        "loop_step_s": loop,
        "ratio": bare / loop,
        "ratio_by_round": [medians["bare"] / medians["loop"] for medians in rounds],
        "config": f"quickstart model, one CPU worker, {STEPS} steps after {WARMUP_STEPS}, {options.rounds} rounds",
        **environment("jax", "flax", "ray"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loop.json").write_text(json.dumps(result, indent=2) + "\n")
    by_round = ", ".join(f"{ratio:.3f}" for ratio in result["ratio_by_round"])
    (options.out / "loop.md").write_text(
        "# The loop under Ray against the bare step\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| bare step | loop | ratio of medians | by round |\n|---|---|---|---|\n"
        f"| {bare * 1e3:.1f} ms | {loop * 1e3:.1f} ms | {bare / loop:.3f} | {by_round} |\n\n"
        "The step computes on all CPUs, which Ray's processes use too. `launch.md` measures their share.\n"
    )
    print((options.out / "loop.md").read_text())


if __name__ == "__main__":
    main()
