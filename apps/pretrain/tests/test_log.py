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


def test_a_record_says_what_the_steps_since_the_last_one_took(timer):
    timer.restart(10)
    with timer.waiting_for_data():
        time.sleep(0.02)
    record = timer.record(14, {"loss": jnp.float32(1.5), "grad_norm": jnp.float32(0.25)})
    assert (record["step"], record["loss"], record["grad_norm"]) == (14, 1.5, 0.25)
    assert record["learning_rate"] == pytest.approx(2e-3 * 14 / 51, rel=1e-5)
    assert record["step_s"] >= 0.005
    assert record["data_wait_s"] >= 0.005
    assert record["tokens_per_s"] == pytest.approx(16 * 64 / record["step_s"])
    assert "mfu" not in record  # this device's peak is not known


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_ends_the_run(timer, loss):
    with pytest.raises(FloatingPointError, match=f"expected a finite loss at step 3, got {loss}: lower --optimizer"):
        timer.record(3, {"loss": jnp.float32(loss), "grad_norm": jnp.float32(1)})


def test_the_log_starts_where_the_run_does(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n')
    with RunLog(folder) as log:
        log.begin(10)
        log.write({"step": 10, "loss": 2.0})
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [
        {"step": 0},
        {"step": 10, "loss": 2.0},
    ]
    assert json.loads(folder.starts.read_text())["step"] == 10
    assert any(folder.tensorboard.iterdir())
