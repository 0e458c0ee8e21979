"""Ctrl-C while the process still imports: it ends at once, with nothing to save and no traceback.

A KeyboardInterrupt cannot do this, because extension modules turn it into other errors of an import.
"""

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def exit_at_interrupts() -> None:
    """End the process at Ctrl-C, until `raise_interrupts`. A SIGINT that is ignored stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, if `exit_at_interrupts` was called."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
