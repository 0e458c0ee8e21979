"""Limits of the operating system for a process."""

import subprocess
import sys

import pytest

CODE = """
import resource
import sys
from pretrain._surroundings.environment import check_limits
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
check_limits()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (300, 1000, "1000 1000"),
        (300, 4096, "4096 4096"),
        (300, 10_000, "4096 10000"),  # children may raise theirs further
        (5000, 10_000, "5000 10000"),
    ],
)
def test_the_command_may_open_4096_files_or_as_many_as_it_is_allowed(soft, hard, expected):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(soft), str(hard)], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (expected, 0)
