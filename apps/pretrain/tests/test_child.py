"""Programs and functions in child processes: what they answer, and when they end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pretrain._surroundings.child import ChildError, call_in_child, run_program
from pretrain._surroundings.process_tree import living, processes_below

CALLS = """
import time
from pretrain._surroundings.child import call_in_child
call_in_child(time.sleep, 600, within_s=600)
"""


def test_a_child_says_why_it_has_failed(tmp_path):
    with pytest.raises(ChildError, match=r"^exit code 3, without a message$"):
        run_program(["sh", "-c", "exit 3"], within_s=10)
    with pytest.raises(ChildError, match=f"^{tmp_path}/x cannot be run: No such file or directory$"):
        run_program([f"{tmp_path}/x"], within_s=10)
    with pytest.raises(ChildError, match=r"^JSONDecodeError: Expecting value"):
        call_in_child(json.loads, "", within_s=10)
    assert call_in_child(os.path.basename, "a/b", within_s=10) == "b"


def test_a_variable_of_a_program_replaces_that_of_this_process(monkeypatch):
    monkeypatch.setenv("PROXY", "old")
    monkeypatch.setenv("KEPT", "kept")
    assert run_program(["sh", "-c", "echo $PROXY $KEPT"], within_s=10, variables={"PROXY": "new"}) == "new kept\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_child_ends_with_its_parent(sent):
    parent = subprocess.Popen([sys.executable, "-c", CALLS], stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 60
        while not (children := processes_below(parent.pid)):
            assert time.monotonic() < end_s, "the child has not started"
            time.sleep(0.02)
        time.sleep(0.5)  # the parent waits for it
        parent.send_signal(sent)
        parent.wait(60)
        while living(children):
            assert time.monotonic() < end_s, "the child is still there"
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
