"""Standard output and standard error, as odd as they come: closed, full, or of an encoding with few characters."""

import contextlib
import os
import sys
from typing import TextIO

from rich.console import Console


class Output(Console):
    """A console that leaves it to the command what to do when the reader of its output is gone."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError again, where rich would exit."""
        raise


def open_streams() -> None:
    """Let both streams take any text: a closed one is discarded, and characters that it does not have are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - open until the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Write a line to standard error, as far as that can be written."""
    with contextlib.suppress(OSError):
        Output(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


def discard_unwritten(stream: TextIO) -> None:
    """Discard what a stream holds and cannot write, so that Python does not try again when it exits."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
