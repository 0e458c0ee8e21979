"""Check tasks in a process of its own: lm-eval takes seconds to import, and would stay in the process that trains."""

import logging
import subprocess
import sys
from collections.abc import Sequence

from pretrain._errors import UsageError, one_line
from pretrain._task_names import parse_tasks

_logger = logging.getLogger("pretrain")


def check_tasks(texts: Sequence[str], *, option: str) -> None:
    """Check that tasks exist, and that those of files can be read. The data of lm-eval's own tasks is not read.

    Args:
        texts: the tasks, as for `parse_tasks`.
        option: the name of the option, for errors.

    Raises:
        UsageError: there is no such task, or its file is wrong, or does not fit its data.
    """
    command = [sys.executable, "-P", "-m", __name__, option, *texts]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 2:
        raise UsageError(done.stdout.strip())
    if done.returncode or done.stdout:
        lines = (done.stdout or done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        _logger.warning("%s could not be checked: %s", option, one_line(lines[-1]))


def _main(option: str, texts: Sequence[str]) -> None:
    from pretrain._judge.tasks import read_tasks  # an extra

    try:
        read_tasks(parse_tasks(texts), option=option)
    except UsageError as error:
        sys.stdout.write(f"{error}\n")
        raise SystemExit(2) from error
    except OSError as error:  # such as a hub that does not answer: it may answer when the scores are wanted
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
