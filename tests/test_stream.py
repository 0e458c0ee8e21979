"""Training while the text is tokenized, against training on tokens that were prepared before."""

import json
import os
import signal
import subprocess

import pytest
from plain_loop import run_plain_loop
from support import COMMAND, started, wait_until

from ray_jax_launch import latest_step

# 64 windows * 256 tokens * 240 steps = 4 million tokens: more than two epochs. Each kill waits for a new checkpoint, of
# which a fast machine may write two before it comes.
MAX_STEPS = 240
OPTIONS = [
    "--preset=baby",
    "--model.num-layers=1",
    "--model.num-heads=1",
    "--model.embed-dim=8",
    "--model.seq-len=256",
    "--train.order=sequential-first",
    "--train.global-batch-size=64",
    f"--train.max-steps={MAX_STEPS}",
    "--train.log-every=1",
    "--train.eval-every=60",
    "--train.eval-tokens=32768",
    "--train.checkpoint-every=20",
    "--prepare.split=start",
    "--name=run",
]
EXACT = ("step", "loss", "grad_norm_max")


@pytest.fixture(scope="module")
def articles(tmp_path_factory):
    """1.5 MB of JSON lines: 6 shards."""
    path = tmp_path_factory.mktemp("articles") / "articles.jsonl"
    with path.open("w") as file:
        for number in range(1500):
            file.write(json.dumps({"text": f"{number} " + "".join(map(str, range(number, number + 240)))}) + "\n")
    return path


@pytest.fixture(scope="module")
def prepared(articles, environment):
    """Step, loss and gradient norm of every step of a plain loop over prepared tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        return run_plain_loop(["--data", str(articles), *OPTIONS]).records


def records(storage):
    lines = (storage / "run" / "metrics.jsonl").read_text().splitlines()
    return [{key: record[key] for key in EXACT} for record in map(json.loads, lines) if "loss" in record]


def train_and_kill(articles, storage, environment, *, hardware, kills, kill):
    """Run the stream to its end, and kill it `kills` times, each time after a new checkpoint."""
    command = [
        *COMMAND, "--data", str(articles), "--data-mode=stream", f"--prepare.cache-path={storage / 'tokens'}",
        f"--hardware={hardware}", f"--storage-path={storage}", *OPTIONS,
    ]  # fmt: skip
    log = storage / "log"
    checkpoints = storage / "run" / "checkpoints"
    process, killed = None, 0
    while process is None or process.returncode != 0:
        before = latest_step(checkpoints) or 0
        with started(command, log, environment) as process:
            while process.poll() is None and killed < kills:
                wait_until(lambda before=before: (latest_step(checkpoints) or 0) > before, process, log)
                before, killed = latest_step(checkpoints) or 0, killed + 1
                kill(process, killed)
            wait_until(lambda process=process: process.poll() is not None, process, log)
        assert process.returncode in (0, -signal.SIGKILL), log.read_text()
    assert killed == kills


def kill_command(process, number):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.fault
def test_a_stream_that_is_killed_has_the_numbers_of_a_prepared_run(
    articles, prepared, environment, tmp_path, record_property
):
    record_property("fault", "SIGKILL of a command that trains while it tokenizes")
    record_property("lost", "the steps since the newest checkpoint")
    train_and_kill(articles, tmp_path, environment, hardware="local", kills=1, kill=kill_command)
    assert records(tmp_path) == prepared
    (tokens,) = (tmp_path / "tokens").iterdir()
    assert {path.name for path in tokens.iterdir()} == {
        "train.bin",
        "train.docs",
        "val.bin",
        "val.docs",
        "manifest.json",
    }


@pytest.mark.slow
@pytest.mark.fault
def test_a_stream_on_two_workers_has_the_numbers_of_a_prepared_run_after_five_kills(
    articles, prepared, environment, tmp_path, record_property
):
    record_property("fault", "SIGKILL of a training worker three times, and of the command twice, while it tokenizes")
    record_property("lost", "the steps since the newest checkpoint")

    def kill(process, number):
        if number % 2 == 0:
            kill_command(process, number)
            return
        workers = find_workers(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)

    train_and_kill(articles, tmp_path, environment, hardware="cpu:2", kills=5, kill=kill)
    found = records(tmp_path)
    assert [record["step"] for record in found] == [record["step"] for record in prepared]
    # The sum over two processes rounds differently from the sum in one.
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in prepared], rel=1e-4)


def find_workers(root):
    """The training workers among the descendants of a process."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    parents = {root}
    rows = [(int(pid), int(parent), args) for pid, parent, args in (line.split(None, 2) for line in lines.splitlines())]
    for _ in range(4):
        parents |= {pid for pid, parent, _ in rows if parent in parents}
    return [pid for pid, parent, args in rows if parent in parents and "RayTrainWorker" in args]
