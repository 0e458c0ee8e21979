"""Kills and stops of `apps/pretrain` in each phase: the numbers of the disturbed runs against an undisturbed one.

    uv run benchmarks/kill_matrix.py --kills 60 --hardware local cpu:1 cpu:2 nodes

A kill is a phase, a victim and a signal. The victims are the command and each process of Ray and of ours below it. The
plan is a fixed list, made from --seed. `nodes` is `cpu:2` on a Ray cluster of three nodes on this machine, with
RAY_ADDRESS. A command that a kill ends is started again, until it exits with 0. At the end of each disturbed run its
metrics, samples and the arrays of its last checkpoint are compared with those of the undisturbed run, bit for bit.

Writes benchmarks/results/kill_matrix.md and kill_matrix.json; the results of other hardware in it stay. Exits with 1 if
a number differs, a command hangs, prints a traceback, exits with a wrong code or leaves a process behind.
"""

import argparse
import contextlib
import inspect
import json
import os
import random
import re
import signal
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from environment import environment
from kill_plan import HARDWARE, Kill, plan
from kill_results import numbers, write
from options import count
from watched_run import COMMAND, PHASES, REAPER, ROOT, Nodes, WatchedRun, has_noise

from owt_data import PrepareOptions, prepare
from ray_jax_launch._reaper import KILLED

# Steps between two checkpoints: Ray Data starts after 200 steps of a start, and steps of two workers are slower.
CHECKPOINT_EVERY = {"local": 50, "cpu:1": 250, "cpu:2": 60, "nodes": 60}
NUM_CHECKPOINTS, KILLS_PER_RUN = 12, 8
# The cluster ends with these, and the command too.
FATAL = ("raylet", "gcs_server")
# A raylet ends with its agents.
ENDS_NODE = (*FATAL, "ray::DashboardAgent", "ray::RuntimeEnvAgent")
SAID, MAX_COMMANDS = ("the Ray cluster is gone", KILLED), 30
# Longest random time from the beginning of a phase to the kill. Most phases are short.
DELAY_S = {"starting": 2.0, "loading": 0.1, "training": 0.3, "ending": 0.3}
# A command without a sign of life hangs. After a kill its effect is awaited before the next kill.
HANG_S, SETTLE_S, LEFT_S = 120.0, 5.0, 30.0
# Ray's agents of a dead node try for a minute to reach the cluster, if our reaper cannot end them.
LEFT_WITHOUT_REAPER_S = 90.0


def without_folders(output: str) -> str:
    """Return the output with the last part of each path: the folders are those of this machine."""
    return re.sub(r"(?<![\w.-])/(?:[\w.-]+/)+", "", output)


def last_line(output: str) -> str:
    """Return the last line of a command, or its first words."""
    return textwrap.shorten(without_folders(output.strip().rpartition("\n")[2]), 200, placeholder=" ...")


def send(run: WatchedRun, kill: Kill, victim: psutil.Process) -> None:
    """Send the signals."""
    names = kill.signal.split()
    number = signal.SIGINT if names[0] == "Ctrl-C" else signal.Signals[names[0]]
    is_to_group = "group" in names or number == signal.SIGINT
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        for again in range(2 if "twice" in names else 1):
            if again:
                time.sleep(1.2 if number == signal.SIGINT else 0.1)
            if is_to_group and kill.victim == COMMAND:
                os.killpg(run.command.pid, number)
            else:
                victim.send_signal(number)


class Matrix:
    """The runs on one kind of hardware."""

    def __init__(self, hardware: str, kills: list[Kill], tokens: Path, folder: Path, rng: random.Random) -> None:
        self.hardware, self.pending, self.folder, self.rng = hardware, kills, folder, rng
        self.done: list[Kill] = []
        self.runs: list[dict[str, Any]] = []
        every = CHECKPOINT_EVERY[hardware]
        self.max_steps = NUM_CHECKPOINTS * every
        options = {
            "--data": tokens, "--hardware": "cpu:2" if hardware == "nodes" else hardware, "--storage-path": folder,
            "--model.num-layers": 1, "--model.num-heads": 2, "--model.embed-dim": 32, "--model.seq-len": 32,
            "--train.global-batch-size": 8, "--train.max-steps": self.max_steps, "--train.checkpoint-every": every,
            "--train.eval-every": 2 * every, "--train.eval-tokens": 20_000, "--train.log-every": every // 10,
            "--train.sample-tokens": 200, "--train.max-failures": 100, "--wait-for-resources-s": 60,
        }  # fmt: skip
        self.arguments = [str(part) for option in options.items() for part in option] + ["--trackers"]
        self.nodes = Nodes(self._temporary()) if hardware == "nodes" else None

    def _temporary(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="r", dir=self.folder))

    def run(self, name: str) -> WatchedRun:
        """Return a run that is not started."""
        folder, log = self.folder / name, self.folder / f"{name}.log"
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "jax")}
        return WatchedRun(folder, [*self.arguments, "--name", name], self.max_steps, log, self.nodes, cache)

    def disturb(self) -> None:
        """Spend the kills, in as many runs as they need."""
        reference = self.run("reference")
        reference.start()
        self._wait(reference, lambda: False)
        if (code := reference.command.wait()) != 0:
            sys.exit(f"the undisturbed run exited with {code}: {reference.output(0)[-2000:]}")
        expected = numbers(reference)
        while self.pending:
            number = len(self.runs) + 1
            run = self.run(f"run-{number}")
            kills = self._disturb_run(run, number)
            found = numbers(run) if run.command.returncode == 0 else {}
            row = {"hardware": self.hardware, "run": number, "kills": len(kills), "commands": run.num_commands}
            row |= {what: found.get(what) == value for what, value in expected.items()}
            has_reaper = all(kill.victim != REAPER for kill in kills)
            row["left_running"] = run.left_running(LEFT_S if has_reaper else LEFT_WITHOUT_REAPER_S)
            self.runs.append(row)
            print(row, flush=True)
            for kill in [kill for kill in self.pending if kill.num_tries >= 2]:
                kill.outcome = "not found"
                self.pending.remove(kill)
                self.done.append(kill)

    def _disturb_run(self, run: WatchedRun, number: int) -> list[Kill]:
        """Run the command until it exits with 0, and kill it as planned."""
        kills: list[Kill] = []
        tried: list[Kill] = []
        run.start()
        last_step = 0
        while True:
            kill = self._choose(run, tried) if len(kills) < KILLS_PER_RUN else None
            victim = None if kill is None else self._wait_for_victim(run, kill, last_step)
            if kill is None:
                self._wait(run, lambda: False)
            elif victim is None:
                tried.append(kill)
                kill.num_tries += 1
            else:
                self.pending.remove(kill)
                self.done.append(kill)
                kills.append(kill)
                kill.run = number
                kill.at_phase, phase_step = run.at()
                kill.at_step = max([phase_step, *(line["step"] for line in run.lines("metrics.jsonl")[-1:])])
                kill._num_starts, kill._log_begin = len(run.lines("starts.jsonl")), run.log_size()
                kill.at_s, last_step = time.time(), kill.at_step
                send(run, kill, victim)
                self._settle(run, kill)
            if run.command.poll() is None:
                continue
            self._note_end(run, kills)
            if run.command.returncode == 0 or run.num_commands > MAX_COMMANDS:
                break
            self._repair_nodes(run)
            run.start()
        for kill, later in zip(kills, [*kills, None][1:], strict=True):
            describe(run, kill, later)
            print(asdict(kill), flush=True)
        return kills

    def _choose(self, run: WatchedRun, tried: list[Kill]) -> Kill | None:
        """Return the next kill whose phase comes soonest."""
        rank = PHASES.index(phase) if (phase := run.at()[0]) in PHASES else 0
        middle = range(PHASES.index("training"), PHASES.index("ending"))
        open_kills = [kill for kill in self.pending if kill not in tried]
        possible = [k for k in open_kills if PHASES.index(k.phase) >= min(rank, middle.start)]
        early = [k for k in possible if PHASES.index(k.phase) < middle.start]
        mid = [k for k in possible if PHASES.index(k.phase) in middle] if rank < len(PHASES) - 1 else []
        ordered = sorted(early, key=lambda k: PHASES.index(k.phase)) or mid or possible
        return ordered[0] if ordered else None

    def _wait_for_victim(self, run: WatchedRun, kill: Kill, last_step: int) -> psutil.Process | None:
        """Wait for the phase and the victim; return None if the command ends before, or has passed the phase."""
        found: list[psutil.Process] = []
        order = PHASES.index(kill.phase)
        looked_s = 0.0

        def holds() -> bool:
            nonlocal looked_s
            phase, step = run.at()
            if kill.phase in ("starting", "loading", "compiling") and phase in PHASES[3:] and step > 0:
                return True
            is_there = phase == kill.phase and (order < 3 or kill.phase == "ending" or step > last_step)
            if is_there or time.monotonic() - looked_s > 1:
                looked_s = time.monotonic()
                if not (found and is_there and found[0].is_running()):
                    found[:] = [one for one in [run.find(kill.victim)] if one is not None]
            return is_there and bool(found) and run.at()[0] == kill.phase

        self._wait(run, holds)
        if run.command.poll() is not None or not found or run.at()[0] != kill.phase:
            return None
        time.sleep(self.rng.uniform(0, DELAY_S.get(kill.phase, 0.03)))
        return found[0] if found[0].is_running() and run.command.poll() is None else None

    def _wait(self, run: WatchedRun, holds: Any) -> None:
        """Wait for a condition or the end of the command. Kill a command that hangs."""
        sign, since_s = run.sign(), time.monotonic()
        while run.command.poll() is None and not holds():
            time.sleep(0.005)
            if run.sign() != sign:
                sign, since_s = run.sign(), time.monotonic()
            if time.monotonic() - since_s > HANG_S:
                for kill in self.done[-1:]:
                    kill.faults.append(f"no sign of life for {HANG_S:.0f} s")
                run.processes()
                run.command.kill()
                run.command.wait()

    def _settle(self, run: WatchedRun, kill: Kill) -> None:
        """Wait for the effect of a kill: the end of the command, or some seconds and then another line of the log."""
        until_s, size = time.monotonic() + SETTLE_S, -1

        def has_settled() -> bool:
            nonlocal size
            if time.monotonic() < until_s or kill.victim == COMMAND or kill.victim in FATAL:
                return False
            size = run.sign()[2] if size < 0 else size
            return run.sign()[2] != size or run.at()[0] in ("starting", "loading")

        self._wait(run, has_settled)
        if self.nodes is not None:
            self.nodes.repair()

    def _note_end(self, run: WatchedRun, kills: list[Kill]) -> None:
        """Note how the command ended, at its last kill."""
        code, text = run.command.returncode, run.output(0)
        if not kills:
            return
        kill = kills[-1]
        if kill.outcome:  # a command without a new kill
            if code:
                kill.faults.append(f"a later command exited with {code}: {last_line(text)}")
            return
        kill.outcome, kill.said = f"exit {code}", last_line(text)
        until_s = time.monotonic() + SETTLE_S  # a process that outlives the command says that Ray has ended it
        while code == 1 and not any(one in kill.said for one in SAID) and time.monotonic() < until_s:
            time.sleep(0.1)
            kill.said = last_line(run.output(0))
        is_ended_by_signal = kill.victim == COMMAND and kill.signal != "SIGKILL"
        allowed = {0}
        if kill.victim == COMMAND:
            # A shell says 130 for a second Ctrl-C while Python exits, too.
            allowed |= {130, -signal.SIGINT} if is_ended_by_signal else {-signal.SIGKILL}
        elif kill.victim in ENDS_NODE or kill.at_phase == "starting":
            allowed.add(1)
            if code == 1 and kill.at_phase != "starting" and not any(one in kill.said for one in SAID):
                kill.faults.append("exit 1 without a sentence")
        if code not in allowed:
            kill.faults.append(f"exit code {code}")
        if code == 0 and not (run.folder / "result.json").exists():
            kill.faults.append("exit 0 without result.json")

    def _repair_nodes(self, run: WatchedRun) -> None:
        """Start another cluster if its head has ended, or ends."""
        if self.nodes is None:
            return
        if self.done[-1].victim in ENDS_NODE:
            time.sleep(SETTLE_S)
        if self.nodes.repair():
            return
        run.processes()
        self.nodes.close()
        self.nodes = run.nodes = Nodes(self._temporary())

    def close(self) -> None:
        """End the cluster."""
        if self.nodes is not None:
            self.nodes.close()


def describe(run: WatchedRun, kill: Kill, later: Kill | None) -> None:
    """Add to a kill what the files of the run tell: the next step, the steps lost, and what was printed.

    Args:
        run: the run.
        kill: a kill.
        later: the next kill of the run, or None.
    """
    text = run.output(kill._log_begin, None if later is None else later._log_begin)
    if has_noise(text):
        kill.faults.append("printed a traceback or an abort")
        kill.said = without_folders(text[:3000])
    starts = run.lines("starts.jsonl")[kill._num_starts : None if later is None else later._num_starts]
    if kill.at_phase in ("starting", "loading") and not kill.outcome:
        del starts[:1]  # the start that was under way, unless its workers died before they wrote it
    if starts:
        kill.lost_steps = max(0, kill.at_step - starts[0]["step"])
    after_s = starts[0]["time_s"] if starts else kill.at_s
    lines = [line for line in run.lines("phases.jsonl") if line["phase"] in ("training", "saving", "finished")]
    times = [line["time_s"] for line in [*lines, *run.lines("metrics.jsonl")[1:]] if line["time_s"] > after_s]
    # A worker may do another step before it ends with its command.
    has_ended = kill.outcome.startswith("exit") and kill.outcome != "exit 0" and not starts
    kill.next_step_s = round(min(times) - kill.at_s, 1) if times and not has_ended else None
    if not kill.outcome:
        kill.outcome = "workers started again" if starts else "went on"


def main() -> None:
    """Kill, compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=count, default=60, help="number of kills (default: %(default)s)")
    parser.add_argument("--hardware", nargs="+", choices=HARDWARE, default=list(HARDWARE), help="default: all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the plan")
    parser.add_argument("--keep", type=Path, help="folder for the runs and their output; by default they are deleted")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    # The commands answer signals also where this process must not, as under `nohup`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ |= {"JAX_PLATFORMS": "cpu", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    path = options.out / "kill_matrix.json"
    before = json.loads(path.read_text()) if path.exists() else {"kills": [], "runs": []}
    kept = {
        what: [row for row in before[what] if row["hardware"] not in options.hardware] for what in ("kills", "runs")
    }
    result: dict[str, Any] = {
        "config": "1 layer of width 32, 8 windows of 32 bytes",
        **environment("pretrain", "ray-jax-launch", "jax", "ray"),
    }
    # The plan is that of all hardware, so that the parts of a matrix add up.
    kills, is_good = plan(options.kills, list(HARDWARE), options.seed), True
    with tempfile.TemporaryDirectory(prefix="km") as temporary:
        folder = options.keep or Path(temporary)
        text = folder / "text.txt"
        folder.mkdir(parents=True, exist_ok=True)
        text.write_text("".join(inspect.getsource(module) for module in (argparse, random, signal, tempfile)))
        if not (folder / "tokens").exists():
            prepare(str(text), folder / "tokens", PrepareOptions(tokenizer="bytes"))
        for hardware in options.hardware:
            place = folder / hardware.replace(":", "-")
            place.mkdir(exist_ok=True)
            matrix = Matrix(
                hardware,
                [kill for kill in kills if kill.hardware == hardware],
                folder / "tokens",
                place,
                random.Random(f"{options.seed} {hardware}"),
            )
            try:
                matrix.disturb()
            finally:
                matrix.close()
                kept["kills"] += [asdict(kill) for kill in matrix.done]
                kept["runs"] += matrix.runs
                is_good = write(options.out, result | kept)
    print((options.out / "kill_matrix.md").read_text())
    if not is_good:
        sys.exit("a number differs, or a command failed in a wrong way")


if __name__ == "__main__":
    main()
