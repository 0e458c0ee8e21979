"""Ctrl-C, SIGTERM and SIGHUP outside of a launch, which has its own handlers.

While the process still imports, they end it at once, with nothing to save and no traceback. A KeyboardInterrupt cannot
do this, because extension modules turn it into other errors of an import. Later they raise KeyboardInterrupt, again if
Python has dropped it. While the process exits, they end it at once again. In the end Python gives them back their
default, which would replace the exit code: there they are ignored.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

CHILD = (
    "import sys; from pretrain._early_interrupt import interrupt_after_parent; interrupt_after_parent(); "
    "from pretrain.__main__ import main; sys.exit(main())"
)
"""The code of a process with a command that is interrupted when its parent ends: its standard input then ends."""

_INTERRUPTED = 130
_AGAIN_AFTER_S = 0.01
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def exit_at_interrupts() -> None:
    """End the process at these signals, until `raise_interrupts`. A signal that is ignored stays ignored."""
    atexit.register(_ignore_all)  # the last callback, as the first one registered
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in _DEFAULTS:
            signal.signal(number, _exit)


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt at these signals, if `exit_at_interrupts` was called.

    A second SIGTERM or SIGHUP changes nothing: one stop often sends several, and the first one is being handled.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _exit:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _raise_once)
            sys.unraisablehook = _raise_again


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Keep the handler of SIGTERM during a start of Ray, which replaces it by one that raises SystemExit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def interrupt_after_parent() -> None:
    """Send SIGTERM to this process when the process at the other end of standard input has ended, however it ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def end_at_interrupts(code: int) -> None:
    """End the process at the next signal, if it is handled here: only the clean-up of libraries is left to do.

    Args:
        code: the exit code of the command, which is over.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (*_DEFAULTS, _exit, _raise_once):
            signal.signal(number, lambda *_: os._exit(code))


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def _ignore_all() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _raise_once(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(other) is _raise_once:
            signal.signal(other, _ignore)
    raise KeyboardInterrupt


def _raise_again(dropped: Any) -> None:
    """Raise an interrupt once more that came during a callback of the garbage collector, such as JAX's, or a finalizer.

    Python prints what these raise, and goes on. Here too an exception would be dropped: an alarm raises it.
    """
    if dropped.exc_type is KeyboardInterrupt and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER_S)
    else:
        sys.__unraisablehook__(dropped)


def _ignore(*_: Any) -> None:
    """Ignore a signal in this process alone: processes that it starts do not ignore it."""
