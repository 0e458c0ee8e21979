"""Runs of the command through Ray: killed, continued, finished, damaged, and on two workers.

The reference for their numbers is a plain loop in this process.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
from plain_loop import run_plain_loop
from support import COMMAND, find_worker, started, wait_until

from pretrain._commands.load import load_trained
from pretrain._run.folder import locate
from pretrain._run.metrics import read_records
from ray_jax_launch import latest_step

MAX_STEPS = 100
OPTIONS = [
    "--preset=baby",
    "--model.num-layers=2",
    "--model.embed-dim=64",
    f"--train.max-steps={MAX_STEPS}",
    "--train.log-every=1",
    "--train.eval-every=50",
    "--train.eval-tokens=30000",
    "--train.checkpoint-every=10",
    "--optimizer.warmup-steps=20",
    "--name=run",
]
EXACT = ("step", "loss", "grad_norm_max")


def metrics(storage):
    return [json.loads(line) for line in (storage / "run" / "metrics.jsonl").read_text().splitlines()]


def exact(records):
    return [{key: record[key] for key in EXACT} for record in records if "loss" in record]


def losses(records):
    return np.array([record["loss"] for record in records if "loss" in record])


def run_until_signal(signal_number, args, environment, newest, log):
    """Start the command, signal its process group after the first checkpoint, and return its exit code.

    SIGKILL goes to the command only, like the kernel's signal when memory runs out.
    """
    with started([*COMMAND, *args], log, environment) as driver:
        wait_until(lambda: newest() is not None, driver, log)
        (os.kill if signal_number == signal.SIGKILL else os.killpg)(driver.pid, signal_number)
        wait_until(lambda: driver.poll() is not None, driver, log)
    assert newest() < MAX_STEPS
    return driver.returncode


@pytest.fixture(scope="module")
def plain(corpus, environment):
    """Step, loss and gradient norm of every step of a plain loop over the same windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        return run_plain_loop(["--data", str(corpus), *OPTIONS]).records


@pytest.fixture(scope="module")
def finished(pretrain, corpus, environment, tmp_path_factory):
    """Storage of a run that was killed once and then finished, and the output of the second command."""
    storage = tmp_path_factory.mktemp("finished")
    args = ["--data", str(corpus), "--storage-path", str(storage), "--hardware=cpu:1", *OPTIONS]
    newest = partial(latest_step, storage / "run" / "checkpoints")
    code = run_until_signal(signal.SIGKILL, args, environment, newest, storage / "log")
    assert code == -signal.SIGKILL
    assert not (storage / "run" / "result.json").exists()
    done = pretrain(*args)
    assert done.returncode == 0, done.stderr
    return storage, done.stdout


def test_a_killed_and_continued_run_has_the_numbers_of_a_plain_loop_bit_for_bit(finished, plain):
    storage, printed = finished
    assert "continuing from step" in printed
    assert exact(metrics(storage)) == plain


def test_a_finished_run_has_the_documented_files(finished):
    storage, _ = finished
    run = storage / "run"
    names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoints", "result.json", "loss.png", "sample.txt",
        "starts.jsonl", "phases.jsonl", "samples.jsonl", "step_losses.f32", "val_losses.f32",
    }  # fmt: skip
    assert any((run / "tensorboard").iterdir())
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_config_of_a_run_has_options_hardware_and_versions(finished):
    storage, _ = finished
    config = json.loads((storage / "run" / "config.json").read_text())
    assert config["config"]["model"]["num_layers"] == 2
    assert config["hardware"] == "cpu:1"
    assert config["versions"]["jax"]


def test_the_result_of_a_run_counts_steps_restarts_and_workers(finished):
    storage, _ = finished
    result = json.loads((storage / "run" / "result.json").read_text())
    assert (result["steps"], result["restarts"], result["workers"]) == (MAX_STEPS, 1, 1)


def test_a_run_keeps_the_newest_two_checkpoints_and_the_best(finished):
    """When the last one was saved, the best was that of step 50, the last validation before."""
    storage, _ = finished
    assert sorted(path.name for path in (storage / "run" / "checkpoints").iterdir()) == ["100", "50", "90"]


def test_the_validation_loss_falls(finished):
    storage, _ = finished
    validations = [record["val_loss"] for record in metrics(storage) if "val_loss" in record]
    assert len(validations) == 1 + MAX_STEPS // 50
    assert validations[0] == pytest.approx(np.log(257), abs=0.2)
    assert validations[-1] < 3.1
    assert validations[-1] < validations[1] < validations[0]


def test_metrics_have_each_step_once(finished):
    storage, _ = finished
    assert [record["step"] for record in metrics(storage)] == list(range(MAX_STEPS + 1))


def test_timed_metrics_have_the_documented_keys(finished):
    storage, _ = finished
    records = metrics(storage)
    # The first step of each of the two starts compiles, and is not timed.
    timed = [record for record in records if "step_s" in record]
    assert len(timed) == MAX_STEPS - 2
    for record in timed:
        assert {name for name in record if "val_" not in name} == {
            "step", "epoch", "tokens", "time_s", "loss", "learning_rate", "grad_norm_max", "tokens_per_s", "step_s",
            "data_wait_s", "windows",
        }  # fmt: skip
        assert record["tokens_per_s"] == pytest.approx(12 * 64 / record["step_s"], rel=1e-5)


def test_the_command_prints_progress_sample_and_folder(finished):
    storage, printed = finished
    assert re.search(rf"^\d\d:\d\d:\d\d  step {MAX_STEPS}/{MAX_STEPS}  epoch [0-9.]+  loss ", printed, re.M)
    assert "left 0:" in printed
    assert len((storage / "run" / "sample.txt").read_text()) > 300
    samples = printed.partition("samples of the prompt")[2].splitlines()[1:4]
    assert [line.split()[:2] for line in samples] == [["step", str(step)] for step in (0, 50, MAX_STEPS)]
    assert f"run folder: {storage / 'run'}" in printed


def test_the_same_command_on_a_finished_run_prints_its_result_and_succeeds(finished, pretrain, corpus):
    storage, _ = finished
    again = pretrain("--data", corpus, "--storage-path", storage, "--hardware=cpu:1", *OPTIONS)
    assert again.returncode == 0
    assert "is finished; choose another --name for a new one" in again.stdout


def test_samples_of_a_finished_run_are_reproducible(finished, pretrain):
    storage, _ = finished
    args = ("sample", storage / "run", "--prompt", "import ", "--max-new-tokens", "40", "--num-samples", "2")
    one, two = pretrain(*args), pretrain(*args)
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout
    assert one.stdout.count("import ") >= 2


def test_the_evaluation_of_a_finished_run_has_its_validation_loss(finished, pretrain):
    storage, _ = finished
    done = pretrain("eval", storage / "run")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == MAX_STEPS
    assert found["num_tokens"] == 30_000 - 1  # the last tenth of 300 000 bytes, less the first
    last = metrics(storage)[-1]
    assert found["val_loss"] == last["full_val_loss"] == last["val_loss"]
    assert found["val_bits_per_byte"] == last["full_val_bits_per_byte"]


def test_an_evaluation_skips_a_damaged_checkpoint_with_a_warning(finished, pretrain, tmp_path):
    storage, _ = finished
    run = shutil.copytree(storage / "run", tmp_path / "run")
    params = run / "checkpoints" / str(MAX_STEPS) / "params"
    file = max((path for path in params.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    done = pretrain("eval", run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == MAX_STEPS - 10
    assert f"checkpoint {MAX_STEPS} in {run / 'checkpoints'} is damaged" in done.stderr


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_with_damaged_checkpoints_only_ends_with_an_error_message(
    finished, pretrain, corpus, tmp_path, record_property
):
    storage, _ = finished
    run = shutil.copytree(storage / "run", tmp_path / "run")
    (run / "result.json").unlink()
    for checkpoint in (run / "checkpoints").iterdir():
        file = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1])
    done = pretrain("--data", corpus, "--storage-path", tmp_path, "--hardware=cpu:1", *OPTIONS)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert " are damaged (" in error
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["100", "50", "90"]
    record_property("fault", "every checkpoint of a run is truncated")
    record_property("lost", "the run: it ends with an error, and changes no file")


@pytest.mark.slow
@pytest.mark.fault
def test_a_run_with_damaged_files_continues_to_the_numbers_of_a_plain_loop(
    finished, plain, pretrain, corpus, tmp_path, record_property
):
    storage, _ = finished
    run = shutil.copytree(storage / "run", tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / str(MAX_STEPS))
    (run / "checkpoints" / str(MAX_STEPS)).mkdir()
    shutil.rmtree(run / "tensorboard")
    for name in ("config.json", "result.json", "tensorboard"):
        (run / name).write_bytes(b'\xff\xfe{"steps": 1')
    for name in ("metrics.jsonl", "starts.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'[1]\n\xff\xfe\n\0\0\n{"step": "91"}\n{"step": 91, "loss": "low"}\n{"step": 9')
    done = pretrain(
        "--data", corpus, "--storage-path", tmp_path, "--hardware=cpu:1", *OPTIONS, "--train.max-failures=0"
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert exact(metrics(tmp_path)) == plain
    assert json.loads((run / "result.json").read_text())["steps"] == MAX_STEPS
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (storage / "run", run))
    before["config"] |= {"storage_path": str(tmp_path)}  # those of this start
    before["config"]["train"] |= {"max_failures": 0}
    assert after == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["100", "100.damaged", "50", "90"]
    record_property("fault", "every file of a run is damaged except the second newest checkpoint")
    record_property("lost", "steps since this checkpoint, and the curves of TensorBoard")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_checkpoint_damaged_during_a_restart_of_the_workers_is_skipped(
    plain, corpus, environment, tmp_path, record_property
):
    args = ["--data", str(corpus), "--storage-path", str(tmp_path), "--hardware=cpu:1", *OPTIONS]
    checkpoints = tmp_path / "run" / "checkpoints"
    log = tmp_path / "log"
    with started([*COMMAND, *args], log, environment) as driver:
        wait_until(lambda: (latest_step(checkpoints) or 0) >= 20, driver, log)
        os.kill(find_worker(driver.pid), signal.SIGKILL)
        killed = time.time()
        time.sleep(1)  # until a running save has succeeded or failed
        newest = latest_step(checkpoints)
        assert newest is not None
        file = max((checkpoints / str(newest)).rglob("*"), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1])
        wait_until(lambda: driver.poll() is not None, driver, log)
    output = log.read_text()
    assert driver.returncode == 0, output
    assert "worker 0 died, or no longer answers; the workers start again (failure 1 of at most 3 " in output
    assert f"checkpoint {newest} in {checkpoints} is damaged" in output
    assert exact(metrics(tmp_path)) == plain
    first, second = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert (first["step"], second["step"]) == (0, newest - 10)
    record_property("fault", "SIGKILL of the worker; the newest checkpoint is truncated before the restart")
    record_property("lost", "steps since the previous checkpoint")
    record_property("recovery_s", round(second["time_s"] - killed, 1))


@pytest.mark.slow
def test_a_fork_on_two_workers_is_its_parent_to_the_bit(pretrain, corpus, tmp_path):
    storage = ("--storage-path", tmp_path)
    options = (*OPTIONS[:-1], "--optimizer.schedule=constant", "--optimizer.average-decay=0.9")
    done = pretrain("--data", corpus, *storage, "--hardware=cpu:2", *options, "--train.keep-every=40", "--name=parent")
    assert done.returncode == 0, done.stderr
    done = pretrain("--from", f"{tmp_path / 'parent'}@40", *storage, "--name=fork")
    assert done.returncode == 0, done.stderr
    weights = []
    for name in ("parent", "fork"):
        assert pretrain("export", tmp_path / name, tmp_path / f"{name}-exported").returncode == 0
        weights.append((tmp_path / f"{name}-exported" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    parent, fork = (read_records(tmp_path / name / "metrics.jsonl") for name in ("parent", "fork"))
    assert exact(fork) == exact(parent)[39:]


@pytest.mark.slow
def test_two_workers_on_object_storage_have_the_losses_of_one_until_an_interruption(
    plain, corpus, environment, s3, tmp_path
):
    run = f"{s3}/runs/run"
    args = ["--data", str(corpus), "--storage-path", f"{s3}/runs", "--hardware=cpu:2", *OPTIONS]
    log = tmp_path / "log"
    code = run_until_signal(signal.SIGTERM, args, environment, partial(latest_step, f"{run}/checkpoints"), log)
    printed = [line for line in log.read_text().splitlines() if line.startswith("interrupted")]
    assert code == 130, log.read_text()
    assert printed == [
        "interrupted: the workers save what they have",
        "interrupted: run the same command again to continue",
    ]
    folder = locate(run)
    folder.pull()
    two = losses(read_records(folder.metrics))
    assert 10 <= len(two) < MAX_STEPS
    np.testing.assert_allclose(two, losses(plain)[: len(two)], rtol=0, atol=1e-4)
    # The interruption saves the last finished step, which metrics may not have yet.
    step = latest_step(f"{run}/checkpoints")
    assert step in (len(two), len(two) + 1)
    assert load_trained(run).step == step
