"""Programs and functions in child processes, because a driver, a library or a disk may hang or end its process."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pretrain._errors import one_line, rejection

_ANSWER = "import sys; from pretrain._surroundings.child import answer; answer(*sys.argv[1:])"
_END_WITHIN_S = _LOOK_EVERY_S = 1.0
_running: set[subprocess.Popen[str]] = set()
_starting = threading.Lock()


class ChildError(RuntimeError):
    """The failure of a child process. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message).rstrip("."))


def run_program(command: Sequence[str], *, within_s: float, variables: Mapping[str, str] | None = None) -> str:
    """Run a program, and return its output.

    Args:
        command: the program and its arguments.
        within_s: seconds after which the program and its children are killed.
        variables: environment variables, beside those of this process.

    Raises:
        ChildError: the program cannot be run, has failed, or has not ended in time. The message has its last line.
    """
    try:
        with _starting:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **(variables or {})},
                start_new_session=True,  # its children are killed with it
            )
            _running.add(program)
    except OSError as error:
        raise ChildError(f"{command[0]} cannot be run: {error.strerror}") from None
    try:
        output, errors = program.communicate(timeout=within_s)
    except BaseException as error:  # also an interrupt
        _end(program)
        for pipe in (program.stdout, program.stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ChildError(f"no answer within {within_s:.0f} s") from None
        raise
    finally:
        _running.discard(program)
    if program.returncode:
        lines = (errors.strip() or output.strip()).splitlines()
        raise ChildError(lines[-1] if lines else f"exit code {program.returncode}, without a message")
    return output


def call_in_child(
    function: Callable[..., Any], *arguments: Any, within_s: float, variables: Mapping[str, str] | None = None
) -> Any:
    """Call a function of a module in a child process, and return its result. The child ends with this process.

    Args:
        function: the function.
        arguments: values that JSON can hold, as can the result.
        within_s: seconds after which the child is killed.
        variables: environment variables of the child, beside those of this process.

    Raises:
        ChildError: the function has raised an exception, or has not returned in time.
    """
    name = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-P", "-c", _ANSWER, str(os.getpid()), name, json.dumps(arguments)]
    output = run_program(command, within_s=within_s, variables=variables)
    answered = json.loads(output.splitlines()[-1])
    if "error" in answered:
        raise ChildError(answered["error"])
    return answered["value"]


def answer(parent: str, name: str, arguments: str) -> None:
    """Call a function in this child process, and print its result or its error as the last line."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    module, _, function = name.partition(":")
    try:
        answered = {"value": getattr(importlib.import_module(module), function)(*json.loads(arguments))}
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        answered = {"error": rejection(error) or f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"{json.dumps(answered)}\n")


def _end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def end_children() -> None:
    """Kill the programs that still run, and their children."""
    with _starting:  # a program that another thread is starting is ended too
        programs = [*_running]
    for program in programs:
        _end(program)


def _end(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a dead disk cannot be killed
        program.wait(_END_WITHIN_S)
