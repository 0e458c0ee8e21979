"""Process that checks the SHA-256 of token files at the lowest priority, and ends with its parent.

`python -m owt_data._tokens.digest_worker PID`, with the process id of the parent, reads one line of JSON from standard
input, the SHA-256 by file. It prints one line of JSON: the sentence about the first damaged file, or null. The end of
standard input ends the process.
"""

import json
import os
import sys
import threading

from owt_data._digests import check_sha256
from owt_data._errors import DataError

_LOWEST_PRIORITY = 19


def main(parent: int) -> None:
    """Check the files."""
    os.nice(_LOWEST_PRIORITY)
    digests: dict[str, str] = json.loads(sys.stdin.buffer.readline() or b"{}")
    threading.Thread(target=_end_with_input, daemon=True).start()

    def end_without_parent(_: int) -> None:
        # A process that the parent forked may keep the pipe open.
        if os.getppid() != parent:
            sys.exit(1)

    damage = None
    try:
        for path, expected in digests.items():
            check_sha256(path, expected, end_without_parent)
    except DataError as error:
        damage = str(error)
    print(json.dumps(damage), flush=True)  # noqa: T201


def _end_with_input() -> None:
    """End the process when standard input ends, which it does when the parent dies."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
