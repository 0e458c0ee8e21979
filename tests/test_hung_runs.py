"""Runs of the command whose workers hang: stopped processes, and data that never come. They end in the same numbers."""

import hashlib
import os
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import COMMAND, started, wait_until

from nnx_gpt2 import abstract_train_state, create_optimizer
from pretrain._run.find import find_run
from pretrain._run.metrics import read_records
from ray_jax_launch import Checkpoints

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MAX_STEPS = 200
OPTIONS = [
    "--preset=baby", "--model.num-layers=1", "--model.embed-dim=64", f"--train.max-steps={MAX_STEPS}",
    "--train.log-every=1", "--train.eval-every=100", "--train.eval-tokens=10000", "--train.sample-tokens=0",
    "--train.checkpoint-every=50", "--train.global-batch-size=48", "--train.hang-timeout-s=5", "--trackers",
]  # fmt: skip
# Reads of the training windows of the first start hang in the second worker.
HANGING_READER = """
import os, time
from pathlib import Path
import importlib.abc, importlib.util, sys

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "pretrain._training.train_batches":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            read = module.train_batches
            def train_batches(config, data, start, **given):
                import jax
                for step, rows in enumerate(read(config, data, start, **given), start):
                    hung = Path(os.environ["HUNG"])
                    if step == 70 and jax.process_index() == 1 and not hung.exists():
                        hung.touch()
                        time.sleep(1e6)
                    yield rows
            module.train_batches = train_batches
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""


def find_workers(session: int) -> list[int]:
    """Return the process ids of the training workers in a process session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = (path / "cmdline").read_text().startswith("ray::RayTrainWorker")
            if is_worker and (path / "stat").read_text().rpartition(")")[2].split()[3] == str(session):
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def numbers(run: Path) -> tuple[str, list[tuple[int, float, float]]]:
    """Return the digest of all arrays after the last step, and step, loss and gradient norm of each record."""
    folder, description = find_run(str(run))
    config = description.config
    like = abstract_train_state(config.model, create_optimizer(config.optimizer, config.train.max_steps))
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        arrays = checkpoints.restore(MAX_STEPS, {"params": like.params, "opt_state": like.opt_state})
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)))
    records = [one for one in read_records(run / "metrics.jsonl") if "loss" in one]
    return digest.hexdigest(), [(one["step"], one["loss"], one["grad_norm_max"]) for one in records]


def train(
    hardware: str, corpus: Path, environment: dict[str, str], storage: Path, name: str, *, stops: int | None = None
) -> str:
    """Run the command to its end. Return its output.

    Args:
        hardware: the hardware.
        corpus: the text.
        environment: variables of the command.
        storage: the storage path.
        name: of the run.
        stops: the worker that gets SIGSTOP after 60 steps, in the order of process ids; None for none.
    """
    log = storage / f"{name}.log"
    args = ["--data", str(corpus), "--storage-path", str(storage), "--name", name, "--hardware", hardware, *OPTIONS]
    metrics = storage / name / "metrics.jsonl"
    with started([*COMMAND, *args], log, environment) as driver:
        victim = 0
        if stops is not None:
            wait_until(lambda: metrics.exists() and len(read_records(metrics)) > 60, driver, log)
            victim = find_workers(driver.pid)[stops]
            os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: driver.poll() is not None, driver, log)
        if victim:
            assert not Path(f"/proc/{victim}").exists()
    output = log.read_text()
    assert driver.returncode == 0, output
    assert "Traceback" not in output
    return output


HUNG = re.compile(r"no step for (\S+) s after step (\d+) \(usual: \S+ s\)")


def test_a_worker_that_is_stopped_starts_again_and_changes_no_number(corpus, environment, tmp_path, record_property):
    record_property("fault", "SIGSTOP of the only worker")
    record_property("lost", "steps since the last checkpoint")
    output = train("cpu:1", corpus, environment, tmp_path, "stopped", stops=0)
    assert HUNG.search(output), output
    assert "worker 0 does not answer; the workers start again (failure 1 of at most 3 " in output
    assert [step for step, *_ in numbers(tmp_path / "stopped")[1]] == list(range(1, MAX_STEPS + 1))


@pytest.fixture(scope="module")
def undisturbed(corpus, environment, tmp_path_factory):
    """The numbers of an undisturbed run on two workers, on which nothing hangs."""
    storage = tmp_path_factory.mktemp("undisturbed")
    output = train("cpu:2", corpus, environment, storage, "run")
    assert not HUNG.search(output)
    return numbers(storage / "run")


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_one_of_two_workers_that_is_stopped_changes_no_number(
    undisturbed, corpus, environment, tmp_path, record_property, worker
):
    record_property("fault", "SIGSTOP of one of two workers")
    record_property("lost", "steps since the last checkpoint")
    output = train("cpu:2", corpus, environment, tmp_path, "run", stops=worker)
    assert HUNG.search(output), output
    assert re.search(r"\): worker [01] does not answer; the workers start again \(failure 1 of at most 3 ", output)
    assert re.search(r"stack of worker [01]:\n", output)
    assert numbers(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_a_reader_that_hangs_on_one_of_two_workers_changes_no_number(
    undisturbed, corpus, environment, tmp_path, record_property
):
    record_property("fault", "a read of training data that never returns, in one of two workers")
    record_property("lost", "steps since the last checkpoint")
    (tmp_path / "sitecustomize.py").write_text(HANGING_READER)
    hanging = environment | {"PYTHONPATH": str(tmp_path), "HUNG": str(tmp_path / "hung")}
    output = train("cpu:2", corpus, hanging, tmp_path, "run")
    assert (tmp_path / "hung").exists()
    assert HUNG.search(output), output
    assert "), although all workers answer; the workers start again (failure 1 of at most 3 " in output
    assert re.search(r"stack of worker 1:\n(.*\n)* .*in train_batches", output)
    assert numbers(tmp_path / "run") == undisturbed
