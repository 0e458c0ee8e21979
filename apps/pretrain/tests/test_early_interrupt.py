"""Ctrl-C while the command still imports, and while it exits."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pretrain._early_interrupt import exit_at_interrupts, keeping_handlers, raise_interrupts

APPLICATION = str(Path(__file__).parent.parent)


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["--help"], "pretrain._errors"),
        (["--name", "new"], "rich.console"),
        (["--name", "new"], "pretrain._config"),
        (["--name", "new"], "numpy"),
        (["--name", "new"], "pyarrow"),
        (["sample", "nowhere"], "jax._src.config"),
        (["export", "nowhere", "out"], "flax"),
    ],
)
def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback(arguments, module, tmp_path):
    """The process reports each import on standard error. The signal comes when it has imported the module."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", APPLICATION, *arguments],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # The tests themselves may be a background job, which ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == module:
            os.kill(process.pid, signal.SIGINT)
            break
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert out in ("", "loading JAX and Ray\n")
    assert [line for line in err.splitlines() if not line.startswith("import time:")] == []
    assert list(tmp_path.iterdir()) == []


SIGNAL_AT_EXIT = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
stop = lambda: os.kill(os.getpid(), signal.{name})
if {is_late}:
    atexit.register(stop)  # the last callback
from pretrain.__main__ import main
code = main()
if not {is_late}:
    stop()
sys.exit(code)
"""


@pytest.mark.parametrize("arguments", ["--version", "runs"])
@pytest.mark.parametrize(("name", "is_late"), [("SIGINT", True), ("SIGINT", False), ("SIGTERM", False)])
def test_a_signal_during_the_exit_keeps_the_exit_code_and_prints_no_traceback(name, is_late, arguments, tmp_path):
    script = SIGNAL_AT_EXIT.format(name=name, is_late=is_late)
    ended = subprocess.run(
        [sys.executable, "-c", script, arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.stderr.splitlines()[1:] == []  # the error of a folder without runs
    assert ended.returncode == (2 if arguments == "runs" else 0)


START_OF_RAY = """
import signal
import ray
from pretrain._early_interrupt import keeping_handlers

before = signal.getsignal(signal.SIGTERM)
try:
    with keeping_handlers():
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGTERM) == before)
"""


def test_sigterm_during_a_start_of_ray_is_an_interrupt():
    """`ray.init` sets a handler that raises SystemExit."""
    process = subprocess.run([sys.executable, "-c", START_OF_RAY], capture_output=True, text=True, timeout=300)
    assert process.stdout == "interrupted True\n", process.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_the_handler_of_sigterm_survives_a_start_of_ray_that_ends_or_fails(fails):
    def handler(*_):
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with contextlib.suppress(ValueError), keeping_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if fails:
                raise ValueError("no node has started")
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_start_of_ray_in_another_thread_keeps_its_handler():
    """Python sets handlers in the main thread alone."""

    def start():
        with keeping_handlers():
            return "started"

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(start).result() == "started"


STOP_DURING_THE_CLEAN_UP = """
import os, signal, time
from pretrain._early_interrupt import exit_at_interrupts, raise_interrupts

exit_at_interrupts()
raise_interrupts()
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(10)
except KeyboardInterrupt:
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    print("cleaned up")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_later_signals_of_a_stop_do_not_disturb_the_clean_up(name):
    script = STOP_DURING_THE_CLEAN_UP.format(name=name)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (process.stdout, process.stderr) == ("cleaned up\n", "")


STOP_DURING_A_CALLBACK = """
import gc, os, signal, time
from pretrain._early_interrupt import exit_at_interrupts, raise_interrupts

class Ending:
    def __del__(self):
        stop()

def stop(*_):
    if callbacks:
        for _ in range(2):
            os.kill(os.getpid(), getattr(signal, "{name}"))

exit_at_interrupts()
raise_interrupts()
callbacks = ["{place}"]
try:
    if callbacks == ["finalizer"]:
        Ending()
    else:
        gc.callbacks.append(stop)
        gc.collect()
    callbacks.clear()
    time.sleep(10)
except KeyboardInterrupt:
    callbacks.clear()
    print("interrupted")
"""


@pytest.mark.parametrize("place", ["finalizer", "garbage collector"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_during_a_callback_is_an_interrupt(name, place):
    """JAX has a callback of the garbage collector."""
    script = STOP_DURING_A_CALLBACK.format(name=name, place=place)
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (process.stdout, process.stderr) == ("interrupted\n", "")


def test_an_ignored_signal_stays_ignored():
    """A shell starts background jobs with an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        exit_at_interrupts()
        raise_interrupts()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
