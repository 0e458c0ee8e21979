"""Kill the processes of a cluster after the driver that started it has ended, and delete the cluster's folder.

On Linux Ray itself ends most processes of a killed driver, but two agents of the node first try for a minute to reach
the control store, which is gone. On macOS no process ends with the driver. This module runs as a separate process. It
reads what to do from its standard input, a pipe that only the driver holds open, until the pipe ends. Until then it
looks which workers the cluster has: the raylet that started them may end before they do.

A driver that has been killed cannot say so. Nor can one that Ray ends in C++, as it does after the death of its raylet
or of an agent. This process says it then, on the driver's standard error, also for a cluster that was there before.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ray_jax_launch._cluster_folder import clean_up

# Processes that end by themselves do it within this time.
_GRACE_S = 10.0
# A process that was started just before the end, and is not known here, may write for this time.
_LATE_S = 3.0
_END = "end"
# macOS has no /proc, and a look starts a process for each one that it looks at.
_LOOK_EVERY_S = 1.0 if sys.platform == "linux" else 30.0
KILLED = (
    "error: this command was killed, or Ray ended it because a process of its cluster had died: the same command "
    "continues from the newest checkpoint"
)


class Reaper:
    """The process that ends what a cluster leaves behind, started before the cluster.

    Args:
        folder: of the cluster (`ClusterFolder.path`), or None for a cluster that was there before, and stays.
    """

    def __init__(self, folder: Path | None) -> None:
        reader, self._writer = os.pipe()  # the writing end closes with this process
        self._pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "ray_jax_launch._reaper", *([] if folder is None else [str(folder.parent)])],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reader, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_CLOSE, self._writer),
            ],
            setpgroup=0,  # Ctrl-C must reach only the driver
        )
        os.close(reader)
        atexit.register(self._send, _END)

    def watch(self, pid: int) -> None:
        """Kill this process and its children after the driver has ended."""
        self._send(str(pid))

    def close(self) -> None:
        """Let it act now: the cluster has ended, and this process has not."""
        atexit.unregister(self._send)
        self._send(_END)
        os.close(self._writer)
        # It takes seconds. Without a wait for its end, it would stay as a zombie until this process ends.
        threading.Thread(target=self._wait, name="reaper", daemon=True).start()

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the next start cleans up
            os.write(self._writer, f"{line}\n".encode())


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


def _main(parents: list[str]) -> None:
    births: dict[int, str] = {}
    children: dict[int, str] = {}
    is_killed = True
    unread = b""
    while True:
        if select.select([0], [], [], _LOOK_EVERY_S)[0]:
            block = os.read(0, 4096)
            if not block:  # the driver has ended
                break
            *lines, unread = (unread + block).split(b"\n")
            for line in map(bytes.decode, lines):
                if line == _END:
                    is_killed = False
                else:
                    births[int(line)] = _birth(int(line))
        children = {pid: birth for pid, birth in children.items() if birth and _birth(pid) == birth}
        children |= {pid: _birth(pid) for one in births for pid in _children(one)}
    births |= children
    if is_killed:
        with contextlib.suppress(OSError):  # of a terminal that is closed
            os.write(2, f"{KILLED}\n".encode())
    os.close(2)  # who reads the driver's output must not wait for this process
    deadline_s = time.monotonic() + _GRACE_S
    while births and time.monotonic() < deadline_s:
        births = {pid: birth for pid, birth in births.items() if birth and _birth(pid) == birth}
        time.sleep(0.2 if births else 0)
    for pid in births:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for parent in map(Path, parents):
        clean_up(parent)
        time.sleep(_LATE_S)
        clean_up(parent)


if __name__ == "__main__":
    _main(sys.argv[1:])
