"""Training while the text is tokenized (`--data-mode stream`) against training on prepared tokens.

    uv run benchmarks/stream.py --megabytes 200 --rounds 3

Two CPU workers train a small model on the same text, in the same order of windows, in turns. The table has the
tokens/s of the two runs, the share of the text that is tokenized at the first step of the stream, and whether both runs
have the same losses to the last bit. The first steps do not count in the tokens/s, because Ray still starts processes.
Writes benchmarks/results/stream.md and stream.json.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment
from options import count

ROOT = Path(__file__).parent.parent
STEPS, WARMUP_STEPS, LOG_EVERY = 600, 200, 20
POLL_S = 0.05


def write_corpus(path: Path, num_bytes: int) -> None:
    """Write lines of JSON with random pieces of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(errors="replace") for file in sorted(root.glob("*.py"))]
    rng, written = random.Random(0), 0
    with path.open("w") as file:
        while written < num_bytes:
            text = rng.choice(texts)
            start = rng.randrange(max(1, len(text) - 3000))
            written += file.write(json.dumps({"text": text[start : start + 3000]}) + "\n")


def run(mode: str, corpus: Path, folder: Path) -> tuple[list[dict[str, Any]], float, float]:
    """Train; return the metrics, the share that is tokenized at the first step, and the seconds until then."""
    command = [
        sys.executable, str(ROOT / "apps/pretrain"), "--data", str(corpus), "--data-mode", mode,
        "--prepare.split", "start", "--prepare.cache-path", str(folder / f"tokens-{mode}"),
        "--train.order", "sequential-first", "--hardware", "cpu:2", "--storage-path", str(folder), "--name", mode,
        "--train.max-steps", str(STEPS), "--train.log-every", str(LOG_EVERY), "--train.eval-every", str(STEPS),
        "--train.checkpoint-every", str(STEPS),
    ]  # fmt: skip
    starts = folder / mode / "metrics.jsonl"
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (starts.exists() and f'"step": {LOG_EVERY},' in starts.read_text()):
        assert process.poll() is None, process.returncode
        time.sleep(POLL_S)
    seconds = time.perf_counter() - began
    journals = list((folder / f"tokens-{mode}").glob(".*.partial/parts-all/parts.jsonl"))
    done = sum(json.loads(line)["num_bytes"] for journal in journals for line in journal.read_text().splitlines())
    assert process.wait() == 0
    records = [json.loads(line) for line in starts.read_text().splitlines()]
    return records, done / corpus.stat().st_size, seconds


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=count, default=200, help="size of the text (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as storage:
        corpus = Path(storage) / "corpus.jsonl"
        write_corpus(corpus, options.megabytes * 10**6)
        for number in range(options.rounds):
            folder = Path(storage) / str(number)
            folder.mkdir()
            row: dict[str, Any] = {}
            losses = {}
            for mode in ("stream", "prepared"):
                records, share, seconds = run(mode, corpus, folder)
                losses[mode] = [record["loss"] for record in records if "loss" in record]
                speeds = [r["tokens_per_s"] for r in records if r["step"] > WARMUP_STEPS and "tokens_per_s" in r]
                row[mode] = {"tokens_per_s": statistics.median(speeds), "seconds_to_step": seconds}
                if mode == "stream":
                    row["share_tokenized"] = share
            row["same_losses"] = losses["stream"] == losses["prepared"]
            rounds.append(row)
            print(f"round {number + 1}: {row}", flush=True)
    speeds = {mode: statistics.median(row[mode]["tokens_per_s"] for row in rounds) for mode in ("stream", "prepared")}
    waits = {mode: statistics.median(row[mode]["seconds_to_step"] for row in rounds) for mode in ("stream", "prepared")}
    result = {
        "rounds": rounds,
        "ratio": speeds["stream"] / speeds["prepared"],
        "config": (
            f"{options.megabytes} MB of JSON lines, bytes tokenizer, quickstart model, two CPU workers, steps "
            f"{WARMUP_STEPS} to {STEPS}, {options.rounds} rounds"
        ),
        **environment("jax", "flax", "ray"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stream.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "stream.md").write_text(
        "# Training while the text is tokenized\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        f"| | stream | prepared | ratio of medians |\n|---|---|---|---|\n"
        f"| tokens/s | {speeds['stream']:,.0f} | {speeds['prepared']:,.0f} | {result['ratio']:.2f} |\n"
        f"| seconds to step {LOG_EVERY} | {waits['stream']:.1f} | {waits['prepared']:.1f} | "
        f"{waits['stream'] / waits['prepared']:.2f} |\n"
        f"| tokenized at step {LOG_EVERY} | {max(row['share_tokenized'] for row in rounds):.1%} at most | 100 % | |\n"
        f"| the same losses, to the last bit | {all(row['same_losses'] for row in rounds)} | | |\n"
    )
    print((options.out / "stream.md").read_text())


if __name__ == "__main__":
    main()
