"""A command `apps/pretrain` that `kill_matrix.py` watches: its phases, its processes, and what a run leaves behind."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
COMMAND = "the command"
SECOND_RAYLET, SECOND_WORKER = "raylet of another node", "ray::RayTrainWorker of another node"
TASK, REAPER = "task of Ray Data", "our reaper"
# Other victims, by a pattern of their command lines.
PATTERNS = {
    **{
        name: name
        for name in (
            "ray::RayTrainWorker",
            "ray::TrainController",
            "ray::ControlActor",
            "ray::SynchronizationActor",
            "ray::_AutoscalingCoordinatorActor",
            "ray::_StatsActor",
            "ray::IDLE",
            "ray::DashboardAgent",
            "ray::RuntimeEnvAgent",
        )
    },
    TASK: r"ray::\w*(?:Read|Map)\w*",
    "raylet": "/raylet/raylet ",
    "gcs_server": "/gcs/gcs_server ",
    "monitor.py": r"/monitor\.py ",
    "log_monitor.py": r"/log_monitor\.py ",
    "dashboard.py": r"/dashboard\.py ",
    REAPER: r"ray_jax_launch\._reaper",
}
# The phases of a run, in the order of a start. The phase `ending` is everything after the last step.
PHASES = ("starting", "loading", "compiling", "training", "saving", "evaluating", "sampling", "ending")
# Processes of a cluster that stay when a command ends, with the actors of Ray Data that all jobs share.
_STAYS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_")
# What no command may print: an abort or an error in the log of Ray's C++, or a traceback.
_NOISE = re.compile(
    r"Traceback \(most recent|SIGABRT|SIGSEGV|Fatal Python|Check failed|terminate called"
    r"|^\[\S+ \S+ [EFC] (?!.*:info_message:)",
    re.M,
)
_CLUSTER = """
import contextlib, sys, threading, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "dashboard_port": None})

def add_node():
    with contextlib.suppress(Exception):  # on a busy machine, a node may join after Ray's limit of 30 s
        cluster.add_node(num_cpus=1)

for _ in range(int(sys.argv[1]) - 1):
    add_node()
print(cluster.address, flush=True)

def reap():  # Ray's workers end with their raylet, but not while it is a zombie
    while True:
        time.sleep(0.5)
        for node in cluster.list_all_nodes():
            for infos in node.all_processes.values():
                for info in infos:
                    info.process.poll()

threading.Thread(target=reap, daemon=True).start()
for line in sys.stdin:
    add_node()
    print("added", flush=True)
cluster.shutdown()
"""


def living(parent: int) -> list[tuple[psutil.Process, str]]:
    """Return the processes below a process, in the order of their births, with their command lines."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(
                        (process.create_time(), process.pid, process, " ".join(process.cmdline()).strip() + " ")
                    )
    return [(process, line) for _, _, process, line in sorted(found, key=lambda one: one[:2])]


class Nodes:
    """A Ray cluster on this machine, of nodes of one CPU: one for each worker, and one for Ray Data.

    Args:
        folder: for Ray's files. Its path is short.
        num_workers: nodes for workers.
    """

    def __init__(self, folder: Path, num_workers: int = 2) -> None:
        self._num_nodes = num_workers + 1
        # Ray notes the address of the cluster in its temporary folder. Other programs would find it there.
        environment = os.environ | {"RAY_TMPDIR": str(folder)}
        environment.pop("RAY_ADDRESS", None)
        with (folder / "cluster.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CLUSTER, str(self._num_nodes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env=environment,
            )  # fmt: skip
        self.address = self._answer()
        self._head: psutil.Process | None = None
        self.repair()

    def _answer(self) -> str:
        assert self.process.stdout is not None, "it is a pipe"
        return self.process.stdout.readline().strip()

    def repair(self) -> bool:
        """Add nodes in place of those that have ended. Return whether the head lives."""
        raylets = [one for one, line in living(self.process.pid) if re.search(PATTERNS["raylet"], line)]
        is_alive = any(re.search(PATTERNS["gcs_server"], line) for _, line in living(self.process.pid))
        self._head = self._head or raylets[0]
        if not is_alive or self._head not in raylets:
            return False
        assert self.process.stdin is not None, "it is a pipe"
        for _ in range(self._num_nodes - len(raylets)):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self._answer()
        return True

    def close(self) -> None:
        """Kill the cluster. Its processes may have lost their parent."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


@dataclass
class WatchedRun:
    """A run, and the commands that continue it."""

    folder: Path
    arguments: list[str]
    max_steps: int
    log: Path
    nodes: Nodes | None
    environment: dict[str, str]
    command: subprocess.Popen[bytes] = field(init=False)
    num_commands: int = 0
    seen: dict[int, tuple[psutil.Process, str]] = field(default_factory=dict)
    """Processes of all commands of the run, by pid, with the last command line that was seen."""
    _num_phases: int = 0
    _log_offset: int = 0

    def start(self) -> None:
        """Start the command, or continue the run."""
        self._num_phases, self._log_offset = self._size("phases.jsonl"), self.log_size()
        environment = os.environ | self.environment
        if self.nodes is not None:
            environment["RAY_ADDRESS"] = self.nodes.address
        with self.log.open("ab") as log:
            self.command = subprocess.Popen(
                [sys.executable, str(ROOT / "apps/pretrain"), *self.arguments],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip
        self.num_commands += 1

    def _size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def log_size(self) -> int:
        """Return the bytes of output."""
        return self.log.stat().st_size if self.log.exists() else 0

    def output(self, begin: int, end: int | None = None) -> str:
        """Return a part of the output."""
        return self.log.read_bytes()[begin:end].decode(errors="replace")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the complete lines of a file of the run."""
        path = self.folder / name
        text = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def at(self) -> tuple[str, int]:
        """Return the present phase and the step of its beginning."""
        path = self.folder / "phases.jsonl"
        if self._size("phases.jsonl") > self._num_phases:
            last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
            with contextlib.suppress(json.JSONDecodeError):
                phase = json.loads(last)
                is_last = phase["step"] == self.max_steps and phase["phase"] != "loading"
                return ("ending" if is_last else phase["phase"]), phase["step"]
        return ("loading" if "\nloading the" in self.output(self._log_offset) else "starting"), 0

    def has_begun(self) -> bool:
        """Return whether the command has printed something: from then on it handles signals."""
        return self.log_size() > self._log_offset

    def sign(self) -> tuple[int, ...]:
        """Return a value that changes while the command lives and works."""
        return (self.log_size(), *(self._size(name) for name in ("phases.jsonl", "metrics.jsonl", "starts.jsonl")))

    def processes(self) -> list[tuple[psutil.Process, str]]:
        """Return the processes below the command, then those below the cluster."""
        named = living(self.command.pid) + (living(self.nodes.process.pid) if self.nodes is not None else [])
        self.seen |= {process.pid: (process, line) for process, line in named}
        return named

    def find(self, victim: str) -> psutil.Process | None:
        """Return the process to kill, or None if there is none now."""
        if victim == COMMAND:
            return psutil.Process(self.command.pid) if self.has_begun() else None
        processes = self.processes()
        raylets = [one for one, line in processes if re.search(PATTERNS["raylet"], line)]
        if victim == SECOND_RAYLET:
            return raylets[-1] if len(raylets) > 1 else None
        is_elsewhere = victim == SECOND_WORKER
        pattern = PATTERNS["ray::RayTrainWorker" if is_elsewhere else victim]
        matching = [one for one, line in processes if re.search(pattern, line)]
        with contextlib.suppress(psutil.Error):
            if is_elsewhere:
                matching = [one for one in matching if one.ppid() in [raylet.pid for raylet in raylets[1:]]]
            return matching[0] if matching else None
        return None

    def left_running(self, limit_s: float) -> list[str]:
        """Wait for the end of the processes of all commands, and kill what is left. Return its command lines."""
        deadline_s = time.monotonic() + limit_s
        left = self._left()
        while left and time.monotonic() < deadline_s:
            time.sleep(0.5)
            left = self._left()
        for process, _ in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return [line[:80].strip() for _, line in left]

    def _left(self) -> list[tuple[psutil.Process, str]]:
        return list(self._alive())

    def _alive(self) -> Iterator[tuple[psutil.Process, str]]:
        for process, _ in self.seen.values():
            with contextlib.suppress(psutil.Error):
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                now = " ".join(process.cmdline()).strip() + " "
                if self.nodes is None or ("ray::" in now and not now.startswith(_STAYS)):
                    yield process, now


def has_noise(text: str) -> bool:
    """Return whether the output has a traceback, or an abort of Ray's C++."""
    return _NOISE.search(text) is not None
