"""Seconds from the command to its end: `--preset baby` against the same training in PyTorch.

    uv run benchmarks/baby.py --data TEXT --torch-python PATH --rounds 3

PATH is an interpreter with torch and numpy. The baseline is `torch_gpt.py`: the same model, number of steps, batch,
validations, checkpoints and log lines, without Ray, in one process. It reads its text as bytes, draws its windows at
random, and takes no samples. The candidates take turns. The first turn of `pretrain` compiles, and the later ones find
the compiled programs in its cache; each round is in the table. Writes benchmarks/results/baby.md and baby.json.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from environment import environment
from options import count, python_with, text_file

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PYTORCH, LOCAL, CPU = "PyTorch", "pretrain --hardware local", "pretrain --hardware cpu:1"


def pytorch(options: argparse.Namespace, folder: Path) -> float:
    """Train with PyTorch, and return the last validation loss."""
    command = [options.torch_python, str(ROOT / "benchmarks" / "torch_gpt.py"), str(options.data), str(folder)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(re.findall(r"validation loss ([\d.]+)", printed)[-1])


def pretrain(hardware: str) -> Callable[[argparse.Namespace, Path], float]:
    """Return a function that trains with the application, and returns the last validation loss."""

    def train(options: argparse.Namespace, folder: Path) -> float:
        command = [
            sys.executable, str(ROOT / "apps/pretrain"), "--preset", "baby", "--data", str(options.data),
            "--hardware", hardware, "--storage-path", str(folder), "--name", "run",
            "--prepare.cache-path", str(folder / "tokens"),
        ]  # fmt: skip
        environment = os.environ | {"XDG_CACHE_HOME": str(options.cache)}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        records = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return json.loads(records[-1])["full_val_loss"]

    return train


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=text_file, required=True, help="a text file, such as tiny Shakespeare")
    torch = python_with("torch", "numpy")
    parser.add_argument("--torch-python", type=torch, required=True, help="interpreter with torch and numpy")
    parser.add_argument("--rounds", type=count, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    candidates = {PYTORCH: pytorch, LOCAL: pretrain("local"), CPU: pretrain("cpu:1")}
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # bytecode is cached, as in a used installation
    times, losses = defaultdict[str, list[float]](list), {}
    with tempfile.TemporaryDirectory() as cache:
        options.cache = cache
        for number in range(options.rounds):
            for name, train in candidates.items():
                with tempfile.TemporaryDirectory() as folder:
                    began = time.monotonic()
                    losses[name] = train(options, Path(folder))
                    times[name].append(time.monotonic() - began)
                print(f"round {number + 1}: {name}: {times[name][-1]:.1f} s, loss {losses[name]:.4f}", flush=True)
    asked = "import torch, numpy; print(torch.__version__)"
    torch_version = subprocess.run([options.torch_python, "-c", asked], check=True, stdout=subprocess.PIPE, text=True)
    about = environment("jax", "flax", "ray")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    result = {
        "seconds": dict(times),
        "median_s": medians,
        "ratio_to_pytorch": {name: seconds / medians[PYTORCH] for name, seconds in medians.items()},
        "full_val_loss": losses,
        "config": f"preset baby, {options.data.name} of {options.data.stat().st_size} bytes, {options.rounds} rounds",
        **about,
        "versions": about["versions"] | {"torch": torch_version.stdout.strip()},
    }
    rows = [
        f"| {name} | {medians[name]:.1f} s | {', '.join(f'{s:.1f}' for s in times[name])} "
        f"| {medians[name] / medians[PYTORCH]:.2f} | {losses[name]:.4f} |"
        for name in candidates
    ]
    text = "\n".join(
        [
            "# Preset baby, from the command to its end\n",
            f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n",
            "| candidate | median | by round | time over PyTorch's | validation loss |",
            "|---|---|---|---|---|",
            *rows,
            "\nThe same model, steps, batch, validations and checkpoints. The first round of `pretrain` compiles.",
        ]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "baby.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "baby.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
