import json
import time

import jax.numpy as jnp
import pytest

from nnx_gpt2 import make_mesh
from pretrain import PRESETS
from pretrain._log import RunLog, StepTimer
from pretrain._run import RunFolder


@pytest.fixture
def timer():
    return StepTimer(PRESETS["quickstart"](), make_mesh())


def metrics(loss, *, grad_norm=1.0, num_skipped=0):
    return {"loss": jnp.float32(loss), "grad_norm": jnp.float32(grad_norm), "num_skipped": jnp.int32(num_skipped)}


def test_a_record_says_what_the_steps_since_the_last_one_took(timer):
    timer.restart(10)
    with timer.waiting_for_data():
        time.sleep(0.02)
    record = timer.record(14, metrics(1.5, grad_norm=0.25))
    assert (record["step"], record["loss"], record["grad_norm"]) == (14, 1.5, 0.25)
    assert record["learning_rate"] == pytest.approx(2e-3 * 14 / 51, rel=1e-5)
    assert record["step_s"] >= 0.005
    assert record["data_wait_s"] >= 0.005
    assert record["tokens_per_s"] == pytest.approx(16 * 64 / record["step_s"])
    assert "mfu" not in record  # this device's peak is not known


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_step_that_was_skipped_is_counted_and_has_no_loss(timer, loss):
    timer.record(10, metrics(2.0))
    record = timer.record(20, metrics(loss, num_skipped=3))
    assert (record["num_skipped"], "loss" in record) == (3, False)
    assert record["learning_rate"] == pytest.approx(2e-3 * 17 / 51, rel=1e-5)  # of the seventeenth update
    assert "num_skipped" in timer.record(21, metrics(1.9, num_skipped=3))


def test_a_run_that_only_skips_ends(timer):
    timer.record(10, metrics(2.0))
    for step in (25, 40, 59):
        timer.record(step, metrics("nan", num_skipped=step - 10))
    with pytest.raises(FloatingPointError, match="got none in the last 50 steps up to step 60: lower --optimizer"):
        timer.record(60, metrics("nan", num_skipped=50))


def test_a_resumed_run_counts_from_what_was_skipped_before():
    timer = StepTimer(PRESETS["quickstart"](), make_mesh(), num_skipped=40)
    timer.record(110, metrics("nan", num_skipped=50))
    timer.record(150, metrics("nan", num_skipped=90))
    with pytest.raises(FloatingPointError, match="in the last 50 steps up to step 160"):
        timer.record(160, metrics("nan", num_skipped=100))


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    sent = []
    with RunLog(folder, send=sent.append) as log:
        log.begin(10)
        log.write({"step": 10, "loss": 2.0})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [
        {"step": 0},
        {"step": 10, "loss": 2.0},
    ]
    assert sent == [{"step": 10, "loss": 2.0}]
    assert json.loads(folder.starts.read_text())["step"] == 10
    assert any(folder.tensorboard.iterdir())
