"""The processes below a process, from /proc on Linux and from `ps` elsewhere."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PS = ("ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,lstart=,args=")
# The time of a birth has five words: Fri Nov 27 16:48:57 2026.
_LINE = re.compile(r"\s*(\d+)\s+(\d+)\s+(\S+)\s+((?:\S+\s+){5})(.*)")
_ZOMBIE = "Z"


@dataclass(frozen=True, slots=True)
class Process:
    """A process, also after its end: another process with its pid is another value."""

    pid: int
    """Its number."""

    birth: str
    """Time of its start, in a form of the system."""

    command_line: str = field(compare=False)
    """Its command line at the time when it was found."""

    def kill(self) -> bool:
        """Send SIGKILL. Return whether the process was alive."""
        with contextlib.suppress(ProcessLookupError):
            if living([self]):
                os.kill(self.pid, signal.SIGKILL)
                return True
        return False


def living(processes: Iterable[Process]) -> list[Process]:
    """Return the processes that run. A zombie does not."""
    found = {process for process, _ in _processes()}
    return [process for process in processes if process in found]


def processes_below(pid: int) -> list[Process]:
    """Return the living children of a process, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for process, parent in _processes():
        children.setdefault(parent, []).append(process)
    found, parents = list[Process](), [pid]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return found


def _processes() -> Iterator[tuple[Process, int]]:
    """Yield all living processes with their parents."""
    if sys.platform == "linux":
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if words[0] != _ZOMBIE:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    yield Process(int(folder.name), words[19], line), int(words[1])
        return
    listed = subprocess.run(_PS, capture_output=True, text=True, errors="replace", check=True).stdout
    for match in filter(None, map(_LINE.fullmatch, listed.splitlines())):
        if not match[3].startswith(_ZOMBIE):
            yield Process(int(match[1]), match[4].strip(), match[5]), int(match[2])
