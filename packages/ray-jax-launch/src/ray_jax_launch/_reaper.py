"""Kill the processes of a cluster after the driver that started it was killed.

On Linux Ray itself ends most of them, but two agents of the node first try for a minute to reach the control store,
which is gone. On macOS no process ends with the driver. This module runs as a separate process. It waits for the end of
its standard input, a pipe that only the driver holds open.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# Processes that end by themselves do it within this time.
_GRACE_S = 10.0


def start_reaper(parents: Iterable[int]) -> None:
    """Start the process that kills these processes and their present children, after this process has died."""
    pids = sorted({pid for parent in parents for pid in (parent, *_children(parent))})
    reader, writer = os.pipe()  # the writing end closes with this process
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "ray_jax_launch._reaper", *(f"{pid}={_birth(pid)}" for pid in pids)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, reader, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_CLOSE, writer),
        ],
        setpgroup=0,  # Ctrl-C must reach only the driver
    )
    os.close(reader)


def _children(parent: int) -> list[int]:
    """Return the processes that a process started."""
    if sys.platform == "linux":
        lists = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
        return [int(pid) for pids in lists for pid in pids.split()]
    listed = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in listed.split()]


def _birth(pid: int) -> str:
    """Return the start time of a process, which is unique for its pid; empty if it does not exist."""
    if sys.platform == "linux":
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return ""
    return subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout


def _main(births: dict[int, str]) -> None:
    sys.stdin.buffer.read()  # returns when the driver has ended
    deadline_s = time.monotonic() + _GRACE_S
    while births and time.monotonic() < deadline_s:
        time.sleep(0.2)
        births = {pid: birth for pid, birth in births.items() if birth and _birth(pid) == birth}
    for pid in births:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main({int(pid): birth for pid, birth in (argument.split("=", 1) for argument in sys.argv[1:])})
