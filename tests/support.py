"""Paths of the repository; commands that tests start and watch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEMBERS = {
    "owt-data": ROOT / "packages/owt-data",
    "nnx-gpt2": ROOT / "packages/nnx-gpt2",
    "ray-jax-launch": ROOT / "packages/ray-jax-launch",
    "pretrain": ROOT / "apps/pretrain",
}
COMMAND = [sys.executable, str(ROOT / "apps" / "pretrain")]


@contextlib.contextmanager
def started(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in its own process session, and kill the session at the end of the block.

    Args:
        command: the command.
        log: the file for its output.
        environment: its environment variables.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, idle_s: float = 300) -> None:
    """Wait for a condition while the process runs and writes to its log.

    Args:
        holds: the condition.
        process: the process.
        log: the file with its output.
        idle_s: seconds without new output after which the process counts as stuck.
    """
    size, since = 0, time.monotonic()
    while True:
        has_ended = process.poll() is not None
        if holds():
            return
        assert not has_ended, f"the command ended too early: {log.read_text()}"
        if log.stat().st_size > size:
            size, since = log.stat().st_size, time.monotonic()
        assert time.monotonic() - since < idle_s, f"no output for {idle_s} s: {log.read_text()}"
        time.sleep(0.02)


def find_worker(session: int) -> int:
    """Return the process id of a training worker in a process session. Linux only."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            is_worker = (path / "cmdline").read_text().startswith("ray::RayTrainWorker")
            if is_worker and (path / "stat").read_text().rpartition(")")[2].split()[3] == str(session):
                return int(path.name)
    raise AssertionError(f"session {session} has no training worker")
