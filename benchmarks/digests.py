"""Cost of the digests of a checkpoint, as a share of the 1,000 steps before it.

    uv run benchmarks/digests.py --rounds 5

A save records the SHA-256 of each array of the parameters and of AdamW's state, by `nnx_gpt2.tensor_digests`. The
states are that of the preset `baby`, 10 MB, whose step trains on 12 windows of 64 tokens, and that of gpt2 (124M),
1.49 GB, whose step trains on one window of 1,024 tokens. The baseline hashes the bytes of the same arrays one after
another, in one thread. The shortest step is that with which digests every 1,000 steps take 1 % of a run. Writes
benchmarks/results/digests.md and digests.json.
"""

import argparse
import dataclasses
import hashlib
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

from nnx_gpt2 import OptimizerConfig, create_optimizer, create_train_state, gpt2, make_train_step
from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._training.load_state import digests_of

ROOT = Path(__file__).parent.parent
STEPS_PER_SAVE = 1000
BABY = with_vocab_size(PRESETS["baby"](), 257)
STATES = {
    "baby": (BABY.model, BABY.optimizer, BABY.train.global_batch_size, 50),
    "gpt2": (dataclasses.replace(gpt2(), dtype="float32"), OptimizerConfig(), 1, 2),
}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step, of the digests and of the baseline, in turns."""
    config, optimizer_config, batch_size, num_steps = STATES[name]
    optimizer, key = create_optimizer(optimizer_config, STEPS_PER_SAVE), jax.random.key(1)
    state = create_train_state(config, optimizer, jax.random.key(0))
    step = make_train_step(config, optimizer)
    windows = np.random.default_rng(0).integers(0, config.vocab_size, (batch_size, config.seq_len + 1), np.uint16)

    def steps() -> None:
        nonlocal state
        for _ in range(num_steps):
            state, _ = step(state, windows, key)
        jax.block_until_ready(state)

    def digests() -> None:
        digests_of({"params": state.params, "opt_state": state.opt_state})

    def plain() -> None:
        for leaf in jax.tree.leaves({"params": state.params, "opt_state": state.opt_state}):
            hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()

    steps()  # compile
    jobs: dict[str, Callable[[], None]] = {"step": steps, "digests": digests, "plain": plain}
    times: dict[str, list[float]] = {job: [] for job in jobs}
    for _ in range(rounds):
        for job, run in jobs.items():
            began = time.perf_counter()
            run()
            times[job].append((time.perf_counter() - began) / (num_steps if job == "step" else 1))
        print(name, {job: round(seconds[-1], 4) for job, seconds in times.items()}, flush=True)
    step_s, digests_s, plain_s = (statistics.median(times[job]) for job in jobs)
    leaves = jax.tree.leaves({"params": state.params, "opt_state": state.opt_state})
    return {
        "bytes": sum(leaf.nbytes for leaf in leaves),
        "step_s": step_s,
        "digests_s": digests_s,
        "plain_s": plain_s,
        "share": digests_s / (STEPS_PER_SAVE * step_s + digests_s),
        "shortest_step_s": digests_s * 99 / STEPS_PER_SAVE,
        "times": times,
    }


def main() -> None:
    """Measure both states, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, help="turns of each job (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    states = {name: measure(name, options.rounds) for name in STATES}
    results = {
        **environment("jax", "nnx-gpt2", "pretrain", device=jax.devices()[0].device_kind),
        "configuration": f"float32, AdamW; a save every {STEPS_PER_SAVE:,} steps; {options.rounds} rounds",
        "states": states,
    }
    (options.out / "digests.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "# Cost of the digests of a checkpoint",
        "",
        f"{results['configuration']}; {results['hardware']}; {results['date']}; {results['versions']}",
        "",
        "| state | bytes | a step takes | digests take | share of a run | one thread takes | shortest step for 1 % |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {of['bytes'] / 1e6:,.0f} MB | {of['step_s'] * 1e3:,.1f} ms | {of['digests_s'] * 1e3:,.0f} ms "
            f"| {of['share']:.2%} | {of['plain_s'] * 1e3:,.0f} ms | {of['shortest_step_s'] * 1e3:.1f} ms |"
            for name, of in states.items()
        ),
    ]
    (options.out / "digests.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
