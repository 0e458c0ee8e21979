"""N workers of one small model on this machine: time to start, steps/s, a kill, a save to S3, a resume, and memory.

    uv run benchmarks/workers.py --workers 4 8 16

The workers are processes of one device each, which share a model of two layers of width 32. The checkpoints go to an S3
server on loopback (moto). For each number of workers:

- start: from `launch` to the end of the first step, with the start of Ray's cluster
- steps/s of 200 steps, after the first ten
- save: one save, with the wait for its end
- kill: from SIGKILL of a worker to the end of the next step of the new workers
- resume: from a second `launch`, with a new cluster, to the end of its first step

The load is the number of processes that ran or waited for a CPU in the minute before. Above the number of CPU cores,
the times are those of a busy machine. The memory is the resident memory of the workers after 200 steps (median), and
their proportional share (PSS), in which memory that processes share counts once. A second table has the resident memory
of a process after each of its imports.
Writes benchmarks/results/workers.md and workers.json after each number of workers.
"""

import argparse
import json
import logging
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

import psutil
import ray
from environment import environment
from moto.server import ThreadedMotoServer
from options import count
from pyarrow.fs import S3FileSystem

from ray_jax_launch import cpu, launch

ROOT = Path(__file__).parent.parent
WARMUP_STEPS, STEPS = 10, 200
SAVED_STEP = WARMUP_STEPS + STEPS
KILLED_AFTER, RESUMED_STEPS = 5, 10

# A process like a worker's: each line is an import, and a name for the table.
IMPORTS = """
import json, time, psutil
began_s, rows = time.perf_counter(), []
def note(name):
    rows.append([name, psutil.Process().memory_info().rss, time.perf_counter() - began_s])
note("Python")
import ray
note("ray")
import ray.train.v2.jax
note("ray.train, with ray.data, pyarrow and pandas")
import jax
note("jax")
import flax.nnx
note("flax")
import optax
note("optax")
import orbax.checkpoint
note("orbax")
import ray_jax_launch._train.worker_context, ray_jax_launch._checkpoint.checkpoints
note("ray_jax_launch")
import nnx_gpt2._train_step, nnx_gpt2._optimizer
note("nnx_gpt2")
import owt_data._stream.ray_reader
note("owt_data")
import pretrain._training.loop
note("pretrain")
jax.devices()
note("the devices of jax")
print(json.dumps(rows))
"""


def train(config: dict[str, Any]) -> None:
    """Train until the last step, and save at one of them. Each rank sends its process, rank 0 its steps."""
    import jax
    import numpy as np

    from nnx_gpt2 import (
        GPT2Config,
        OptimizerConfig,
        abstract_train_state,
        create_optimizer,
        create_train_state,
        make_mesh,
        make_train_step,
        put_batch,
    )
    from ray_jax_launch import Checkpoints, log_metrics, stop_requested

    model = GPT2Config(vocab_size=257, seq_len=32, num_layers=2, num_heads=2, embed_dim=32, dtype="float32")
    mesh, optimizer = make_mesh(), create_optimizer(OptimizerConfig(), config["last_step"])
    train_step = make_train_step(model, optimizer)
    rows = np.zeros((1, model.seq_len + 1), np.uint16)
    log_metrics({"pid": os.getpid()})
    with Checkpoints() as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:
            state = checkpoints.restore(start, {"state": abstract_train_state(model, optimizer, mesh)})["state"]
        else:
            state = create_train_state(model, optimizer, jax.random.key(0), mesh)
        for step in range(start + 1, config["last_step"] + 1):
            state, metrics = train_step(state, put_batch(rows, mesh), jax.random.key(1))
            jax.block_until_ready(metrics)
            assert not stop_requested(step, metrics["loss"])
            if jax.process_index() == 0:
                log_metrics({"step": step, "time_s": time.time()})
            if step == config["saved_step"]:
                began_s = time.time()
                checkpoints.save(step, {"state": state}, metadata={})
                checkpoints.wait()
                log_metrics({"save_s": time.time() - began_s})


class Run:
    """A run as the driver sees it.

    Args:
        num_workers: the number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.pids: list[int] = []
        self.times_s: dict[int, float] = {}
        self.saves_s: list[float] = []
        self.memory: list[dict[str, float]] = []
        self.killed_s: float | None = None
        self.after_kill_s: float | None = None

    def launch(self, last_step: int) -> float:
        """Train to a step on a new cluster. Return the seconds to the end of the first step."""
        self.times_s.clear()
        began_s = time.time()
        config = {"last_step": last_step, "saved_step": SAVED_STEP}
        launch(
            train, config, hardware=cpu(self._num_workers), storage_path="s3://bucket/runs",
            name=f"workers-{self._num_workers}", on_metrics=self._see,
        )  # fmt: skip
        ray.shutdown()
        return self.times_s[min(self.times_s)] - began_s

    def _see(self, rank: int, metrics: dict[str, Any]) -> None:
        if "pid" in metrics:
            self.pids.append(int(metrics["pid"]))
        if "save_s" in metrics:
            self.saves_s.append(metrics["save_s"])
        if "step" not in metrics:
            return
        if self.killed_s is not None and self.after_kill_s is None and metrics["time_s"] > self.killed_s + 1:
            self.after_kill_s = metrics["time_s"] - self.killed_s
        self.times_s.setdefault(int(metrics["step"]), metrics["time_s"])
        if metrics["step"] == SAVED_STEP:
            self.memory = [memory_of(pid) for pid in self.pids[: self._num_workers]]
        if metrics["step"] == SAVED_STEP + KILLED_AFTER and self.killed_s is None:
            self.killed_s = time.time()
            os.kill(self.pids[self._num_workers - 1], signal.SIGKILL)


def memory_of(pid: int) -> dict[str, float]:
    """Return the resident memory of a process and its proportional share, in MB."""
    memory = psutil.Process(pid).memory_full_info()
    return {"rss_mb": memory.rss / 1e6, "pss_mb": memory.pss / 1e6}


def measure(num_workers: int) -> dict[str, Any]:
    """Return the measurements of a number of workers."""
    run, load = Run(num_workers), os.getloadavg()[0]
    start_s = run.launch(SAVED_STEP + 2 * KILLED_AFTER)
    steps_s = run.times_s[SAVED_STEP] - run.times_s[WARMUP_STEPS]
    resume_s = run.launch(SAVED_STEP + RESUMED_STEPS)
    return {
        "workers": num_workers, "load": load, "start_s": start_s, "steps_per_s": STEPS / steps_s,
        "save_s": run.saves_s[0], "kill_to_step_s": run.after_kill_s, "resume_s": resume_s,
        **{name: statistics.median(one[name] for one in run.memory) for name in ("rss_mb", "pss_mb")},
    }  # fmt: skip


def import_costs() -> list[list[Any]]:
    """Return name, bytes and seconds after each import of a process like a worker's."""
    command = [sys.executable, "-c", IMPORTS]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def write(rows: list[dict[str, Any]], imports: list[list[Any]], folder: Path) -> None:
    """Write the tables and the values."""
    result = environment("jax", "flax", "ray") | {"rows": rows, "imports": imports}
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "workers": ("workers", str),
        "load": ("load before", lambda value: f"{value:.1f}"),
        "start_s": ("start", lambda value: f"{value:.1f} s"),
        "steps_per_s": ("steps/s", lambda value: f"{value:.1f}"),
        "save_s": ("save", lambda value: f"{value:.2f} s"),
        "kill_to_step_s": ("kill to the next step", lambda value: f"{value:.1f} s"),
        "resume_s": ("resume", lambda value: f"{value:.1f} s"),
        "rss_mb": ("resident", lambda value: f"{value:.0f} MB"),
        "pss_mb": ("PSS", lambda value: f"{value:.0f} MB"),
    }
    lines = [[title for title, _ in columns.values()], ["---"] * len(columns)]
    lines += [[text(row[name]) for name, (_, text) in columns.items()] for row in rows]
    added = [["import", "adds", "seconds"], ["---"] * 3]
    before_bytes = before_s = 0.0
    for name, num_bytes, seconds in imports:
        added.append([name, f"{(num_bytes - before_bytes) / 1e6:.0f} MB", f"{seconds - before_s:.2f} s"])
        before_bytes, before_s = num_bytes, seconds
    first, second = ("\n".join(f"| {' | '.join(line)} |" for line in table) for table in (lines, added))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workers.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "workers.md").write_text(
        f"# Workers on one machine\n\n{result['hardware']}; {result['date']}; {result['versions']}\n\n{first}\n\n"
        f"A process like a worker's after each import, in this order: {before_bytes / 1e6:.0f} MB.\n\n{second}\n"
    )


def main() -> None:
    """Measure each number of workers, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=count, nargs="+", default=[16], help="numbers of workers (default: 16)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
    )  # fmt: skip
    S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    imports, rows = import_costs(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(JAX_COMPILATION_CACHE_DIR=cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2")
        for num_workers in options.workers:
            rows.append(measure(num_workers))
            print(rows[-1], flush=True)
            write(rows, imports, options.out)
    server.stop()
    print((options.out / "workers.md").read_text())


if __name__ == "__main__":
    main()
