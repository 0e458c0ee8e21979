"""Memory of each process of a long run: a tiny model for a million steps, with a record every ten steps.

    uv run benchmarks/long_run.py
    uv run benchmarks/long_run.py --steps 50000 --hardware local

Resident memory at every tenth of the run, of the command and of all processes that it has started, with those of Ray.
It must not grow after the first 10,000 steps: no process keeps anything of a step for good. Checkpoints and validations
are made every 1,000 steps. Writes results/long_run.md and long_run.json after each hardware.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from environment import environment
from options import count

from pretrain._run.metrics import TEXT_METRICS
from pretrain._run.partial_reads import last_lines

ROOT = Path(__file__).parent.parent
HARDWARE = ("local", "cpu:1")
WARMUP_STEPS = 10_000
EVERY = 1000
_POLL_S = 0.2
_OPTIONS = [
    "--preset=quickstart", "--model.num-layers=1", "--model.embed-dim=16", "--model.num-heads=1", "--model.seq-len=16",
    "--train.global-batch-size=2", "--train.log-every=10", f"--train.eval-every={EVERY}", "--train.eval-tokens=512",
    f"--train.checkpoint-every={EVERY}", "--train.sample-tokens=4", "--name=run",
]  # fmt: skip


def memory(command: int) -> dict[str, float]:
    """Return the resident memory in MB of the processes of a command, by their names. Equal names are added."""
    found: dict[str, float] = {}
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(command)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name = "the command" if process == first else _name(process.cmdline())
                found[name] = found.get(name, 0.0) + process.memory_info().rss / 1e6
    return found


def _name(command: list[str]) -> str:
    """Return the name of a process: `ray::NAME` of a worker of Ray, a script, a module, or a program."""
    line = " ".join(command)
    if match := re.search(r"ray::\w+|[\w.]+\.py\b|(?<=-m )[\w.]+", line):
        return match[0]
    return Path(command[0]).name if command else "ended"


def watched(hardware: str, steps: int) -> dict[int, dict[str, float]]:
    """Train, and return the memory of the processes by the step: at every tenth, and the last before the end."""
    with tempfile.TemporaryDirectory() as storage:
        options = [*_OPTIONS, f"--hardware={hardware}", f"--train.max-steps={steps}", f"--storage-path={storage}"]
        process = subprocess.Popen([sys.executable, str(ROOT / "apps/pretrain"), *options], stdout=subprocess.DEVNULL)
        samples, step, last = dict[int, dict[str, float]](), 0, dict[str, float]()
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                lines = last_lines(Path(storage) / "run" / "metrics.jsonl", 1, TEXT_METRICS)
                if lines and lines[0]["step"] < steps:
                    step, last = lines[0]["step"], memory(process.pid)
                    if step * 10 // steps > max(samples, default=0) * 10 // steps:
                        samples[step] = last
                        print(f"{hardware}: step {step:,}: {_line(last)}", flush=True)
        finally:
            process.terminate()
            code = process.wait()
    if code != 0:
        raise RuntimeError(f"the run must end with code 0, got {code}. Run the command by itself to see its output.")
    return samples | {step: last}


def _line(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {number:,.0f} MB" for name, number in sorted(values.items()))


def growth(samples: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return the growth in MB of each process that lives from the end of the warm-up to the end of the run."""
    steps = sorted(step for step in samples if step >= WARMUP_STEPS) or sorted(samples)
    first, last = samples[steps[0]], samples[steps[-1]]
    return {name: last[name] - first[name] for name in first if name in last}


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the tables and the values."""
    text = [f"# Memory of a long run\n\n{results['date']}, {results['hardware']}. Resident memory in MB.\n"]
    for hardware, run in results["runs"].items():
        samples = run["samples"]
        names = sorted({name for sample in samples.values() for name in sample})
        text.append(
            f"\n## `--hardware {hardware}`\n\n| process | {' | '.join(f'{step:,}' for step in samples)} | growth |"
        )
        text.append(f"| {' | '.join(['---'] * (len(samples) + 2))} |")
        for name in names:
            cells = [f"{sample[name]:,.0f}" if name in sample else "" for sample in samples.values()]
            grown = f"{run['growth'][name]:+,.1f}" if name in run["growth"] else ""
            text.append(f"| {name} | {' | '.join(cells)} | {grown} |")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "long_run.md").write_text("\n".join(text) + "\n")
    (folder / "long_run.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    """Train on each hardware, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=1_000_000, help="steps of a run (default: %(default)s)")
    parser.add_argument("--hardware", nargs="+", choices=HARDWARE, default=HARDWARE, help="the hardware")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    args = parser.parse_args()
    results = environment("jax", "ray") | {"steps": args.steps, "options": _OPTIONS, "runs": {}}
    for hardware in args.hardware:
        samples = watched(hardware, args.steps)
        results["runs"][hardware] = {"samples": samples, "growth": growth(samples)}
        write(results, args.out)
        print(f"{hardware}: growth after {WARMUP_STEPS:,} steps: {results['runs'][hardware]['growth']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
