"""Step time of a training loop under `launch` against the same loop without it, for steps of 20 ms.

    uv run benchmarks/launch.py --turns 30

Under `launch` every step checks for a stop request, and every tenth step logs metrics to the driver. The bare loop does
neither. Each loop is a process with one jax device and the same environment. In the first case the step waits, like the
host of an accelerator. In the other cases the step computes on one CPU, or on all CPUs, which the loop under `launch`
shares with Ray's processes. The loops take turns of seconds. The other loop is stopped during a turn, with all of
its Ray processes. The first minute does not count, because Ray still starts processes.
Writes benchmarks/results/launch.md and launch.json.
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
from typing import Any

from environment import environment
from options import count

ROOT = Path(__file__).parent.parent
LOG_EVERY, STEP_S = 10, 0.020
WARMUP_S, TURN_S, SETTLE_S = 60, 4, 1
LOOPS = ("bare", "wrapped")
CASES = {"waits": 0, "computes on one CPU": 1, "computes on all CPUs": os.cpu_count() or 1}


def time_steps(config: dict[str, Any], after_step: Callable[[int, Any], None] = lambda step, x: None) -> int:
    """Record the end and the duration of each step until a file `stop` exists. Return the number of steps."""
    if config["cpus"]:
        os.sched_setaffinity(0, range(config["cpus"]))  # before jax starts its threads
    import jax
    import jax.numpy as jnp

    folder, repeats = Path(config["folder"]), config["repeats"]
    step = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda i, x: jnp.tanh(x @ x) * 0.1, x))
    x = jax.block_until_ready(step(jnp.eye(256)))
    number = 0
    with (folder / config["loop"]).open("w", buffering=1) as times:
        while number < config["max_steps"] and (number % 50 or not (folder / "stop").exists()):
            began = time.perf_counter()
            x = jax.block_until_ready(step(x))
            if not config["cpus"]:
                time.sleep(STEP_S)
            after_step(number, x)
            times.write(f"{time.time()} {time.perf_counter() - began}\n")
            number += 1
    return number


def wrapped_loop(config: dict[str, Any]) -> int:
    """Run the loop in the worker that `launch` starts."""
    from ray_jax_launch import log_metrics, stop_requested

    def after_step(number: int, x: Any) -> None:
        if number % LOG_EVERY == 0:
            log_metrics({"step": number, "loss": float(x[0, 0])})
        assert not stop_requested(number)

    return time_steps(config, after_step)


def wrapped(config: dict[str, Any]) -> None:
    """Run the loop under `launch`."""
    from ray_jax_launch import cpu, launch

    received = []
    result = launch(
        wrapped_loop, config, hardware=cpu(1), storage_path=config["folder"], name="run",
        on_metrics=lambda rank, metrics: received.append(metrics),
    )  # fmt: skip
    assert len(received) == -(-result.return_value // LOG_EVERY)


def start(config: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a loop; the wrapped loop starts its own cluster."""
    from ray_jax_launch import cpu, worker_environment

    return subprocess.Popen(
        [sys.executable, __file__, "--loop", json.dumps(config)], env=os.environ | worker_environment(cpu(1))
    )


def read_times(folder: Path, loop: str) -> list[tuple[float, float]]:
    """Return the time at the end of each step and its duration, in seconds."""
    lines = (folder / loop).read_text().splitlines()
    return [(float(ended), float(seconds)) for ended, seconds in (line.split() for line in lines)]


def send(number: int, pid: int) -> None:
    """Send a signal to a process and all its descendants."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            send(number, int(child))
    os.kill(pid, number)


def take_turns(cpus: int, repeats: int, num_turns: int) -> dict[str, list[float]]:
    """Return the median seconds of a step, by loop and turn."""
    turns: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as storage:
        folder = Path(storage)
        config = {"cpus": cpus, "repeats": repeats, "folder": storage, "max_steps": sys.maxsize}
        loops = {}
        for loop in LOOPS:
            loops[loop] = start({**config, "loop": loop})
            while not (folder / loop).exists():
                assert loops[loop].poll() is None
                time.sleep(1)
            send(signal.SIGSTOP, loops["bare"].pid)
        time.sleep(WARMUP_S)
        for number in range(2 * num_turns):
            loop, other = LOOPS[number % 2], LOOPS[(number + 1) % 2]
            send(signal.SIGSTOP, loops[other].pid)
            send(signal.SIGCONT, loops[loop].pid)
            turns.append((loop, time.time()))
            time.sleep(TURN_S)
        (folder / "stop").touch()
        for process in loops.values():
            send(signal.SIGCONT, process.pid)
            assert process.wait() == 0
        times = {loop: read_times(folder, loop) for loop in LOOPS}
    medians: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    for loop, began in turns:
        medians[loop].append(
            statistics.median(seconds for ended, seconds in times[loop] if SETTLE_S < ended - began < TURN_S)
        )
    return medians


def find_repeats(cpus: int) -> int:
    """Return the number of repetitions with which a step takes `STEP_S`."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"cpus": cpus, "repeats": 40, "folder": folder, "max_steps": 300, "loop": "bare"}
        assert start(config).wait() == 0
        probe_s = statistics.median(seconds for _, seconds in read_times(Path(folder), "bare")[100:])
    return max(1, round(40 * STEP_S / probe_s))


def main() -> None:
    """Run the loops in turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=count, default=30, help="turns of each loop (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--loop", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        {"bare": time_steps, "wrapped": wrapped}[options.loop["loop"]](options.loop)
        return
    cases: dict[str, dict[str, Any]] = {}
    for name, cpus in CASES.items():
        medians = take_turns(cpus, find_repeats(cpus) if cpus else 1, options.turns)
        ratios = [bare / under for bare, under in zip(medians["bare"], medians["wrapped"], strict=True)]
        cases[name] = {
            "bare_step_s": statistics.median(medians["bare"]),
            "wrapped_step_s": statistics.median(medians["wrapped"]),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios)[::2],
            "turns": medians,
        }
        print(name, {key: value for key, value in cases[name].items() if key != "turns"}, flush=True)
    result = {
        "cases": cases,
        "config": f"one CPU worker, {options.turns} turns of {TURN_S} s each",
        **environment("jax", "ray"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "launch.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = ""
    for name, case in cases.items():
        times = " | ".join(f"{case[f'{loop}_step_s'] * 1e3:.2f} ms" for loop in LOOPS)
        low, high = case["ratio_quartiles"]
        rows += f"| {name} | {times} | {case['ratio']:.3f} | {low:.3f} to {high:.3f} |\n"
    (options.out / "launch.md").write_text(
        "# A loop under `launch` against the same loop without it\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| step | bare loop | under `launch` | ratio of adjacent turns, median | quartiles |\n"
        "|---|---|---|---|---|\n" + rows
    )
    print((options.out / "launch.md").read_text())


if __name__ == "__main__":
    main()
