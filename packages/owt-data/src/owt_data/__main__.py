"""The process of the command `owt-data`."""

import os
import signal
import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command with the arguments of the process, and return the exit code.

    Ctrl-C ends the process at once while it imports: there is nothing to clean up, and nothing to print.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from owt_data._cli import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(main())
