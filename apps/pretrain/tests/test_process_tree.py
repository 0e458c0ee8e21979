"""Processes, which are told apart also where one has the number of another that has ended."""

import dataclasses
import os
import subprocess
import sys
import time

from pretrain._surroundings.process_tree import living, processes_below

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_process_with_the_number_of_another_one_is_not_that_one():
    children = [subprocess.Popen(SLEEP)]
    try:
        time.sleep(0.05 if sys.platform == "linux" else 1.1)  # `ps` tells whole seconds
        children.append(subprocess.Popen(SLEEP))
        processes = {process.pid: process for process in processes_below(os.getpid())}
        first, second = (processes[child.pid] for child in children)
        assert first.birth != second.birth
        assert living([first, second]) == [first, second]
        former = dataclasses.replace(first, birth=second.birth)  # it had ended, and its number was given again
        assert living([former]) == []
        assert not former.kill()
        assert children[0].poll() is None
        assert first.kill()
        children[0].wait(60)
        assert living([first, second]) == [second]
    finally:
        for child in children:
            child.kill()
            child.wait()
