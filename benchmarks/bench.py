"""Run every benchmark in a short form, and print the measured ratios beside their goals.

    uv run benchmarks/bench.py --torch-python PATH
    uv run benchmarks/bench.py --table benchmarks/results

The short form shows that each script works and how the ratios look. One round is no evidence. The results go to a
folder of their own. PATH is an interpreter with torch, numpy and transformers; without it the comparisons with PyTorch
are left out. The scripts need the files of tiktoken's gpt2, which are downloaded once. Exits with 1 if a benchmark
failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options import python_with

from owt_data import DataError, load_tokenizer

HERE = Path(__file__).parent
CORPUS = "A text for one short round: it must only be long enough to train on.\n"

# The arguments of the short form of each script.
SHORT = {
    "train_step.py": ["--preset", "baby", "--batch-size", "12", "--rounds", "1", "--steps", "40"],
    "loop.py": ["--rounds", "1"],
    "start.py": ["--rounds", "2"],
    "data.py": ["--rounds", "1", "--corpus-mb", "60"],
    "kills.py": ["--kills", "1", "--corpus-mb", "100"],
    "kill_matrix.py": ["--kills", "10", "--hardware", "local"],
    "exact.py": ["--kills", "3", "--replays", "2"],
    "layouts.py": ["--steps", "20"],
    "decode.py": ["--rounds", "1"],
    "collectives.py": ["--num-layers", "2"],
    "scale.py": ["--num-layers", "2"],
    "launch.py": ["--turns", "3"],
    "step_metrics.py": ["--rounds", "1"],
    "blame.py": ["--short"],
    "compare.py": ["--short"],
    "optimizers.py": ["--short"],
    "stream.py": ["--rounds", "1", "--megabytes", "60"],
    "saves.py": ["--rounds", "1"],
    "save_steps.py": ["--rounds", "1"],
    "digests.py": ["--rounds", "1"],
    "tree_step.py": ["--rounds", "1"],
    "restore_bytes.py": [],
    "growth.py": ["--short"],
    "workers.py": ["--workers", "2"],
}
# Those that compare with PyTorch if there is one.
COMPARED = {"train_step.py", "decode.py"}
# The same for the scripts that need torch, besides `--torch-python`.
SHORT_TORCH = {"baby.py": ["--rounds", "1"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A measured ratio, its goal and where to find it."""

    what: str
    baseline: str
    file: str
    """Name of the results, without `.json`."""
    value: Callable[[Any], float]
    goal: float
    at_most: bool = False
    unit: str = "x"

    def row(self, results: dict[str, Any]) -> list[str]:
        """Return the row of the table."""
        value = self.value(results)
        is_met = value <= self.goal if self.at_most else value >= self.goal
        bound = "at most" if self.at_most else "at least"
        measured = f"{value:.2f}{self.unit}" if value < 1000 else f"{value / 1e6:.1f} M{self.unit}"
        goal = f"{self.goal:g}{self.unit}" if self.goal < 1000 else f"{self.goal / 1e6:g} M{self.unit}"
        return [self.what, self.baseline, measured, f"{bound} {goal}", "yes" if is_met else "no", results["date"]]


def ratio_to(baseline: str, *, tunables: str = "on") -> Callable[[Any], float]:
    """Return the ratio of tokens/s to a baseline, for results of `train_step.py`."""

    def value(results: Any) -> float:
        rows = {(row["candidate"], row["tunables"]): row["tokens_per_s"] for row in results["rows"]}
        return rows["nnx-gpt2", tunables] / rows[baseline, tunables]

    return value


def listed(group: str, what: str) -> Callable[[Any], float]:
    """Return a value of the results of `data.py`."""
    return lambda results: next(row["value"] for row in results[group] if row["what"] == what)


def largest_excess(layout: str) -> Callable[[Any], float]:
    """Return the largest ratio of the bytes that a GPU or TPU sends to the minimum, for results of `collectives.py`."""
    return lambda results: max(
        row["scattered_bytes"] / row["textbook_bytes"] for row in results["rows"] if row["layout"] == layout
    )


GOALS = [
    Goal(what="preset `baby`, command to end, `--hardware local`", baseline="the same training in PyTorch, eager",
         file="baby", value=lambda r: r["ratio_to_pytorch"]["pretrain --hardware local"], goal=1, at_most=True),
    Goal(what="preset `baby`, command to end, `--hardware cpu:1`", baseline="the same training in PyTorch, eager",
         file="baby", value=lambda r: r["ratio_to_pytorch"]["pretrain --hardware cpu:1"], goal=1, at_most=True),
    Goal(what="tokens/s of the step of `baby`", baseline="the same model in PyTorch, eager", file="train_step_baby",
         value=ratio_to("pytorch"), goal=1),
    Goal(what="tokens/s of the step, 6x384, vocabulary 257", baseline="`GPT2LMHeadModel`, eager",
         file="train_step_small-bytes", value=ratio_to("transformers"), goal=1.2),
    Goal(what="the same", baseline="the same model in PyTorch, eager", file="train_step_small-bytes",
         value=ratio_to("pytorch"), goal=1),
    Goal(what="tokens/s of the step, 6x384, vocabulary 50 257", baseline="the tutorial's model",
         file="train_step_small-gpt2", value=ratio_to("tutorial"), goal=1.3),
    Goal(what="tokens/s of the step of gpt2 (124M) in bfloat16, one H200", baseline="the tutorial's model",
         file="train_step_gpt2", value=ratio_to("tutorial", tunables="off"), goal=1.3),
    Goal(what="the same", baseline="the same model in PyTorch, compiled", file="train_step_gpt2",
         value=ratio_to("pytorch", tunables="off"), goal=1),
    Goal(what="tokens/s of the loop under Ray", baseline="the bare step", file="loop", value=lambda r: r["ratio"],
         goal=0.97),
    Goal(what="command to first step, `local`", baseline="", file="start", value=lambda r: r["medians"]["local"],
         goal=10, at_most=True, unit=" s"),
    Goal(what="the same, first start on a host", baseline="", file="start",
         value=lambda r: r["first_round"]["local"], goal=10, at_most=True, unit=" s"),
    Goal(what="command to first step, `cpu:1`", baseline="", file="start", value=lambda r: r["medians"]["cpu:1"],
         goal=20, at_most=True, unit=" s"),
    Goal(what="the same, first start on a host", baseline="", file="start",
         value=lambda r: r["first_round"]["cpu:1"], goal=20, at_most=True, unit=" s"),
    Goal(what="kill of a worker to the next step", baseline="", file="start",
         value=lambda r: r["median_from_kill"], goal=12, at_most=True, unit=" s"),
    Goal(what="MB/s of `prepare`", baseline="a `datasets.map` script", file="data_prepare",
         value=listed("prepare", "prepare_mb_per_s / script_mb_per_s"), goal=2),
    Goal(what="MB/s of `prepare`", baseline="tiktoken alone", file="data_prepare",
         value=listed("prepare", "prepare_mb_per_s / bare_tiktoken_mb_per_s"), goal=0.8),
    Goal(what="tokens/s of the stream of steps", baseline="the tutorial's `from_items`", file="data_stream",
         value=listed("stream", "step_windows_tokens_per_s / tutorial_tokens_per_s"), goal=3),
    Goal(what="first batch of 9 G tokens", baseline="of 10 M tokens", file="data_stream",
         value=listed("stream", "first_batch_of_9g_tokens_s / first_batch_of_10m_tokens_s"), goal=1.1, at_most=True),
    Goal(what="window indices per second", baseline="", file="data_order", value=listed("order", "window_starts_per_s"),
         goal=5e7, unit="/s"),
    *(Goal(what=f"bytes sent per step, `{layout}`", baseline="the minimum", file="collectives",
           value=largest_excess(layout), goal=1.05, at_most=True) for layout in ("data", "fsdp", "tensor")),
    Goal(what="delay of the steps by a save, gpt2", baseline="one step", file="save_steps",
         value=lambda r: r["delay_steps"]["save"], goal=1, at_most=True),
    *(Goal(what=f"a step with the same bits on any number of workers, {model}, {1 << i} of them", baseline="other sums",
           file="tree_step", value=lambda r, model=model, i=i: r["models"][model][i]["ratio"], goal=1.15, at_most=True)
      for model in ("baby", "6 layers of width 384") for i in range(3)),
    *(Goal(what=f"digests of a checkpoint every 1,000 steps, {name}", baseline="the time of the run", file="digests",
           value=lambda r, name=name: 100 * r["states"][name]["share"], goal=1, at_most=True, unit=" %")
      for name in ("baby", "gpt2")),
    Goal(what="costs that grow with workers, records or documents, of those measured", baseline="none", file="growth",
         value=lambda r: sum(row["exponent"] > row["goal"] for row in r["rows"]), goal=0, at_most=True, unit=""),
    Goal(what="bytes of a restore from object storage", baseline="the bytes needed", file="restore_bytes",
         value=lambda r: max(case["bytes"] / case["needed_bytes"] for case in r["cases"]), goal=1.05, at_most=True),
    Goal(what="time of a token at position 1000", baseline="at position 100", file="decode",
         value=lambda r: r["ratio_late_to_early"], goal=1.2, at_most=True),
    *(Goal(what=f"greedy decoding of gpt2, batch {size}", baseline="transformers' `generate`",
           file="decode_transformers", value=lambda r, size=size: r["ratio"][str(size)], goal=1.5) for size in (1, 8)),
    Goal(what="tokens/s with `--data-mode stream`", baseline="prepared tokens", file="stream",
         value=lambda r: r["ratio"], goal=0.9),
    Goal(what="planted documents among the first three of `blame`", baseline="all that the runs read", file="blame",
         value=lambda r: found_share([row for run in r["planted"] for row in run["rows"]]), goal=0.95),
    Goal(what="step time with metrics", baseline="without", file="step_metrics", value=lambda r: r["ratio"],
         goal=1.02, at_most=True),
]  # fmt: skip


def found_share(rows: list[dict[str, Any]]) -> float:
    """Return the share of planted documents that are among the first three, for results of `blame.py`."""
    return sum(row["rank"] <= 3 for row in rows) / len(rows) if rows else 0.0


def table(folder: Path) -> str:
    """Return the Markdown table of the results in a folder. A goal without results has no row."""
    heads = ["measurement", "baseline", "measured", "goal", "met", "date"]
    rows = [
        goal.row(json.loads(file.read_text())) for goal in GOALS if (file := folder / f"{goal.file}.json").is_file()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def run_all(torch_python: str | None, folder: Path) -> list[str]:
    """Run the short forms, and return the names of the scripts that failed."""
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{i} {CORPUS}" for i in range(10_000)))
    torch = [] if torch_python is None else ["--torch-python", torch_python]
    jobs = {name: [*arguments, *(torch if name in COMPARED else [])] for name, arguments in SHORT.items()}
    if torch:
        jobs |= {name: [*arguments, *torch, "--data", str(corpus)] for name, arguments in SHORT_TORCH.items()}
    failed = []
    for number, (name, arguments) in enumerate(jobs.items(), 1):
        print(f"{number}/{len(jobs)} {name} {' '.join(arguments)}", flush=True)
        began = time.monotonic()
        with (folder / f"{name}.log").open("w") as log:
            command = [sys.executable, str(HERE / name), *arguments, "--out", str(folder)]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if code != 0:
            failed.append(name)
            print(Path(log.name).read_text()[-4000:])
        print(f"    {'done' if code == 0 else f'failed with {code}'} in {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> int:
    """Run the benchmarks, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch = python_with("torch", "numpy", "transformers")
    parser.add_argument("--torch-python", type=torch, help="interpreter with torch, numpy and transformers")
    parser.add_argument("--table", type=Path, help="print the table of the results in this folder, and run nothing")
    options = parser.parse_args()
    if options.table is not None:
        if not any(options.table.glob("*.json")):
            parser.error(f"--table must be a folder with results, got {options.table}")
        print(table(options.table))
        return 0
    try:
        load_tokenizer("gpt2")
    except DataError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        failed = run_all(options.torch_python, Path(folder))
        print(f"\nShort form: one round, small sizes.\n\n{table(Path(folder))}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
