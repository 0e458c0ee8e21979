"""Standard output and standard error, which may be closed, full, or limited to few characters."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console


class Output(Console):
    """A console that raises BrokenPipeError when the reader of its output has closed it."""

    def on_broken_pipe(self) -> None:
        """Raise the error again: rich would exit."""
        raise


def open_streams() -> None:
    """Make both streams accept any text: discard the text of a closed stream, and escape what cannot be encoded."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - open until the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class _StandardError(logging.StreamHandler):
    """A handler that writes to the standard error of the moment: a live view puts its own in place of it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # the one of StreamHandler would store the stream

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr


def show_warnings() -> None:
    """Write warnings to standard error as sentences, before a library chooses a format with names of loggers."""
    handler = _StandardError()
    handler.setLevel(logging.WARNING)  # `log_lines` shows the rest
    logging.basicConfig(format="%(message)s", handlers=[handler])
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what users cannot change


def set_log_level(level: int) -> None:
    """Write what libraries log from a level on to standard error. Below warnings, each line names its logger."""
    logging.getLogger().setLevel(level)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StandardError):
            handler.setLevel(level)
            if level < logging.WARNING:
                handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
                handler.addFilter(_is_not_shown)
                logging.getLogger("absl").setLevel(level)


def _is_not_shown(record: logging.LogRecord) -> bool:
    """Return False for the messages that `log_lines` shows."""
    return record.name != "ray_jax_launch" or record.levelno != logging.INFO


def print_error(text: str) -> None:
    """Write a line to standard error, if standard error can be written."""
    with contextlib.suppress(OSError):
        Output(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(text, markup=False)


def discard_unwritten() -> None:
    """Discard the buffers of both streams if they cannot be written: Python would try again at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def log_lines(show: Callable[[str], None]) -> Iterator[None]:
    """Show each message that the launcher logs as information, while the block runs.

    The handlers of a program that has not asked for such messages do not get them: a notebook would print each twice.

    Args:
        show: shows a line. Any thread may call it.
    """
    logger = logging.getLogger("ray_jax_launch")
    level, is_wanted = logger.level, logger.isEnabledFor(logging.INFO)

    def show_information(record: logging.LogRecord) -> bool:
        if record.levelno == logging.INFO:
            show(record.getMessage())
        return is_wanted or record.levelno != logging.INFO

    logger.addFilter(show_information)
    if not is_wanted:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeFilter(show_information)
        logger.setLevel(level)
