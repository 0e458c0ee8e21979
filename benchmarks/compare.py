"""Calibration of the command `compare`: how often it sees a difference where none is, and which differences it finds.

    uv run benchmarks/compare.py
    uv run benchmarks/compare.py --short

Trains hundreds of tiny models at the same time, without Ray: bytes of Python's standard library, with dropout.

- False alarms: pairs of runs that differ in the keys of dropout alone. At most 5 % may be called different.
- Planted differences: pairs of runs that differ in the learning rate, on the same windows with the same keys, against
  a test of runs on other windows.

Writes compare.md and compare.json. The text of compare.md below the tables is that of this file.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from environment import environment
from numpy.typing import NDArray

from nnx_gpt2 import GPT2Config, OptimizerConfig, create_optimizer, create_train_state, make_train_step
from pretrain._compare.paired import MIN_STEPS, num_recent, of_options, of_recent_batches, over_seeds

RESULTS = Path(__file__).parent / "results"
LEARNING_RATE = 2e-3
SEEDS = 4
TEXT_BYTES = 4_000_000
STEPS_AT_ONCE = 20
FULL = {
    "num_pairs": 200,
    "num_planted": 32,
    "steps": [40, 60, 100, 150, 200, 250, 300],
    "batch_size": 4,
    "model": {"num_layers": 2, "num_heads": 2, "embed_dim": 32, "seq_len": 32},
    "changes": [0.02, 0.05, 0.2, -0.8],
}
SHORT = FULL | {
    "num_pairs": 4,
    "num_planted": 4,
    "steps": [40, 60],
    "batch_size": 2,
    "model": {"num_layers": 1, "num_heads": 1, "embed_dim": 8, "seq_len": 8},
    "changes": [-0.8],
}

NOTES = """
## What this shows

- Two runs that differ in nothing but the keys of dropout end at different losses, and the difference stays: it is that
  of two models. The interval of batch means over the last quarter of the steps is an interval for these two models. As
  an answer about the options it would be wrong for most pairs.
- The interval of `compare` for one pair allows for a level that wanders without a preferred direction. It has no false
  alarms here, and its price is high: it is several times wider than the spread between pairs, which one pair does not
  show. Within these steps it finds none of the small changes of the learning rate, also where several pairs agree.
- Nor is a large difference found if it comes early and then shrinks, as that of a fifth of the learning rate after step
  60: one pair cannot exclude that its runs parted early by chance. `compare` then says which run is better, and that
  one pair does not tell the options from the noise. Four pairs find it at each step, and so does the unpaired test.
- Several pairs find small changes in the first steps, where the change acts on the loss more than the training noise
  does. Later the difference is smaller than the spread between pairs, and a few pairs rarely find it.
- The test of runs on other windows knows the noise of the batches alone, which is large here. It finds what is much
  larger than this noise. With more steps or larger batches it would have the false alarms of batch means.
- `compare A... --against B...` learns the spread between runs from several pairs, and is exact if the differences are
  normal. The groups here have the same initial parameters and windows, and other keys of dropout.
"""


class Trainer:
    """Training of many runs at the same time.

    Args:
        form: `FULL` or `SHORT`.
    """

    def __init__(self, form: dict[str, Any]) -> None:
        self._model = GPT2Config(
            vocab_size=256, dropout_rate=0.1, dtype="float32", param_dtype="float32", **form["model"]
        )
        self._num_steps, self._batch_size = form["steps"][-1], form["batch_size"]
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:TEXT_BYTES]
        self._tokens = np.frombuffer(text, np.uint8).astype(np.uint16)

    def losses(self, learning_rate: float, runs: Sequence[tuple[jax.Array, int]]) -> list[NDArray[np.float64]]:
        """Return the loss of each step, `float64[runs, steps]`, for each group of runs.

        Args:
            learning_rate: the peak.
            runs: groups of runs of one size: a key of dropout for each run, and the seed of the windows of the group.
        """
        optimizer = create_optimizer(
            OptimizerConfig(
                learning_rate=learning_rate, min_learning_rate=learning_rate / 10, warmup_steps=20, beta2=0.99
            ),
            self._num_steps,
        )
        step = jax.vmap(make_train_step(self._model, optimizer), in_axes=(0, None, 0))

        @jax.jit
        def steps(states: Any, keys: jax.Array, windows: jax.Array) -> tuple[Any, jax.Array]:
            def one(states: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
                states, metrics = step(states, windows, keys)
                return states, metrics["loss"]

            return jax.lax.scan(one, states, windows)

        state = create_train_state(self._model, optimizer, jax.random.key(7))
        groups = []
        for keys, stream in runs:
            copies = partial(jnp.repeat, repeats=len(keys), axis=0)
            states = jax.tree.map(lambda x, copies=copies: copies(x[None]), state)
            windows, found = self._windows(stream), []
            for first in range(0, self._num_steps, STEPS_AT_ONCE):
                states, losses = steps(states, keys, windows[first : first + STEPS_AT_ONCE])
                found.append(np.asarray(losses, np.float64))
            groups.append(np.concatenate(found).T)
        return groups

    def _windows(self, seed: int) -> NDArray[np.uint16]:
        """Return the windows of each step, `uint16[steps, batch, seq_len + 1]`."""
        length = self._model.seq_len + 1
        shape = (self._num_steps, self._batch_size, 1)
        starts = np.random.default_rng(seed).integers(0, len(self._tokens) - length, shape)
        return self._tokens[starts + np.arange(length)]


def unpaired_is_different(first: NDArray[np.float64], second: NDArray[np.float64]) -> bool:
    """Return whether Welch's test, at 5 %, finds a difference of the last quarter of the steps of two runs."""
    num = num_recent(len(first))
    recent = (first[-num:], second[-num:])
    error = math.sqrt(sum(losses.var(ddof=1) / num for losses in recent))
    return abs(recent[1].mean() - recent[0].mean()) > NormalDist().inv_cdf(0.975) * error


def seeds_find(levels: NDArray[np.float64]) -> float:
    """Return the share of groups of `SEEDS` pairs whose mean difference is not zero, by `over_seeds`."""
    groups = levels[: len(levels) // SEEDS * SEEDS].reshape(-1, SEEDS)
    return float(np.mean([over_seeds(group.tolist()).is_different for group in groups]))


def measure(form: dict[str, Any]) -> dict[str, Any]:
    """Train the runs, and return the shares that each test calls different."""
    trainer = Trainer(form)
    num_pairs, num_planted = form["num_pairs"], form["num_planted"]
    keys = jax.random.split(jax.random.key(99), 2 * num_pairs)
    base = np.concatenate(trainer.losses(LEARNING_RATE, [(half, 1) for half in jnp.split(keys, 2)]))
    null = base[num_pairs:] - base[:num_pairs]
    alarms, planted = [], []
    for step in form["steps"]:
        levels = null[:, step - num_recent(step) : step].mean(axis=1)
        alarms.append(
            {
                "step": step,
                "spread": float(levels.std()),
                "compare": float(np.mean([of_options(pair[:step]).is_different for pair in null])),
                "half_width": float(np.median([of_options(pair[:step]).half_width for pair in null])),
                "batch_means": float(np.mean([of_recent_batches(pair[:step]).is_different for pair in null])),
                "seeds": seeds_find(levels),
            }
        )
    for change in form["changes"]:
        rate = LEARNING_RATE * (1 + change)
        same, other = trainer.losses(rate, [(keys[:num_planted], stream) for stream in (1, 2)])
        first = base[:num_planted]
        for step in form["steps"]:
            levels = (same - first)[:, step - num_recent(step) : step].mean(axis=1)
            found = [of_options(pair[:step]) for pair in same - first]
            is_found = [one.is_different and one.mean * levels.mean() > 0 for one in found]
            unpaired = [unpaired_is_different(a[:step], b[:step]) for a, b in zip(first, other, strict=True)]
            planted.append(
                {
                    "change": change,
                    "step": step,
                    "mean": float(levels.mean()),
                    "spread": float(levels.std()),
                    "compare": float(np.mean(is_found)),
                    "seeds": seeds_find(levels),
                    "unpaired": float(np.mean(unpaired)),
                }
            )
    return {"loss": float(base[:, -num_recent(form["steps"][-1]) :].mean()), "alarms": alarms, "planted": planted}


def report(results: dict[str, Any], form: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    model = ", ".join(f"{name} {size}" for name, size in form["model"].items())
    lines = [
        "# compare",
        "",
        f"{results['hardware']}, {results['date']}, {versions}, {results['seconds']:.0f} s.",
        f"Model: {model}, dropout 0.1. Batches of {form['batch_size']} windows, AdamW, peak learning rate "
        f"{LEARNING_RATE}, cosine to a tenth. Loss at the end: {results['loss']:.3f} nats.",
        "",
        f"## False alarms: {form['num_pairs']} pairs that differ in the keys of dropout alone",
        "",
        "The spread is the standard deviation of the differences between pairs, in nats, over the last quarter of the "
        f"steps. `{SEEDS} pairs` is `--against` with {SEEDS} runs on each side.",
        "",
        f"| step | spread | median half-width of `compare` | `compare` | batch means | {SEEDS} pairs |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['step']} | {row['spread']:.4f} | {row['half_width']:.4f} | {row['compare']:.1%} | "
            f"{row['batch_means']:.1%} | {row['seeds']:.1%} |"
            for row in results["alarms"]
        ),
        "",
        f"## Planted differences of the learning rate: {form['num_planted']} pairs, share found",
        "",
        "`compare` reads the same windows and finds the right sign; `unpaired` is Welch's test of runs on other "
        "windows.",
        "",
        f"| change | step | mean difference | spread | `compare` | {SEEDS} pairs | unpaired |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['change']:+.0%} | {row['step']} | {row['mean']:+.4f} | {row['spread']:.4f} | "
            f"{row['compare']:.0%} | {row['seeds']:.0%} | {row['unpaired']:.0%} |"
            for row in results["planted"]
        ),
    ]
    return "\n".join(lines) + "\n" + NOTES


def main() -> None:
    """Run the study and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few pairs of smaller models: shows that the script works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    form = SHORT if options.short else FULL
    assert form["steps"][0] >= MIN_STEPS
    began = time.perf_counter()
    found = measure(form)
    results = environment("pretrain", "nnx-gpt2", "jax", "numpy") | found | {"seconds": time.perf_counter() - began}
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(results, form)
    (options.out / "compare.md").write_text(text)
    (options.out / "compare.json").write_text(json.dumps(results | {"form": form}, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
