"""Extended and forked runs whose process is killed: the same command ends in the same parameters."""

import shlex
import subprocess
import sys

import pytest
from many_runs import environment, kill_after, results

PRETRAIN = [sys.executable, "-m", "pretrain"]
OPTIONS = shlex.split(
    "--data train=book.txt,val=end.txt --hardware local --trackers --prompts a --model.num-layers 1 --model.num-heads 2"
    " --model.embed-dim 16 --model.seq-len 24 --model.dropout-rate 0.1 --train.global-batch-size 6 --train.log-every 7"
    " --train.eval-every 500 --train.checkpoint-every 50 --train.sample-tokens 0 --optimizer.schedule constant"
    " --train.checkpoints-to-keep none"
)
DIGESTS = """
found = {name: [digest(name, 700), len(steps(name))] for name in ("once", "extended", "fork")}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    results("", place)  # writes the texts
    return place


@pytest.mark.slow
def test_a_killed_extension_and_a_killed_fork_end_in_the_parameters_of_one_long_run(place):
    def run(*arguments, killed_after=None):
        command = [*PRETRAIN, *arguments]
        if killed_after is not None:
            kill_after(command, place, *killed_after)
        subprocess.run(command, cwd=place, env=environment(place), stdout=subprocess.DEVNULL, check=True)

    run(*OPTIONS, "--name", "once", "--train.max-steps", "700")
    run(*OPTIONS, "--name", "extended", "--train.max-steps", "150")
    run(*OPTIONS, "--name", "extended", "--train.max-steps", "700", killed_after=("extended", 300))
    run("--from", "once@100", "--name", "fork", "--train.log-every", "5", killed_after=("fork", 300))
    for other in ("extended", "fork"):
        done = subprocess.run([*PRETRAIN, "diff", "once", other], cwd=place, env=environment(place), check=False)
        assert done.returncode == 0, other
    found = results(DIGESTS, place)
    assert found["once"] == found["extended"]
    assert {digest for digest, _ in found.values()} == {found["once"][0]}
    assert [count for _, count in found.values()] == [14, 14, 13]
