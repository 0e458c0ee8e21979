"""Kills of runs that continue on other numbers of workers, with `--train.num-shards 4`: the same bits at the end.

    uv run benchmarks/exact.py --kills 60 --replays 100

The reference is an undisturbed run with `local`. Three other runs go on at the same time: on disk, in object storage
(moto, on this machine), and elastic on a Ray cluster of five nodes, of which some are lost and some gained. Each kill
is a SIGKILL. Where it ends the command, the next command continues the run on other hardware: see `PLAN`. A kill comes
at a random time of a start, or at its step: the kills are spread over the steps, so that each hardware computes some.
A run that ends before its last kill is followed by another one.

At the end of each run, the digests of the parameters and of the optimizer state in the last checkpoint, of all losses,
of the metrics without times and of the samples must be those of the reference. Random steps of the first run on disk
are computed again by `replay`, with `local`. Writes benchmarks/results/exact.md and exact.json. Exits with 1 if a
digest or a step differs, a command hangs, or an undisturbed command fails.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from environment import environment
from kill_results import TIMES
from moto.server import ThreadedMotoServer
from options import count
from pyarrow.fs import S3FileSystem
from watched_run import COMMAND, ROOT, SECOND_RAYLET, Nodes, WatchedRun

from nnx_gpt2 import abstract_train_state, create_optimizer, root_digest, tensor_digests
from owt_data import PrepareOptions, prepare
from pretrain._run.files import read_lines
from pretrain._run.find import find_run
from pretrain._run.folder import locate
from pretrain._run.log_parts import STARTS, TEXTS
from pretrain._run.metrics import read_records
from pretrain._surroundings.private_cache import private_cache
from ray_jax_launch import Checkpoints

# The hardware of a command, then its victims, by the names of `VICTIMS`. The last one of a line ends the command, and
# the next line continues the run. The last line ends it.
PLAN = {
    "disk": """
        cpu:2 worker worker controller command
        local command
        cpu:4 worker controller worker all
        cpu:1 worker controller worker node
        local command
        cpu:2 worker controller all
        cpu:1 command
        cpu:4 worker command
        cpu:1
    """,
    "object storage": """
        cpu:1 worker controller worker command
        local command
        cpu:2 worker controller worker node
        local command
        cpu:4 worker worker controller all
        cpu:2 command
        cpu:1 worker controller worker all
        local command
        cpu:2
    """,
    "elastic": """
        cpu:1-4 worker node node worker gain all
        cpu:1-4 node node node worker gain worker all
        cpu:1-4 worker node gain command
        cpu:1-4 node node worker gain worker controller all
        cpu:1-4
    """,
}
VICTIMS = {
    "worker": "ray::RayTrainWorker",
    "controller": "ray::TrainController",
    "command": COMMAND,
    "all": COMMAND,  # and each process below it, and the cluster of nodes
    "node": "raylet",  # of another node in a cluster, which goes on; else of the only node, which ends the command
}
ENDS_COMMAND = ("command", "all")
MAX_STEPS, CHECKPOINT_EVERY, LOG_EVERY = 600, 20, 2
OPTIONS = {
    "--model.num-layers": 2, "--model.num-heads": 2, "--model.embed-dim": 64, "--model.seq-len": 64,
    "--model.dropout-rate": 0.1, "--train.global-batch-size": 16, "--train.grad-accum-steps": 2,
    "--train.num-shards": 4, "--train.max-steps": MAX_STEPS, "--train.checkpoint-every": CHECKPOINT_EVERY,
    "--train.eval-every": 150, "--train.eval-tokens": 5000, "--train.log-every": LOG_EVERY,
    "--train.keep-every": 100, "--train.sample-tokens": 20, "--train.max-failures": 100, "--wait-for-resources-s": 120,
}  # fmt: skip
# A kill at a start comes at most these seconds after the victim is there.
START_S = {"command": 12.0, "all": 12.0, "node": 3.0, "worker": 3.0, "controller": 3.0}
# After a kill its effect is awaited. A command that prints nothing hangs.
SETTLE_S, HANG_S, LEFT_S = 5.0, 300.0, 90.0
MAX_COMMANDS = 40
# Commands of `replay` at the same time.
NUM_REPLAYING = 2


@dataclass
class Kill:
    """A kill, and what came of it."""

    run: str
    hardware: str
    victim: str
    moment: str
    step: int
    """The last step that the command had printed, or 0."""
    outcome: str


def plan(name: str) -> tuple[list[str], list[str]]:
    """Return the hardware for each victim of a part and for the end, and the victims."""
    visits = [line.split() for line in PLAN.get(name, "local").strip().splitlines()]
    hardware = [hardware for hardware, *victims in visits for _ in victims or [""]]
    return hardware, [victim for _, *victims in visits for victim in victims]


def digests(place: str) -> dict[str, str]:
    """Return what must be the same at the end of each run.

    Args:
        place: the folder of a finished run, or its URI.
    """
    folder, description = find_run(place)
    config = description.config
    like = abstract_train_state(config.model, create_optimizer(config.optimizer, config.train.max_steps))
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore(MAX_STEPS, {"params": like.params, "opt_state": like.opt_state})
    found = {item: root_digest(tensor_digests(state)) for item, state in restored.items()}
    recorded = json.loads(folder.result.read_text())["digests"]
    if found != {item: recorded[item] for item in found}:
        raise RuntimeError(
            f"{place}: result.json must have the digests of the last checkpoint, {found}, got {recorded}"
        )
    metrics = [{k: v for k, v in record.items() if k not in TIMES} for record in read_records(folder.metrics)]
    texts = {
        "step losses": folder.step_losses.read_bytes(),
        "validation losses": folder.val_losses.read_bytes(),
        "metrics": json.dumps(metrics, sort_keys=True).encode(),
        "samples": folder.samples.read_bytes(),
    }
    assert len(texts["step losses"]) == 4 * MAX_STEPS, "each step has a loss"
    return found | {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def digest_of(found: dict[str, str]) -> str:
    """Return one digest of all."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


class Disturbed:
    """The runs of one part of the plan.

    Args:
        name: the name of the part.
        num_kills: the number of its kills.
        until_s: the time of the monotonic clock after which no kill begins.
        tokens: the tokens.
        folder: for the output of the commands.
        storage: the storage path of the runs.
        seed: of the times of the kills.
    """

    def __init__(
        self, name: str, num_kills: int, until_s: float, *, tokens: Path, folder: Path, storage: str, seed: int
    ) -> None:
        self.name, self._num_kills, self._until_s = name, num_kills, until_s
        self._folder, self._storage, self._rng = folder, storage, random.Random(f"{seed} {name}")
        options = OPTIONS | {"--data": tokens, "--storage-path": storage}
        self._arguments = [str(part) for option in options.items() for part in option] + ["--trackers"]
        self._nodes = Nodes(self._temporary(), num_workers=4) if name == "elastic" else None
        self._hardware, self._begin, self._is_disturbed = "", 0, False
        self.kills: list[Kill] = []
        self.runs: list[dict[str, Any]] = []

    def _temporary(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="r", dir=self._folder))

    def disturb(self) -> None:
        """Spend the kills, in as many runs as they need."""
        hardware, victims = plan(self.name)
        run = self._new_run(hardware[0])
        for on, victim in zip(hardware, victims, strict=False):
            if len(self.kills) == self._num_kills or time.monotonic() > self._until_s:
                break
            if victim == "gain":
                assert self._nodes is not None, "a cluster gains nodes"
                self._nodes.repair()
            else:
                run = self._kill(run, on, victim)
        if self._nodes is not None:
            self._nodes.repair()
        while run.command.poll() != 0:
            if run.command.poll() is not None:
                self._start(run, hardware[-1])
            self._wait(run, lambda: False)
        self._finish(run)

    def _new_run(self, hardware: str) -> WatchedRun:
        """Start a run."""
        name = f"{self.name.replace(' ', '-')}-{len(self.runs) + 1}"
        place = locate(f"{self._storage}/{name}")
        # Workers write the files of a run in object storage here first.
        folder = place.path if place.uri is None else private_cache() / "workers" / place.path.name
        log = self._folder / f"{name}.log"
        run = WatchedRun(folder, [*self._arguments, "--name", name], MAX_STEPS, log, self._nodes, {})
        self._start(run, hardware)
        return run

    def _start(self, run: WatchedRun, hardware: str) -> None:
        """Start the command, or continue the run."""
        if (run.num_commands and not self._is_disturbed) or run.num_commands == MAX_COMMANDS:
            raise RuntimeError(f"a command exited with {run.command.returncode}: {run.output(0)[-2000:]}")
        arguments = run.arguments
        run.arguments = [*arguments, "--hardware", hardware]
        self._begin = run.log_size()
        run.start()
        run.arguments, self._hardware, self._is_disturbed = arguments, hardware, False

    def _kill(self, run: WatchedRun, hardware: str, victim: str) -> WatchedRun:
        """Kill a process of the run, or of the next run if this one ends before. Return the run that was killed."""
        at = (len(self.kills) + self._rng.random()) / (self._num_kills + 1) * MAX_STEPS
        step = self._rng.choice((0, int(at), int(at)))
        while True:
            if run.command.poll() is not None:
                if run.command.returncode == 0:
                    self._finish(run)
                    run = self._new_run(hardware)
                else:
                    self._start(run, hardware)
            if (process := self._wait_for_victim(run, victim, step)) is not None:
                break
        name, moment = f"{self.name} {len(self.runs) + 1}", "step" if step else "start"
        kill = Kill(name, self._hardware, victim, moment, self._steps(run)[-1], "went on")
        for one in [process, *(below for below, _ in run.processes() if victim == "all")]:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self._is_disturbed = True
        self.kills.append(kill)
        self._settle(run, victim)
        if run.command.poll() is not None:
            kill.outcome = f"exit {run.command.returncode}"
        print(asdict(kill), flush=True)
        self._begin = run.log_size()
        return run

    def _wait_for_victim(self, run: WatchedRun, victim: str, step: int) -> psutil.Process | None:
        """Wait for the step and the victim. Return None if the command ends before."""
        name = SECOND_RAYLET if victim == "node" and self._nodes is not None else VICTIMS[victim]
        found: list[psutil.Process] = []

        def holds() -> bool:
            if self._steps(run)[-1] < step:
                return False
            found[:] = [one for one in [run.find(name)] if one is not None]
            return bool(found)

        self._wait(run, holds)
        time.sleep(self._rng.uniform(0, START_S.get(victim, 3.0)) if not step else 0.0)
        return found[0] if found and found[0].is_running() and run.command.poll() is None else None

    def _steps(self, run: WatchedRun) -> list[int]:
        """Return 0 and the steps that were printed since the start or the last kill."""
        return [0, *map(int, re.findall(r"step +(\d+)/", run.output(self._begin)))]

    def _settle(self, run: WatchedRun, victim: str) -> None:
        """Wait for the effect of a kill."""
        ends_command = victim in ENDS_COMMAND or (victim == "node" and self._nodes is None)
        until_s = time.monotonic() + SETTLE_S
        self._wait(run, lambda: not ends_command and time.monotonic() > until_s)
        if victim == "all" and self._nodes is not None:
            self._nodes.close()
            self._nodes = run.nodes = Nodes(self._temporary(), num_workers=4)

    def _wait(self, run: WatchedRun, holds: Callable[[], bool]) -> None:
        """Wait for a condition or the end of the command.

        Raises:
            RuntimeError: the command hangs.
        """
        sign, since_s = run.sign(), time.monotonic()
        while run.command.poll() is None and not holds():
            time.sleep(0.2)
            if run.sign() != sign:
                sign, since_s = run.sign(), time.monotonic()
            if time.monotonic() - since_s > HANG_S:
                raise RuntimeError(f"no sign of life for {HANG_S:.0f} s: {run.output(0)[-2000:]}")

    def _finish(self, run: WatchedRun) -> None:
        """Note the digests of a finished run, and the workers of each of its starts."""
        name = f"{self.name} {len(self.runs) + 1}"
        place = f"{self._storage}/{run.arguments[-1]}"
        workers = [start["workers"] for start in read_lines(find_run(place)[0].starts, TEXTS[STARTS])]
        row = {
            "run": name,
            "kills": sum(kill.run == name for kill in self.kills),
            "commands": run.num_commands,
            "workers": workers,
            "digests": digests(place),
        }
        self.runs.append(row)
        print(row, flush=True)
        run.left_running(LEFT_S)

    def close(self) -> None:
        """End the cluster."""
        if self._nodes is not None:
            self._nodes.close()


def replay(run: Path, num_steps: int, seed: int) -> list[int]:
    """Compute random steps of a finished run again, and return those that differ."""

    def differs(step: int) -> bool:
        arguments = ["replay", str(run), "--step", str(step), "--hardware", "local", "--json"]
        command = [sys.executable, str(ROOT / "apps" / "pretrain"), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:
            raise RuntimeError(f"replay of step {step} ended with {done.returncode}")
        answer = json.loads(done.stdout)
        return not (answer["verified"] and answer["num_losses"] == 1)

    steps = sorted(random.Random(seed).sample(range(1, MAX_STEPS + 1), num_steps))
    with ThreadPoolExecutor(NUM_REPLAYING) as threads:
        return [step for step, is_other in zip(steps, threads.map(differs, steps), strict=True) if is_other]


def write(out: Path, result: dict[str, Any]) -> bool:
    """Write the results. Return whether each run has the digests of the reference, and each step was computed again."""
    reference, *runs = result["runs"]
    kills, replays = result["kills"], result["replays"]
    same = [run for run in runs if run["digests"] == reference["digests"]]
    rows = "".join(
        f"| {run['run']} | {run['kills']} | {run['commands']} | {', '.join(map(str, run['workers']))} | "
        f"`{digest_of(run['digests'])[:16]}` | {'yes' if run['digests'] == reference['digests'] else 'NO'} |\n"
        for run in result["runs"]
    )
    parts = "".join(
        f"| {what} | `{value}` | "
        + (", ".join(run["run"] for run in runs if run["digests"][what] != value) or "none")
        + " |\n"
        for what, value in reference["digests"].items()
    )
    table = "".join(f"| {' | '.join(map(str, kill.values()))} |\n" for kill in kills)
    counts = ", ".join(f"{victim} {number}" for victim, number in Counter(kill["victim"] for kill in kills).items())
    where = ", ".join(f"{one} {number}" for one, number in Counter(kill["hardware"] for kill in kills).items())
    out.mkdir(parents=True, exist_ok=True)
    (out / "exact.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "exact.md").write_text(
        "# Kills, and other numbers of workers: the same bits\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        f"{len(kills)} kills in {len(runs)} runs. Runs with the digest of the undisturbed run: {len(same)} of "
        f"{len(runs)}.\n\n"
        f"By victim: {counts}. By hardware: {where}.\n\n"
        f"Random steps of the run disk 1 computed again by `replay`: {replays['steps']}, of which "
        f"{len(replays['differ'])} differ.\n\n"
        "The workers are those of each start that reached the first step, in the order of the starts. The first run is "
        "the undisturbed one, with `local`.\n\n"
        "| run | kills | commands | workers | digest | the same |\n|---|---|---|---|---|---|\n"
        f"{rows}\n"
        "The digest is the SHA-256 of these:\n\n"
        f"| what | SHA-256 of the undisturbed run | runs that differ |\n|---|---|---|\n{parts}\n"
        "A kill at a start comes at most 12 s after the command has begun, or 3 s after the victim has. After an exit, "
        "the next command continues the run, on the hardware of the next row. `went on` says that the command did not "
        "end: it started the workers again where the kill had ended them.\n\n"
        f"| run | hardware | victim | moment | last step printed | outcome |\n|---|---|---|---|---|---|\n{table}"
    )
    return len(same) == len(runs) and not replays["differ"]


def serve_bucket() -> tuple[ThreadedMotoServer, str]:
    """Start an S3 server, and set the variables with its address. Return the server and the URI of a bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    return server, "s3://bucket"


def main() -> None:
    """Kill, compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=count, default=60, help="number of kills, at most 20 in a part (default: %(default)s)"
    )
    parser.add_argument(
        "--replays", type=int, choices=range(MAX_STEPS + 1), metavar="N", default=0,
        help="random steps to compute again (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=list(PLAN), default=list(PLAN), help="default: all")
    parser.add_argument("--minutes", type=count, default=600, help="begin no kill later than this")
    parser.add_argument("--seed", type=int, default=1, help="seed of the times of the kills")
    parser.add_argument("--keep", type=Path, help="folder for the runs and their output; by default they are deleted")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    if options.replays and "disk" not in options.parts:
        parser.error("--replays needs a run on disk. Give --parts disk.")
    # The commands answer signals also where this process must not, as under `nohup`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    until_s = time.monotonic() + 60 * options.minutes
    with contextlib.ExitStack() as stack:
        folder = (options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ex")))).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        server, bucket = serve_bucket()
        stack.callback(server.stop)
        text = folder / "text.txt"
        text.write_text("".join(inspect.getsource(module) for module in (argparse, random, signal, tempfile)))
        prepare(str(text), folder / "tokens", PrepareOptions(tokenizer="bytes"))

        def part(name: str, num_kills: int) -> Disturbed:
            storage = f"{bucket}/runs" if name == "object storage" else str(folder / "runs")
            made = Disturbed(
                name, num_kills, until_s, tokens=folder / "tokens", folder=folder, storage=storage, seed=options.seed
            )
            stack.callback(made.close)
            return made

        least, rest = divmod(options.kills, len(options.parts))
        shares = {name: least + (rank < rest) for rank, name in enumerate(options.parts)}
        parts = [part("undisturbed", 0), *(part(name, num_kills) for name, num_kills in shares.items() if num_kills)]
        with ThreadPoolExecutor() as threads:
            futures: dict[str, Future[None]] = {}
            for one in parts:
                futures[one.name] = threads.submit(one.disturb)
                time.sleep(30)  # on two cores, several starts of Ray at once take longer than its limit
        errors = [f"{name}: {future.exception()}" for name, future in futures.items() if future.exception()]
        if errors:
            sys.exit("\n".join(errors))
        differ = replay(folder / "runs" / "disk-1", options.replays, options.seed) if options.replays else []
        result = {
            "config": "2 layers of width 64, dropout 0.1, 16 windows of 64 bytes as 4 shards of 2 microbatches, "
            f"{MAX_STEPS} steps, a checkpoint every {CHECKPOINT_EVERY}",
            **environment("pretrain", "nnx-gpt2", "ray-jax-launch", "jax", "ray"),
            "runs": [run for one in parts for run in one.runs],
            "kills": [asdict(kill) for one in parts for kill in one.kills],
            "replays": {"steps": options.replays, "differ": differ},
        }
        is_good = write(options.out, result)
    print((options.out / "exact.md").read_text())
    if not is_good:
        sys.exit("a digest or a step differs")


if __name__ == "__main__":
    main()
