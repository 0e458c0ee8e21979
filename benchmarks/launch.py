"""What `launch` costs a training loop: steps of 20 ms under it against the same steps bare, in turns in the same run.

    uv run benchmarks/launch.py --rounds 3

Under the wrapper every step asks whether to stop, and every tenth logs metrics to the driver; the bare loop does
neither. Both run in a process of one jax device with the same environment; once the loop may use a single CPU, as the
host of an accelerator would, and once all of the machine's, which it then shares with Ray's own processes. The first
seconds are left out, where processes of Ray's still start beside the loop. Writes benchmarks/results/launch.md and
launch.json.
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
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS, LOG_EVERY, STEP_S = 1000, 10, 0.020
WARMUP_STEPS = 2000
LOOPS = ("bare", "wrapped")
CASES = {"one CPU": 1, "all CPUs": os.cpu_count() or 1}


def time_steps(config: dict[str, Any], after_step: Callable[[int, Any], None] = lambda step, x: None) -> list[float]:
    """Seconds of each step, after the warm-up."""
    os.sched_setaffinity(0, range(config["cpus"]))  # before jax makes its threads
    import jax
    import jax.numpy as jnp

    repeats = config["repeats"]
    step = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda i, x: jnp.tanh(x @ x) * 0.1, x))
    x = jax.block_until_ready(step(jnp.eye(256)))
    times = []
    for number in range(config["warmup_steps"] + config["steps"]):
        began = time.perf_counter()
        x = jax.block_until_ready(step(x))
        after_step(number, x)
        times.append(time.perf_counter() - began)
    return times[config["warmup_steps"] :]


def wrapped_loop(config: dict[str, Any]) -> list[float]:
    """The loop that `launch` runs."""
    from ray_jax_launch import log_metrics, stop_requested

    def after_step(number: int, x: Any) -> None:
        if number % LOG_EVERY == 0:
            log_metrics({"step": number, "loss": float(x[0, 0])})
        assert not stop_requested(number)

    return time_steps(config, after_step)


def wrapped(config: dict[str, Any]) -> list[float]:
    """The loop under `launch`."""
    from ray_jax_launch import cpu, launch

    with tempfile.TemporaryDirectory() as storage:
        received = []
        result = launch(
            wrapped_loop, config, hardware=cpu(1), storage_path=storage, name="run",
            on_metrics=lambda rank, metrics: received.append(metrics),
        )  # fmt: skip
    assert len(received) == (config["warmup_steps"] + config["steps"]) // LOG_EVERY
    return result.return_value


def in_process(name: str, config: dict[str, Any]) -> float:
    """Median seconds of a step, in a process of its own and, for the wrapped loop, a cluster of its own."""
    from ray_jax_launch import cpu, worker_environment

    environment = os.environ | worker_environment(cpu(1))
    command = [sys.executable, __file__, "--only", name, "--config", json.dumps(config)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return statistics.median(json.loads(done.stdout))


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps((time_steps if options.only == "bare" else wrapped)(options.config)))
        return
    cases: dict[str, dict[str, Any]] = {}
    for name, cpus in CASES.items():
        probe = {"cpus": cpus, "repeats": 40, "steps": 200, "warmup_steps": 100}
        repeats = max(1, round(40 * STEP_S / in_process("bare", probe)))
        cases[name] = {"config": {**probe, "repeats": repeats, "steps": STEPS, "warmup_steps": WARMUP_STEPS}}
    for number in range(options.rounds):
        for name, case in cases.items():
            case.setdefault("rounds", []).append({loop: in_process(loop, case["config"]) for loop in LOOPS})
            print(f"round {number + 1}, {name}: {case['rounds'][-1]}", flush=True)
    for case in cases.values():
        bare_s, wrapped_s = (statistics.median(part[loop] for part in case["rounds"]) for loop in LOOPS)
        case |= {"bare_step_s": bare_s, "wrapped_step_s": wrapped_s, "ratio": bare_s / wrapped_s}
    result = {
        "cases": cases,
        "config": f"one CPU worker, {STEPS} steps after {WARMUP_STEPS} that are left out, {options.rounds} rounds",
        "hardware": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("jax", "ray")}},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "launch.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = ""
    for name, case in cases.items():
        by_round = ", ".join(f"{part['bare'] / part['wrapped']:.3f}" for part in case["rounds"])
        times = " | ".join(f"{case[f'{loop}_step_s'] * 1e3:.2f} ms" for loop in LOOPS)
        rows += f"| {name} | {times} | {case['ratio']:.3f} | {by_round} |\n"
    (options.out / "launch.md").write_text(
        "# A loop under `launch` against the same loop bare\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| the loop may use | bare step | under `launch` | ratio of medians | by round |\n|---|---|---|---|---|\n"
        + rows
    )
    print((options.out / "launch.md").read_text())


if __name__ == "__main__":
    main()
