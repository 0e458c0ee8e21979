"""A run with `train.num_shards` that is killed and continued on other numbers of workers: the same bits at the end."""

import json
import os
import signal
import sys

import pytest
from support import COMMAND, find_worker, started, wait_until

from ray_jax_launch import latest_step

MAX_STEPS = 200
OPTIONS = [
    "--preset=baby",
    "--model.num-layers=2",
    "--model.embed-dim=64",
    "--model.dropout-rate=0.1",
    "--train.num-shards=4",
    "--train.global-batch-size=16",
    "--train.grad-accum-steps=2",
    f"--train.max-steps={MAX_STEPS}",
    "--train.checkpoint-every=10",
    "--train.eval-every=100",
    "--train.eval-tokens=5000",
    "--train.max-failures=0",
    "--optimizer.warmup-steps=20",
    "--trackers",
]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def bits(run):
    """The digests of the last checkpoint, the losses of all steps and validation windows, and the samples."""
    digests = json.loads((run / "result.json").read_text())["digests"]
    losses = [(run / name).read_bytes() for name in ("step_losses.f32", "val_losses.f32", "samples.jsonl")]
    records = [
        {name: value for name, value in record.items() if name in ("step", "windows") or "val_loss" in name}
        for record in lines(run / "metrics.jsonl")
    ]
    assert {"val_loss/library", "full_val_loss/bottles"} <= records[-1].keys()
    return digests["params"], digests["opt_state"], losses, records


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_is_killed_and_continued_on_other_workers_has_the_bits_of_a_local_run(
    pretrain, corpus, environment, tmp_path, record_property
):
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{number} green bottles. " for number in range(5000)))
    # The weights change before, at and after the steps of the kills.
    data = f"library=2>0.5@30:{corpus},bottles=1>0@62>3@110:{other}"
    options = ["--data", data, "--storage-path", str(tmp_path), *OPTIONS]
    run, log = tmp_path / "run", tmp_path / "log"
    for hardware, step, find in (("cpu:2", 20, find_worker), ("cpu:1", 60, lambda session: session)):
        with started([*COMMAND, *options, "--name=run", "--hardware", hardware], log, environment) as command:
            wait_until(lambda step=step: (latest_step(run / "checkpoints") or 0) >= step, command, log)
            os.kill(find(command.pid), signal.SIGKILL)
            assert command.wait(120) != 0
        assert not (run / "result.json").exists()
    for name in ("run", "undisturbed"):
        done = pretrain(*options, "--name", name, "--hardware=local")
        assert done.returncode == 0, done.stderr
    starts = lines(run / "starts.jsonl")
    assert [start["workers"] for start in starts] == [2, 1, 1]
    assert 0 == starts[0]["step"] < starts[1]["step"] < starts[2]["step"]
    assert len((run / "step_losses.f32").read_bytes()) == 4 * MAX_STEPS
    assert bits(run) == bits(tmp_path / "undisturbed")
    record_property("fault", "SIGKILL of a worker on `cpu:2`, then of the command on `cpu:1`; `local` ends the run")
    record_property("lost", "steps since the last checkpoint")
