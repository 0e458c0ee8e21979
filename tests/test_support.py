"""The watching of commands: a test that fails leaves nothing running."""

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


def test_a_command_that_is_stuck_fails_the_test_and_is_killed(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="nothing new for"):
        wait_for_ever(log)
    assert not is_running(int(log.with_name("pid").read_text()))


def wait_for_ever(log):
    with started([sys.executable, "-c", SILENT], log, {}) as process:
        log.with_name("pid").write_text(str(process.pid))
        wait_until(lambda: False, process, log, idle_s=0.5)


def test_a_command_that_is_slow_is_waited_for(tmp_path):
    log, began = tmp_path / "log", time.monotonic()
    with started([sys.executable, "-c", SLOW], log, {}) as process:
        wait_until(lambda: b"7" in log.read_bytes(), process, log, idle_s=1)
        assert time.monotonic() - began > 1.5
