"""The process of the command `owt-data`."""

import os
import resource
import signal
import sys

_BAD_INPUT, _INTERRUPTED = 2, 130
# Within 0.6 GiB, imports failed with tracebacks. The application has this limit too.
_LEAST_ADDRESS_SPACE = 4 << 30


def main() -> int:
    """Run the command with the arguments of the process, and return the exit code.

    Ctrl-C ends the process at once while it imports: there is nothing to clean up, and nothing to print.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
        sys.stderr.write(
            f"error: a process must be allowed to map at least {_LEAST_ADDRESS_SPACE >> 30} GiB of memory, got "
            f"{limit >> 20} MiB. Raise the limit with `ulimit -v`.\n"
        )
        return _BAD_INPUT
    from owt_data._cli import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(main())
