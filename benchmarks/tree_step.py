"""Cost of a step with the same bits on any number of workers, against the step that sums as is fastest.

    uv run benchmarks/tree_step.py --rounds 3

A worker is a process with one CPU device; several are joined by jax.distributed. The tree's step computes 8 shards of a
batch (`nnx_gpt2.TreeTrainStep`), with the environment that `--train.num-shards` sets. The baseline is that of
`nnx_gpt2.make_train_step`. The models are that of the preset `baby`, with 16 windows of 64 tokens, and 6 layers of
width 384, with 16 windows of 256 tokens. Each round runs both steps of each case. Writes
benchmarks/results/tree_step.md and tree_step.json. Exits with 1 if
the digests of the tree's states after the last step are not one.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import environment
from options import count

from pretrain._surroundings.environment import FIXED_THREADS
from ray_jax_launch import parse_hardware, worker_environment

ROOT = Path(__file__).parent.parent
WORKERS = (1, 2, 4)
NUM_SHARDS = 8
# Options of the model, windows of a batch, and measured steps.
MODELS = {
    "baby": ({"num_layers": 4, "num_heads": 4, "embed_dim": 128, "seq_len": 64}, 16, 60),
    "6 layers of width 384": ({"num_layers": 6, "num_heads": 6, "embed_dim": 384, "seq_len": 256}, 16, 5),
}
WORKER = """
import json, statistics, sys, time

import jax
import numpy as np

from nnx_gpt2 import (
    GPT2Config, OptimizerConfig, TreeTrainStep, create_optimizer, create_train_state, make_mesh, make_train_step,
    put_batch, root_digest, tensor_digests,
)

rank, number, port, num_shards, batch_size, num_steps = map(int, sys.argv[1:7])
if number > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", number, rank)
config = GPT2Config(vocab_size=257, dtype="float32", **json.loads(sys.argv[7]))
mesh, optimizer, key = make_mesh(), create_optimizer(OptimizerConfig(), 1_000), jax.random.key(1)
state = create_train_state(config, optimizer, jax.random.key(0), mesh)
if num_shards:
    step = TreeTrainStep(config, optimizer, mesh, num_shards=num_shards)
else:
    step = make_train_step(config, optimizer, mesh)
random, times = np.random.default_rng(0), []
for _ in range(num_steps + 2):
    windows = random.integers(0, 257, (batch_size, config.seq_len + 1)).astype(np.uint16)
    rows = put_batch(np.split(windows, number)[rank], mesh)
    began = time.perf_counter()
    state, metrics = step(state, rows, key)
    jax.block_until_ready(metrics)
    times.append(time.perf_counter() - began)
digest = root_digest(tensor_digests(state))
if rank == 0:
    print(json.dumps({"step_s": statistics.median(times[2:]), "digest": digest}))
"""


def run(model: str, num_workers: int, num_shards: int) -> dict[str, Any]:
    """Return the median time of a step, and the digest of the state after the last one."""
    options, batch_size, num_steps = MODELS[model]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        **os.environ,
        **worker_environment(parse_hardware(f"cpu:{num_workers}")),
        **(FIXED_THREADS if num_shards else {}),
    }
    numbers = [num_workers, port, num_shards, batch_size, num_steps]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), *map(str, numbers), json.dumps(options)],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_workers)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker of {model} on {num_workers} workers has failed")
    return json.loads(outputs[0].splitlines()[-1])


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Return the times of both steps for each number of workers, and the digests of the tree's states."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for num_workers in WORKERS:
            for num_shards in (0, NUM_SHARDS):
                found.setdefault((num_workers, num_shards), []).append(run(model, num_workers, num_shards))
    cases = list[dict[str, Any]]()
    for num_workers in WORKERS:
        sums, trees = ([of["step_s"] for of in found[num_workers, num_shards]] for num_shards in (0, NUM_SHARDS))
        cases.append(
            {
                "workers": num_workers,
                "sum_s": statistics.median(sums),
                "tree_s": statistics.median(trees),
                "ratio": statistics.median(trees) / statistics.median(sums),
                "times": {"sum": sums, "tree": trees},
                "digests": sorted({of["digest"] for of in found[num_workers, NUM_SHARDS]}),
            }
        )
    return cases


def main() -> int:
    """Measure both models, write the results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3, help="runs of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    models = {model: measure(model, options.rounds) for model in MODELS}
    results = {
        **environment("jax", "nnx-gpt2"),
        "configuration": f"float32, AdamW, {NUM_SHARDS} shards of 16 windows; {options.rounds} rounds",
        "models": models,
    }
    (options.out / "tree_step.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "# Cost of the same bits on any number of workers",
        "",
        f"{results['configuration']}; {results['hardware']}; {results['date']}; {results['versions']}",
        "",
        "| model | workers | sum | tree | tree / sum | digest of the tree's state |",
        "|---|---|---|---|---|---|",
        *(
            f"| {model} | {of['workers']} | {of['sum_s'] * 1e3:,.1f} ms | {of['tree_s'] * 1e3:,.1f} ms "
            f"| {of['ratio']:.2f}x | {', '.join(digest[:16] for digest in of['digests'])} |"
            for model, cases in models.items()
            for of in cases
        ),
    ]
    (options.out / "tree_step.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(any(len({digest for of in cases for digest in of["digests"]}) > 1 for cases in models.values()))


if __name__ == "__main__":
    raise SystemExit(main())
