"""Commands that tests start and watch: no process remains after a failed test."""

import os
import sys
import time

import pytest
from support import started, wait_until

SILENT = "import time; time.sleep(60)"
SLOW = "import time\nfor i in range(8): print(i, flush=True); time.sleep(0.25)\ntime.sleep(60)"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_stuck_command_fails_the_test_and_is_killed(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="no output for"):
        start_stuck_command(log)
    assert not is_running(int(log.with_name("pid").read_text()))


def start_stuck_command(log):
    with started([sys.executable, "-c", SILENT], log, {}) as process:
        log.with_name("pid").write_text(str(process.pid))
        wait_until(lambda: False, process, log, idle_s=0.5)


def test_a_slow_command_with_output_does_not_fail_the_test(tmp_path):
    log, began = tmp_path / "log", time.monotonic()
    with started([sys.executable, "-c", SLOW], log, {}) as process:
        wait_until(lambda: b"7" in log.read_bytes(), process, log, idle_s=1)
        assert time.monotonic() - began > 1.5
