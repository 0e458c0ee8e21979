"""Seconds from the command to the first training step: `--hardware local` against `cpu:1`.

    uv run benchmarks/start.py --rounds 5

Both train the model of the preset quickstart for one step, in turns, on tokens that are prepared before. `cpu:1` starts
a Ray cluster and a worker. `local` trains in the process of the command. The validation before the first step counts in
both. Writes benchmarks/results/start.md and start.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from owt_data import PrepareOptions, prepare

ROOT = Path(__file__).parent.parent
POLL_S = 0.02


def seconds_to_first_step(hardware: str, tokens: Path) -> float:
    """Return the seconds from the start of a command to the record of its first step."""
    with tempfile.TemporaryDirectory() as storage:
        command = [
            sys.executable, str(ROOT / "apps/pretrain"), "--data", str(tokens), "--hardware", hardware,
            "--storage-path", storage, "--name", "run", "--train.max-steps", "2", "--train.log-every", "1",
        ]  # fmt: skip
        metrics = Path(storage) / "run/metrics.jsonl"
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not (metrics.exists() and '"step": 1,' in metrics.read_text()):
            assert process.poll() is None, process.returncode
            time.sleep(POLL_S)
        seconds = time.perf_counter() - began
        assert process.wait() == 0
    return seconds


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"local": [], "cpu:1": []}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        prepare("builtin", tokens, PrepareOptions(tokenizer="bytes"))
        for number in range(options.rounds):
            for hardware, values in seconds.items():
                values.append(seconds_to_first_step(hardware, tokens))
                print(f"round {number + 1}, {hardware}: {values[-1]:.1f} s", flush=True)
    medians = {hardware: statistics.median(values) for hardware, values in seconds.items()}
    result = {
        "seconds": seconds,
        "medians": medians,
        "ratio": medians["cpu:1"] / medians["local"],
        "config": f"quickstart model, tokens prepared before, {options.rounds} rounds",
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("jax", "flax", "ray")}},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "start.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "start.md").write_text(
        "# Seconds from the command to the first training step\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| `--hardware local` | `--hardware cpu:1` | ratio of medians |\n|---|---|---|\n"
        f"| {medians['local']:.1f} s | {medians['cpu:1']:.1f} s | {result['ratio']:.2f} |\n"
    )
    print((options.out / "start.md").read_text())


if __name__ == "__main__":
    main()
