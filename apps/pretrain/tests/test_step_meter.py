import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    TrainState,
    create_optimizer,
    create_train_state,
    flops_per_token,
    make_train_step,
)
from owt_data import TokenSequence, TokenSpan
from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._training.step_timer import StepTimer

CONFIG = with_vocab_size(PRESETS["quickstart"](), 257)
TRAIN = TokenSequence((TokenSpan(path="not read", start=0, stop=3000 * 64 + 1),))


@pytest.fixture
def timer():
    return StepTimer(CONFIG, TRAIN, "cpu", 1)


def metrics(loss, *, grad_norm=1.0, num_skipped=0, in_a_row=0):
    return {
        "loss": jnp.float32(loss),
        "grad_norm": jnp.float32(grad_norm),
        "num_skipped": jnp.int32(num_skipped),
        "num_skipped_in_a_row": jnp.int32(in_a_row),
    }


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


def test_a_record_has_the_epochs_and_the_tokens_up_to_its_step(timer):
    assert timer.progress(0) == {"step": 0, "epoch": 0.0, "tokens": 0}
    record = timer.record(250, metrics(1.5))
    assert (record["epoch"], record["tokens"]) == (1.3333, 250 * 16 * 64)  # 250 * 16 of 3000 windows


@pytest.mark.parametrize("num_devices", [1, 8])
def test_mfu_is_the_share_of_the_peak_of_all_devices(num_devices):
    timer = StepTimer(CONFIG, TRAIN, "NVIDIA H200", num_devices)
    time.sleep(0.02)
    record = timer.record(1, metrics(1.5))
    flops_per_s = flops_per_token(CONFIG.model) * record["tokens_per_s"]
    assert record["mfu"] == pytest.approx(flops_per_s / (989e12 * num_devices))


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_step_that_was_skipped_is_counted_and_has_no_loss(timer, loss):
    timer.record(10, metrics(2.0))
    record = timer.record(20, metrics(loss, num_skipped=3))
    assert (record["num_skipped"], "loss" in record) == (3, False)
    assert record["learning_rate"] == pytest.approx(2e-3 * 17 / 51, rel=1e-5)  # of the seventeenth update
    assert "num_skipped" in timer.record(21, metrics(1.9, num_skipped=3))


def test_a_run_that_only_skips_ends(timer):
    timer.record(40, metrics("nan", num_skipped=49, in_a_row=49))
    with pytest.raises(FloatingPointError, match=r"got 50 steps without, up to step 60\. Lower --optim"):
        timer.record(60, metrics("nan", num_skipped=50, in_a_row=50))


def test_to_be_stopped_does_not_end_a_run_that_only_skips(timer):
    assert timer.record(55, metrics("nan", num_skipped=55, in_a_row=55), is_due=False)["num_skipped"] == 55


MODEL = GPT2Config(vocab_size=65, seq_len=8, num_layers=1, num_heads=1, embed_dim=8)
SAVE_EVERY, RECORD_EVERY = 20, 10


def last_step(optimizer, train_step, kill_after=None):
    """The step at which a run ends that has no finite loss from step 23 on, killed and resumed once or not at all."""
    state, timer = create_train_state(MODEL, optimizer, jax.random.key(0)), StepTimer(CONFIG, TRAIN, "cpu", 1)
    saved, step = jax.tree.map(np.asarray, state), 0
    while step < 200:
        step += 1
        windows = np.full((2, 9), 65 if step >= 23 else 3, np.uint16)  # 65 is no token
        state, found = train_step(state, windows, jax.random.key(1))
        if step % RECORD_EVERY == 0:
            try:
                timer.record(step, found)
            except FloatingPointError:
                return step
        if step % SAVE_EVERY == 0:
            saved = jax.tree.map(np.asarray, state)
        if step == kill_after:
            counters = {name: getattr(saved, name) for name in ("step", "num_skipped", "num_skipped_in_a_row")}
            arrays = {"params": saved.params, "opt_state": saved.opt_state}
            state = TrainState(**jax.tree.map(jnp.asarray, counters | arrays))
            timer, step, kill_after = StepTimer(CONFIG, TRAIN, "cpu", 1), int(saved.step), None
    return None


@pytest.mark.fault
def test_a_kill_does_not_move_the_step_at_which_a_diverged_run_ends(record_property):
    record_property("fault", "a diverged run is killed while it skips steps")
    record_property("lost", "steps since the last checkpoint")
    optimizer = create_optimizer(OptimizerConfig(), 200)
    train_step = make_train_step(MODEL, optimizer)
    assert last_step(optimizer, train_step) == 80  # 22 + 50 steps, then the next that is recorded
    assert [last_step(optimizer, train_step, kill_after) for kill_after in (15, 41, 79)] == [80] * 3
