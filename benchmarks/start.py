"""Seconds from the command to the first step, `--hardware local` against `cpu:1`, and from a kill to the next step.

    uv run benchmarks/start.py --rounds 5

Both train the model of the preset quickstart for one step, in turns, on tokens that are prepared before. `cpu:1` starts
a Ray cluster and a worker. `local` trains in the process of the command. The validation before the first step counts in
both. The first round compiles. In the later rounds, jax finds the programs in a cache, as at a user's second start.
Each candidate has its own cache.

The last row is for a kill. The script kills the worker of a run on `cpu:1` by SIGKILL, and counts the seconds until a
new worker has done a step. Writes benchmarks/results/start.md and start.json.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from environment import environment
from options import count

from owt_data import PrepareOptions, prepare

ROOT = Path(__file__).parent.parent
POLL_S = 0.02
# Time for a started save to end.
SAVED_S = 3.0


def seconds_to_first_step(hardware: str, tokens: Path, cache: Path) -> float:
    """Return the seconds from the start of a command to the record of its first step."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    with tempfile.TemporaryDirectory() as storage:
        command = [
            sys.executable, str(ROOT / "apps/pretrain"), "--data", str(tokens), "--hardware", hardware,
            "--storage-path", storage, "--name", "run", "--train.max-steps", "2", "--train.log-every", "1",
        ]  # fmt: skip
        metrics = Path(storage) / "run/metrics.jsonl"
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        while not (metrics.exists() and '"step": 1,' in metrics.read_text()):
            assert process.poll() is None, process.returncode
            time.sleep(POLL_S)
        seconds = time.perf_counter() - began
        assert process.wait() == 0
    return seconds


def seconds_from_kill(tokens: Path) -> float:
    """Return the seconds from the kill of a worker to the next training step."""
    with tempfile.TemporaryDirectory() as storage:
        command = [
            sys.executable, str(ROOT / "apps/pretrain"), "--data", str(tokens), "--hardware", "cpu:1",
            "--storage-path", storage, "--name", "run", "--train.max-steps", "100000", "--train.checkpoint-every", "50",
            "--train.eval-every", "100000",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(process, lambda: "saving" in phases(storage))
        time.sleep(SAVED_S)
        killed_s = time.time()
        os.kill(worker_of(process.pid), signal.SIGKILL)
        wait_for(process, lambda: phases(storage).get("restarting", 0) < phases(storage).get("training", 0) > killed_s)
        seconds = phases(storage)["training"] - killed_s
        process.send_signal(signal.SIGINT)
        process.wait()
    return seconds


def phases(storage: str) -> dict[str, float]:
    """Return the Unix time at which each phase of the run began last."""
    path = Path(storage) / "run/phases.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {phase["phase"]: phase["time_s"] for phase in map(json.loads, lines)}


def wait_for(process: subprocess.Popen, is_true: Callable[[], bool]) -> None:
    """Wait for a condition, while the process runs."""
    while not is_true():
        assert process.poll() is None, process.returncode
        time.sleep(POLL_S)


def worker_of(command: int) -> int:
    """Return the process of the training worker among the descendants of a command."""
    parents = {}
    for process in psutil.process_iter(["ppid", "cmdline"]):
        parents[process.pid] = (process.info["ppid"], " ".join(process.info["cmdline"] or []))
    for pid, (parent, line) in parents.items():
        while parent not in (0, command):
            parent = parents.get(parent, (0, ""))[0]
        if parent == command and line.startswith("ray::RayTrainWorker"):
            return pid
    raise RuntimeError(f"process {command} must have a training worker, got none. Report this error.")


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, help="turns of each, 2 or more (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, got 1: the first round compiles")
    seconds: dict[str, list[float]] = {"local": [], "cpu:1": []}
    after_kill: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # bytecode is cached, as in a used installation
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "kill")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
        prepare("builtin", tokens, PrepareOptions(tokenizer="bytes"))
        for number in range(options.rounds):
            for hardware, values in seconds.items():
                values.append(seconds_to_first_step(hardware, tokens, Path(folder) / hardware))
                print(f"round {number + 1}, {hardware}: {values[-1]:.1f} s", flush=True)
            after_kill.append(seconds_from_kill(tokens))
            print(f"round {number + 1}, from the kill: {after_kill[-1]:.1f} s", flush=True)
    # The first round fills the cache.
    medians = {hardware: statistics.median(values[1:]) for hardware, values in seconds.items()}
    result = {
        "seconds": seconds,
        "first_round": {hardware: values[0] for hardware, values in seconds.items()},
        "seconds_from_kill": after_kill,
        "median_from_kill": statistics.median(after_kill),
        "medians": medians,
        "ratio": medians["cpu:1"] / medians["local"],
        "config": f"quickstart model, tokens prepared before, {options.rounds} rounds",
        **environment("jax", "flax", "ray"),
    }
    first = result["first_round"]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "start.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "start.md").write_text(
        "# Seconds from the command to the first training step\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| | `--hardware local` | `--hardware cpu:1` | ratio |\n|---|---|---|---|\n"
        f"| first round, which compiles | {first['local']:.1f} s | {first['cpu:1']:.1f} s "
        f"| {first['cpu:1'] / first['local']:.2f} |\n"
        f"| median of the later rounds | {medians['local']:.1f} s | {medians['cpu:1']:.1f} s "
        f"| {result['ratio']:.2f} |\n"
        f"| kill of a worker to the next step, median | | {result['median_from_kill']:.1f} s | |\n"
    )
    print((options.out / "start.md").read_text())


if __name__ == "__main__":
    main()
