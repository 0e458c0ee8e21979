"""The process of the command `pretrain`."""

import gc
import sys

from pretrain._early_interrupt import end_at_interrupts, exit_at_interrupts
from pretrain._surroundings.address_space import lack_of_address_space

_BAD_INPUT = 2


def main() -> int:
    """Run the application with the arguments of the process, and return the exit code."""
    exit_at_interrupts()
    # Imports and traces make objects that stay. The search for garbage among them took a seventh of the imports' time.
    gc.set_threshold(10_000, 10, 10)
    if lack := lack_of_address_space():
        sys.stderr.write(f"error: {lack}\n")
        return _BAD_INPUT
    from pretrain._cli import main

    code = main()
    end_at_interrupts(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
