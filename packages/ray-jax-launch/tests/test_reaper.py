"""The process that ends what a cluster leaves behind, with processes that stand for those of a cluster."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_jax_launch._reaper import KILLED, Reaper, _birth

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at children every 30 s elsewhere")

# A process that ignores signals, with a child that does too. Each prints its pid.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    sys.stdin.readline()
os.fork()
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""
REAPER = "from ray_jax_launch import _reaper; _reaper._GRACE_S = float({grace_s}); _reaper._main([])"


def wait_until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts Python code with pipes."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *args: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdin=pipe, stdout=pipe, stderr=pipe, process_group=0
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its child
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def pids_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the pids of a stubborn process and of its child."""
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(2)]


def send(reaper: subprocess.Popen[bytes], text: str) -> None:
    """Send a text, and wait until the reaper has read it."""
    assert reaper.stdin is not None
    descriptor = reaper.stdin.fileno()
    os.write(descriptor, text.encode())
    wait_until(lambda: int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder) == 0)


@on_linux
@pytest.mark.parametrize(("end", "message"), [("", f"{KILLED}\n"), ("end\n", "")], ids=["killed", "ended"])
def test_a_process_that_survives_its_driver_is_killed_with_its_children(
    start: Callable[..., Any], end: str, message: str
) -> None:
    stubborn, other, reaper = start(STUBBORN), start(STUBBORN), start(REAPER.format(grace_s=0.3))
    pids, others = pids_of(stubborn), pids_of(other)
    send(reaper, str(stubborn.pid))  # a pipe may deliver a line in two parts
    send(reaper, f"\n{end}")
    assert all(map(is_alive, pids))
    _, errors = reaper.communicate(timeout=300)
    assert (reaper.returncode, errors.decode()) == (0, message)
    wait_until(lambda: not any(map(is_alive, pids)))
    assert all(map(is_alive, others))


def test_a_process_that_gets_the_number_of_another_one_has_another_birth(start: Callable[..., Any]) -> None:
    processes = [start("import time; time.sleep(600)")]
    time.sleep(0.05 if sys.platform == "linux" else 1.1)  # `ps` tells whole seconds
    processes.append(start("import time; time.sleep(600)"))
    births = [_birth(process.pid) for process in processes]
    assert births[0] != births[1]
    assert all(births)
    assert [_birth(process.pid) for process in processes] == births


@on_linux
def test_a_child_that_starts_later_is_killed_even_if_its_parent_ends_first(start: Callable[..., Any]) -> None:
    stubborn, reaper = start(STUBBORN, "waits"), start(REAPER.format(grace_s=0.3))
    send(reaper, f"{stubborn.pid}\n")
    stubborn.stdin.write(b"go on\n")
    stubborn.stdin.flush()
    pids = pids_of(stubborn)
    (child,) = {*pids} - {stubborn.pid}
    for _ in range(2):  # the reaper looks again before it reads the second line
        send(reaper, f"{os.getpid()}0000000\n")  # of no process
    stubborn.kill()
    stubborn.wait()
    for _ in range(2):  # it looks once more, at a process that has ended
        send(reaper, f"{os.getpid()}0000000\n")
    assert is_alive(child)
    reaper.communicate(timeout=300)
    wait_until(lambda: not is_alive(child))


@on_linux
def test_processes_have_time_to_end_by_themselves_and_the_output_of_the_driver_ends_before(
    start: Callable[..., Any],
) -> None:
    stubborn, reaper = start(STUBBORN), start(REAPER.format(grace_s=60))
    pids = pids_of(stubborn)
    send(reaper, f"{stubborn.pid}\n")
    reaper.stdin.close()
    assert reaper.stderr.read().decode() == f"{KILLED}\n"  # until its end
    assert reaper.poll() is None
    assert all(map(is_alive, pids))
    os.killpg(stubborn.pid, signal.SIGKILL)
    stubborn.wait()
    assert reaper.wait(60) == 0


OPEN = """
import os, sys
from ray_jax_launch._reaper import Reaper

reaper = Reaper(None)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
raise SystemExit(3)
"""


@pytest.mark.parametrize(("end", "code", "message"), [("killed", -9, f"{KILLED}\n"), ("exits", 3, "")])
def test_only_of_a_driver_that_is_killed_its_reaper_says_so(end: str, code: int, message: str) -> None:
    done = subprocess.run([sys.executable, "-c", OPEN, end], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, message)


CLOSED = """
import sys
from ray_jax_launch._reaper import Reaper

reaper = Reaper(None)
reaper.close()
files = [open(f"{sys.argv[1]}/{number}", "w") for number in range(9)]
"""


def test_a_reaper_that_is_closed_writes_nothing_at_the_end(tmp_path: Path) -> None:
    """Another file may have its descriptor by then."""
    done = subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 9


def test_a_reaper_that_is_closed_leaves_no_descriptor_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    children, descriptors = psutil.Process().children(), len(os.listdir("/dev/fd"))  # noqa: PTH208
    wait, ends = os.waitpid, []

    def wait_and_note(pid: int, options: int) -> tuple[int, int]:
        ends.append(wait(pid, options))
        return ends[-1]

    monkeypatch.setattr(os, "waitpid", wait_and_note)
    started = []
    for _ in range(3):
        reaper = Reaper(None)
        (process,) = {*psutil.Process().children()} - {*children}
        started.append(process.pid)
        assert os.getpgid(process.pid) == process.pid  # Ctrl-C in a terminal does not reach it
        reaper.close()
        deadline_s = time.monotonic() + 60
        while psutil.pid_exists(process.pid):  # a zombie exists too
            assert time.monotonic() < deadline_s, process
            time.sleep(0.1)
    assert ends == [(pid, 0) for pid in started]
    assert len(os.listdir("/dev/fd")) == descriptors  # noqa: PTH208
