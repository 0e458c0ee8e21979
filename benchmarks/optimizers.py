"""Steps and time that Muon needs for the final loss of AdamW, both with tuned rates.

    uv run benchmarks/optimizers.py --data shakespeare.txt builtin --seeds 10 --kept /tmp/optimizers.jsonl
    uv run benchmarks/optimizers.py --short

For each model and each text:

1. Tuning. Both rules have a grid of the same size, on a seed that is not compared. The lowest validation loss wins.
2. AdamW trains once with each seed. Muon trains with the same seeds, windows and initial parameters. Its runs have the
   lengths of a list, each with the schedule of its length, until two neighbors have the loss of AdamW between them.
3. The steps of Muon to the loss of AdamW are interpolated between these two, for each seed. The interval is that of
   `compare --against`, over seeds. The time is the steps times the ratio of the step times, measured in turns.

No Ray, no checkpoints: the train step alone, bytes, windows at random places. `--kept FILE` keeps the loss of each run:
the same command continues, and two commands may share the file. Writes optimizers.md and optimizers.json.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from environment import environment
from numpy.typing import NDArray
from options import count

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    create_optimizer,
    create_train_state,
    make_eval_step,
    make_train_step,
    num_params,
)
from owt_data import find_source
from pretrain._compare.paired import over_seeds

RESULTS = Path(__file__).parent / "results"
BUILTIN = "builtin"
ADAMW, MUON = "AdamW", "Muon"
VOCABULARY = 257  # that of the tokenizer bytes
TEXT_BYTES = 8_000_000  # of the built-in corpus
VAL_SHARE = 0.1
TUNING_SEED = 1000
EVAL_ROWS, NUM_EVALS = 32, 16
WARM_STEPS, TIMED_STEPS = 5, 40
LENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5)
GRIDS = {
    ADAMW: {"learning_rate": (1e-3, 2e-3, 4e-3, 8e-3), "weight_decay": (0.1, 0.3)},
    MUON: {"muon_learning_rate": (5e-3, 1e-2, 2e-2, 4e-2), "learning_rate": (3e-3, 1e-2)},
}
LARGE_GRIDS = {  # of the larger model, whose runs take minutes: one rate of each rule
    ADAMW: {"learning_rate": (2.5e-4, 5e-4, 1e-3, 2e-3)},
    MUON: {"muon_learning_rate": (2.5e-3, 5e-3, 1e-2, 2e-2), "learning_rate": (3e-3,)},
}
SHORT_GRIDS = {
    ADAMW: {"learning_rate": (4e-3,)},
    MUON: {"muon_learning_rate": (2e-2,), "learning_rate": (4e-3,)},
}
# The settings of preset `baby`: a warmup over a twentieth of the run, and a cosine to a tenth of the peak.
COMMON = OptimizerConfig(beta2=0.99)
WARMUP_SHARE, MOMENTUM_SHARE = 0.05, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model with its batch and the length of a run."""

    model: GPT2Config
    batch_size: int
    steps: int
    grids: dict[str, dict[str, tuple[float, ...]]]
    """The rates to try, for each rule."""
    lengths: tuple[float, ...] = LENGTHS
    """Shares of `steps` that runs of Muon may have, rising."""


def model(seq_len: int, num_layers: int, num_heads: int, embed_dim: int) -> GPT2Config:
    """Return a float32 model of bytes."""
    return GPT2Config(
        vocab_size=VOCABULARY, seq_len=seq_len, num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim,
        dtype="float32", param_dtype="float32",
    )  # fmt: skip


JOBS = {
    "baby": Job(model=model(64, 4, 4, 128), batch_size=12, steps=500, grids=GRIDS),
    "6x256": Job(model=model(128, 6, 4, 256), batch_size=8, steps=200, grids=LARGE_GRIDS),
}
SHORT_JOB = Job(model=model(16, 1, 2, 32), batch_size=8, steps=60, grids=SHORT_GRIDS, lengths=(0.5, 1.0))


class Corpus:
    """The bytes of a text: the first nine tenths to train, the rest to validate."""

    def __init__(self, name: str) -> None:
        if name == BUILTIN:
            text = b"".join(path.read_bytes() for path in find_source(BUILTIN).files)[:TEXT_BYTES]
        else:
            text = Path(name).read_bytes()
        tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        first_val = round(len(tokens) * (1 - VAL_SHARE))
        self.name, self.num_bytes = Path(name).name, len(tokens)
        self._train, self._val = tokens[:first_val], tokens[first_val:]

    def windows(self, seed: int, job: Job, steps: int) -> NDArray[np.uint16]:
        """Return the windows of the first steps, `uint16[steps, batch, seq_len + 1]`: the same for each rule.

        A longer run begins with the windows of a shorter one.
        """
        return _windows(self._train, (steps, job.batch_size), job, seed)

    def val_windows(self, job: Job) -> NDArray[np.uint16]:
        """Return the windows of each validation, `uint16[NUM_EVALS, EVAL_ROWS, seq_len + 1]`."""
        return _windows(self._val, (NUM_EVALS, EVAL_ROWS), job, TUNING_SEED)


def _windows(tokens: NDArray[np.uint16], shape: tuple[int, ...], job: Job, seed: int) -> NDArray[np.uint16]:
    length = job.model.seq_len + 1
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, (*shape, 1))
    return tokens[starts + np.arange(length)]


def optimizer_of(rule: str, rates: dict[str, float], steps: int) -> OptimizerConfig:
    """Return the configuration of a run of some steps."""
    config = replace(COMMON, warmup_steps=round(steps * WARMUP_SHARE), **rates)
    if rule == MUON:
        config = replace(config, name="muon", muon_momentum_warmup_steps=round(steps * MOMENTUM_SHARE))
    return config


class Runs:
    """The validation losses of runs. A run that is in the file of an earlier command is not trained again."""

    def __init__(self, kept: Path | None) -> None:
        self._kept, self._losses = kept, {}
        if kept is not None and kept.exists():
            self._losses = dict(json.loads(line) for line in kept.read_text().splitlines())

    def final_losses(
        self, job: Job, corpus: Corpus, rule: str, rates: dict[str, float], steps: int, seeds: Sequence[int]
    ) -> list[float]:
        """Return the loss on the validation text after the last step, for each seed."""
        config = optimizer_of(rule, rates, steps)
        about = (asdict(job.model), job.batch_size, asdict(config), corpus.name, corpus.num_bytes, steps)
        keys = [json.dumps([*about, seed]) for seed in seeds]
        missing = [(seed, key) for seed, key in zip(seeds, keys, strict=True) if key not in self._losses]
        optimizer = create_optimizer(config, steps)
        step, evaluate = make_train_step(job.model, optimizer), make_eval_step(job.model)
        for seed, key in missing:
            state = create_train_state(job.model, optimizer, jax.random.key(seed))
            for batch in corpus.windows(seed, job, steps):
                state, _ = step(state, batch, jax.random.key(seed))
            losses = [float(evaluate(state.params, rows).mean()) for rows in corpus.val_windows(job)]
            self._losses[key] = statistics.fmean(losses)
            if self._kept is not None:
                with self._kept.open("a") as file:
                    file.write(json.dumps([key, self._losses[key]]) + "\n")
            print(f"{corpus.name}: {rule}, {rates}, {steps} steps, seed {seed}: {self._losses[key]:.4f}", flush=True)
        return [self._losses[key] for key in keys]


def tune(runs: Runs, job: Job, corpus: Corpus, rule: str, grid: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the rates with the lowest loss of `TUNING_SEED`, and all losses of the grid. A loss may be NaN."""
    tried = []
    for values in itertools.product(*grid.values()):
        rates = dict(zip(grid, values, strict=True))
        (loss,) = runs.final_losses(job, corpus, rule, rates, job.steps, [TUNING_SEED])
        tried.append({**rates, "loss": loss})
    best = min(tried, key=lambda one: math.inf if math.isnan(one["loss"]) else one["loss"])
    rates = {name: best[name] for name in grid}
    ends = [name for name, values in grid.items() if len(values) > 1 and rates[name] in (values[0], values[-1])]
    return {"rates": rates, "at_the_edge": ends, "tried": tried}


def share_of_steps(
    wanted: float, lengths: Sequence[float], loss_of: Callable[[float], float], first: float
) -> tuple[float, bool]:
    """Return the length of a run with a loss, and whether it is between the lengths: else it is the nearest one.

    Interpolates linearly in the logarithm of the length.

    Args:
        wanted: the loss.
        lengths: the lengths, rising.
        loss_of: trains a run of one of the lengths, and returns its loss.
        first: about where the length is.
    """
    place = max(index for index in range(len(lengths) - 1) if index == 0 or lengths[index] <= first)
    while place > 0 and loss_of(lengths[place]) <= wanted:
        place -= 1
    while place < len(lengths) - 2 and loss_of(lengths[place + 1]) > wanted:
        place += 1
    short, long = lengths[place], lengths[place + 1]
    above, below = loss_of(short), loss_of(long)
    if above <= wanted:
        return short, False
    if below > wanted:
        return long, False
    return short * (long / short) ** ((above - wanted) / (above - below)), True


def step_times(job: Job, corpus: Corpus, rates: dict[str, dict[str, float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each rule, by round. The rules take turns."""
    windows = corpus.windows(TUNING_SEED, job, WARM_STEPS + TIMED_STEPS)
    times: dict[str, list[float]] = {rule: [] for rule in rates}
    trained = {}
    for rule, of_rule in rates.items():
        optimizer = create_optimizer(optimizer_of(rule, of_rule, job.steps), job.steps)
        trained[rule] = (make_train_step(job.model, optimizer), optimizer)
    for _ in range(rounds):
        for rule, (step, optimizer) in trained.items():
            state, began_s = create_train_state(job.model, optimizer, jax.random.key(0)), 0.0
            for number, batch in enumerate(windows):
                if number == WARM_STEPS:
                    jax.block_until_ready(state)
                    began_s = time.perf_counter()
                state, _ = step(state, batch, jax.random.key(0))
            jax.block_until_ready(state)
            times[rule].append((time.perf_counter() - began_s) / (len(windows) - WARM_STEPS))
    return times


def compare(runs: Runs, job: Job, corpus: Corpus, seeds: Sequence[int], rounds: int) -> dict[str, Any]:
    """Tune both rules, train all runs of a model on a text, and return the figures of a row."""
    tuned = {rule: tune(runs, job, corpus, rule, grid) for rule, grid in job.grids.items()}
    rates = {rule: found["rates"] for rule, found in tuned.items()}
    muon_losses: dict[int, dict[float, float]] = {}

    def share_of(seed: int, first: float) -> tuple[float, bool]:
        (wanted,) = runs.final_losses(job, corpus, ADAMW, rates[ADAMW], job.steps, [seed])
        losses = muon_losses.setdefault(seed, {})

        def loss_of(length: float) -> float:
            (losses[length],) = runs.final_losses(job, corpus, MUON, rates[MUON], round(job.steps * length), [seed])
            return losses[length]

        return share_of_steps(wanted, job.lengths, loss_of, first)

    first, _ = share_of(TUNING_SEED, 1.0)
    found = [share_of(seed, first) for seed in seeds]
    times = step_times(job, corpus, rates, rounds)
    medians = {rule: statistics.median(of_rule) for rule, of_rule in times.items()}
    return {
        "text": corpus.name,
        "num_bytes": corpus.num_bytes,
        "params": num_params(job.model),
        "batch": job.batch_size,
        "seq_len": job.model.seq_len,
        "steps": job.steps,
        "grids": job.grids,
        "tuned": tuned,
        "adamw_losses": runs.final_losses(job, corpus, ADAMW, rates[ADAMW], job.steps, seeds),
        "muon_losses": muon_losses,
        "shares": [share for share, _ in found],
        "num_outside": sum(not is_inside for _, is_inside in found),
        "share_of_steps": mean_share([share for share, _ in found]),
        "step_s": times,
        "step_ratio": medians[MUON] / medians[ADAMW],
    }


def mean_share(shares: Sequence[float]) -> list[float]:
    """Return the geometric mean over seeds with the ends of its interval; without ends for one seed."""
    logs = [math.log(share) for share in shares]
    if len(logs) < 2:
        return [math.exp(logs[0])]
    found = over_seeds(logs)
    return [math.exp(found.mean + side * found.half_width) for side in (0, -1, 1)]


def shown(shares: Sequence[float], factor: float = 1.0) -> str:
    """Return an estimate with its interval as text."""
    texts = [f"{share * factor:.2f}" for share in shares]
    return f"{texts[0]}x ({texts[1]} to {texts[2]})" if len(texts) > 1 else f"{texts[0]}x (one seed)"


def report(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# Optimizers",
        "",
        f"{results['hardware']}, {results['date']}, {versions}, {results['seconds']:.0f} s.",
        "95 % intervals over seeds, as of `compare --against`.",
        "",
        "| model | text | steps x tokens | seeds | AdamW's loss | Muon's steps to AdamW's loss | step time "
        "| time to AdamW's loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results["rows"]:
        outside = f"; {row['num_outside']} seeds beyond the lengths" if row["num_outside"] else ""
        lines.append(
            f"| {name} | {row['text']} | {row['steps']:,} x {row['batch'] * row['seq_len']:,} "
            f"| {len(row['shares'])} | {statistics.fmean(row['adamw_losses']):.4f} "
            f"| {shown(row['share_of_steps'])}{outside} "
            f"| {row['step_ratio']:.2f}x | {shown(row['share_of_steps'], row['step_ratio'])} |"
        )
    lines += ["", "## Tuning", "", "| model | text | rule | rates | at the edge of the grid | loss |", "|" + "---|" * 6]
    for name, row in results["rows"]:
        for rule, tuned in row["tuned"].items():
            rates = ", ".join(f"{rate} {value:g}" for rate, value in tuned["rates"].items())
            loss = min(one["loss"] for one in tuned["tried"] if not math.isnan(one["loss"]))
            edge = ", ".join(tuned["at_the_edge"]) or "none"
            lines.append(f"| {name} | {row['text']} | {rule} | {rates} | {edge} | {loss:.4f} |")
    grids = {name: _shown_grids(row["grids"]) for name, row in results["rows"]}
    lines += [
        "",
        f"The grids, on seed {TUNING_SEED} alone: "
        + ". ".join(f"{name}: {text}" for name, text in grids.items())
        + ". All else is that of the preset `baby`: beta2 0.99, weight "
        "decay 0.1 where it is not tuned, clipping at 1, a warmup over 5 % of the steps, a cosine to a tenth of the "
        "peak. Muon has the scaling `rms`, a momentum of 0.95, and a warmup of it over 15 % of the steps; AdamW "
        "updates its embeddings, biases and norms.",
        "",
        "Each length of Muon has its own schedule, and the rates that were tuned at AdamW's number of steps. The loss "
        f"is that of {NUM_EVALS * EVAL_ROWS} windows of the last tenth of the text.",
    ]
    return "\n".join(lines) + "\n"


def _shown_grids(grids: dict[str, Any]) -> str:
    """Return the grid of each rule as text."""
    return "; ".join(
        f"{rule}: " + ", ".join(f"{name} {' '.join(f'{value:g}' for value in values)}" for name, values in grid.items())
        for rule, grid in grids.items()
    )


def main() -> None:
    """Run the study and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=JOBS, default=[*JOBS], help="models (default: all)")
    parser.add_argument("--data", nargs="+", default=[BUILTIN], help="builtin, or text files (default: builtin)")
    parser.add_argument("--seeds", type=count, default=10, help="number of seeds (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=5, help="turns of the step times (default: %(default)s)")
    parser.add_argument("--steps", type=count, help="steps of a full run (default: those of the model)")
    parser.add_argument("--kept", type=Path, help="file of the losses of runs, with which the same command continues")
    parser.add_argument("--short", action="store_true", help="one tiny model and one seed: shows that the script works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    if missing := [name for name in options.data if name != BUILTIN and not Path(name).is_file()]:
        parser.error(f"argument --data: must be builtin or a text file, got {missing[0]!r}")
    jobs = {"tiny": SHORT_JOB} if options.short else {name: JOBS[name] for name in options.models}
    if options.steps:
        jobs = {name: replace(job, steps=options.steps) for name, job in jobs.items()}
    num_seeds = 1 if options.short else options.seeds
    began_s, runs = time.perf_counter(), Runs(options.kept)
    corpora = [Corpus(name) for name in options.data]
    rows = [
        (name, compare(runs, job, corpus, range(num_seeds), options.rounds))
        for name, job in jobs.items()
        for corpus in corpora
    ]
    results = {
        **environment("nnx-gpt2", "jax", "optax", "numpy", device=jax.default_backend()),
        "seconds": time.perf_counter() - began_s,
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(results)
    (options.out / "optimizers.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "optimizers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
