import dataclasses
import json
from types import SimpleNamespace

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
    learning_rate_schedule,
    make_train_step,
)
from owt_data import GrowingTokens, TokenSequence, TokenSpan, window_starts
from pretrain import PRESETS
from pretrain._config import with_vocab_size
from pretrain._run.metrics import windows_digest
from pretrain._run.spikes import spike_scores
from pretrain._training.step_meter import StepMeter, Unrecorded

CONFIG = with_vocab_size(PRESETS["quickstart"](), 257).with_options({"train.order": "shuffle"})
TRAIN = TokenSequence((TokenSpan(path="not read", start=0, stop=3000 * 64 + 1),))


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def make_meter(config=CONFIG, *, device_kind="cpu", stats=None, num_devices=1, clock=None):
    device = SimpleNamespace(device_kind=device_kind, memory_stats=lambda: stats)
    return StepMeter(config, TRAIN, device, num_devices, clock=clock or Clock(), wall_clock=lambda: 1234.56789)


def metrics(loss, *, grad_norm=1.0, num_skipped=0, in_a_row=0):
    return {
        "loss": jnp.float32(loss),
        "grad_norm": jnp.float32(grad_norm),
        "num_skipped": jnp.int32(num_skipped),
        "num_skipped_in_a_row": jnp.int32(in_a_row),
    }


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_learning_rates_are_computed_for_many_steps_at_once(schedule, monkeypatch):
    """A continued run has the rates of an undisturbed one."""
    made, calls = learning_rate_schedule, []

    def counted(*arguments):
        rate = made(*arguments)
        return lambda steps: calls.append((len(steps), getattr(jax.config, "jax_default_device"))) or rate(steps)  # noqa: B009 - untyped

    monkeypatch.setattr("pretrain._training.step_meter.learning_rate_schedule", counted)
    config = CONFIG.with_options({"train.max_steps": 2500, "optimizer.schedule": schedule})
    expected, found = learning_rate_schedule(config.optimizer, 2500), []
    meter, continued = make_meter(config), make_meter(config)
    calls.clear()
    for step in (1, 2, 7, 51, 1023, 1024, 1025, 1999, 2048, 2049, 2499, 2500):
        meter.add(metrics(1.0))
        found.append(meter.wait_for_record(step)["learning_rate"])
        assert found[-1] == pytest.approx(float(expected(step - 1)), rel=1e-5)
    assert calls == [(1024, jax.local_devices(backend="cpu")[0])] * 2
    continued.add(metrics(1.0))
    assert continued.wait_for_record(2499)["learning_rate"] == found[-2]
    assert (found[-1] < found[-2] < found[4]) == (schedule != "constant")


def test_a_process_without_the_platform_cpu_has_learning_rates(monkeypatch):
    of_all = jax.local_devices

    def local_devices(*arguments, backend=None, **options):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")  # as with JAX_PLATFORMS=cuda
        return of_all(*arguments, backend=backend, **options)

    monkeypatch.setattr(jax, "local_devices", local_devices)
    meter = make_meter()
    meter.add(metrics(1.0))
    assert meter.wait_for_record(13)["learning_rate"] == pytest.approx(2e-3 * 13 / 51, rel=1e-5)


def test_a_record_has_the_mean_loss_and_the_largest_gradient_of_the_steps_since_the_last_one():
    meter = make_meter()
    for loss, grad_norm in ((2.0, 0.5), (1.0, 3.25), (1.5, 0.25)):
        meter.add(metrics(loss, grad_norm=grad_norm))
    record = meter.wait_for_record(13)
    assert (record["step"], record["loss"], record["grad_norm_max"]) == (13, 1.5, 3.25)
    assert record["learning_rate"] == pytest.approx(2e-3 * 13 / 51, rel=1e-5)
    meter.add(metrics(9.0, grad_norm=0.125))
    record = meter.wait_for_record(14)
    assert (record["loss"], record["grad_norm_max"]) == (9.0, 0.125)


def test_each_step_has_its_loss_and_nan_without_an_update():
    meter = make_meter()
    for loss, grad_norm in ((2.0, 1.0), (float("nan"), 1.0), (1.0, float("inf")), (0.1, 1.0)):
        meter.add(metrics(loss, grad_norm=grad_norm))
    assert meter.take_losses() == []  # nothing waits for the device
    meter.wait_for_record(4)
    np.testing.assert_array_equal(meter.take_losses(), [2.0, np.nan, np.nan, np.float32(0.1)])
    meter.add(metrics(3.0))
    meter.wait_for_unrecorded()
    assert (meter.take_losses(), meter.take_losses()) == ([3.0], [])


def test_many_steps_without_a_record_do_not_stay_on_the_device_and_change_no_number():
    """The losses of the older steps are known before the record, and the newest steps are not waited for."""
    meter, losses = make_meter(), np.random.default_rng(0).normal(3.0, 0.1, 1000).astype(np.float32)
    losses[600], losses[700] = 9.0, np.nan
    taken, most = [], 0
    for loss in losses:
        meter.add(metrics(loss))
        taken += meter.take_losses()
        most = max(most, meter.num_in_flight)
    assert 64 <= most <= 256
    assert len(taken) == 1000 - meter.num_in_flight
    record = meter.wait_for_record(1000)
    np.testing.assert_array_equal(np.array(taken + meter.take_losses(), np.float32), losses)
    assert record["loss"] == float(f"{sum(float(loss) for loss in losses if np.isfinite(loss)) / 999:.6g}")
    assert (record["spike_step"], record["skipped_step"]) == (601, 701)


def test_a_record_has_six_significant_digits():
    meter = make_meter()
    meter.add(metrics(1.23456789, grad_norm=123456.789))
    record = meter.wait_for_record(1)
    assert (record["loss"], record["grad_norm_max"], record["time_s"]) == (1.23457, 123457.0, 1234.568)


def test_the_time_of_a_step_is_that_of_the_steps_alone():
    """Neither compilation nor an evaluation, a save or an earlier record counts."""
    clock = Clock()
    meter = make_meter(clock=clock)

    def step(seconds, wait_s):
        with meter.waiting_for_data():
            clock.now += wait_s
        meter.add(metrics(1.5))
        clock.now += seconds

    step(30.0, 1.0)  # compiles
    meter.start()
    step(0.5, 0.25)
    step(0.5, 0.75)
    first = meter.wait_for_record(3)
    assert (first["step_s"], first["data_wait_s"], first["tokens_per_s"]) == (1.0, 0.5, 1024.0)
    step(2.0, 0.0)
    second = meter.wait_for_record(4)
    assert (second["step_s"], second["data_wait_s"]) == (2.0, 0.0)
    meter.stop()
    clock.now += 60.0  # an evaluation
    meter.start()
    step(4.0, 0.0)
    assert meter.wait_for_record(5)["step_s"] == 4.0


def test_a_record_of_untimed_steps_has_no_times():
    meter = make_meter()
    meter.add(metrics(1.5))
    assert set(meter.wait_for_record(1)) == {
        "step",
        "epoch",
        "tokens",
        "time_s",
        "windows",
        "loss",
        "grad_norm_max",
        "learning_rate",
    }


def test_a_record_has_the_epochs_and_the_tokens_up_to_its_step():
    meter = make_meter()
    assert meter.progress(0) == {"step": 0, "epoch": 0.0, "tokens": 0, "time_s": 1234.568}
    meter.add(metrics(1.5))
    record = meter.wait_for_record(250)
    assert (record["epoch"], record["tokens"]) == (1.3333, 250 * 16 * 64)  # 250 * 16 of 3000 windows


@pytest.mark.parametrize(
    ("is_complete", "step", "epoch"),
    [(False, 300, {}), (True, 186, {}), (True, 187, {"epoch": 1.0}), (True, 300, {"epoch": 1.6043})],
)
def test_a_stream_has_epochs_from_its_second_on(is_complete, step, epoch, tmp_path, monkeypatch):
    """The number of its windows grows until its text is complete."""
    tokens = GrowingTokens(tmp_path, "train", is_one_source=False)
    tokens.is_complete = is_complete
    monkeypatch.setattr(GrowingTokens, "num_windows", lambda self, seq_len: {64: 187 * 16}[seq_len])
    monkeypatch.setattr(GrowingTokens, "starts", lambda self, indices, **order: indices * 64)
    device = SimpleNamespace(device_kind="cpu", memory_stats=lambda: None)
    meter = StepMeter(CONFIG, tokens, device, 1, wall_clock=lambda: 5.0)
    windows = windows_digest(np.arange((step - 1) * 16, step * 16) * 64)
    assert meter.progress(step) == {"step": step, "tokens": step * 16 * 64, "time_s": 5.0, "windows": windows} | epoch


@pytest.mark.parametrize(
    "change", [{"seed": 3}, {"train.order": "sequential"}, {"train.global_batch_size": 8}], ids=str
)
def test_a_record_names_the_windows_of_its_step(change):
    found = make_meter().progress(250)["windows"]
    starts = window_starts(np.arange(249 * 16, 250 * 16), order="shuffle", seed=2357, num_tokens=192_001, seq_len=64)
    assert found == windows_digest(starts)
    others = [make_meter(CONFIG.with_options(change)).progress(250), make_meter().progress(249)]
    assert found not in [record["windows"] for record in others]


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize(
    ("device_kind", "peak_tflops", "peak"), [("NVIDIA H200", None, 989e12), ("cpu", 2.5, 2.5e12), ("TPU v4", 1, 1e12)]
)
def test_mfu_is_the_share_of_the_peak_of_all_devices(device_kind, peak_tflops, peak, num_devices):
    clock = Clock()
    config = dataclasses.replace(CONFIG, peak_tflops=peak_tflops)
    meter = make_meter(config, device_kind=device_kind, num_devices=num_devices, clock=clock)
    meter.start()
    meter.add(metrics(1.5))
    clock.now += 1e-3
    flops_per_s = flops_per_token(CONFIG.model) * 16 * 64 / 1e-3
    assert meter.wait_for_record(1)["mfu"] == pytest.approx(flops_per_s / (peak * num_devices), rel=1e-5)


def test_an_unknown_peak_and_an_unknown_memory_are_absent():
    clock = Clock()
    meter = make_meter(clock=clock)
    meter.start()
    meter.add(metrics(1.5))
    clock.now += 1
    assert {"mfu", "memory_bytes"}.isdisjoint(meter.wait_for_record(1))
    meter = make_meter(stats={"peak_bytes_in_use": 123456789})
    meter.add(metrics(1.5))
    assert meter.wait_for_record(1)["memory_bytes"] == 123456789


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_step_that_was_skipped_is_counted_and_is_not_in_the_mean(loss):
    meter = make_meter()
    meter.add(metrics(2.0))
    meter.add(metrics(loss, grad_norm=50.0, num_skipped=1, in_a_row=1))
    meter.add(metrics(4.0, num_skipped=1))
    record = meter.wait_for_record(20)
    assert (record["num_skipped"], record["loss"], record["grad_norm_max"]) == (1, 3.0, 1.0)
    assert record["learning_rate"] == pytest.approx(2e-3 * 20 / 51, rel=1e-5)  # of step 20 of a warmup of 50
    meter.add(metrics(loss, num_skipped=2, in_a_row=1))
    assert {"loss", "grad_norm_max"}.isdisjoint(meter.wait_for_record(21))


@pytest.mark.parametrize(("most", "ends"), [(2, False), (3, True), (None, False)])
def test_a_run_ends_after_as_many_skipped_steps_in_a_row_as_its_option_says(most, ends):
    """Also if they are not the last steps of the record."""
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, stop_after_bad_steps=most))
    meter = make_meter(config)
    meter.add(metrics("nan", num_skipped=1, in_a_row=1))
    meter.add(metrics("nan", num_skipped=2, in_a_row=2))
    meter.add(metrics(1.0, num_skipped=2))
    if most == 2:
        with pytest.raises(FloatingPointError, match="of 2 steps in a row, up to step 3, is not finite"):
            meter.wait_for_record(3)
        return
    meter.wait_for_record(3)
    meter.add(metrics("nan", num_skipped=3, in_a_row=1))
    meter.wait_for_record(4)
    for number in (2, 3):
        meter.add(metrics("nan", num_skipped=2 + number, in_a_row=number))
    if ends:
        with pytest.raises(FloatingPointError, match="of 3 steps in a row, up to step 6, is not finite"):
            meter.wait_for_record(6)
    else:
        assert meter.wait_for_record(6)["num_skipped"] == 5


def test_a_record_names_its_largest_spike_and_its_last_skipped_step():
    meter, losses = make_meter(), [2.0 + 0.01 * (step % 7) for step in range(1, 121)]
    losses[80], losses[84], losses[86], losses[87] = 3.0, 4.0, float("nan"), float("inf")
    records, scores = {}, spike_scores(np.asarray(losses, np.float32))
    for step, loss in enumerate(losses, 1):
        meter.add(metrics(loss))
        if step % 10 == 0:
            records[step] = meter.wait_for_record(step)
    named = {
        step: (record.get("spike_step"), record.get("spike_score"), record.get("skipped_step"))
        for step, record in records.items()
        if {"spike_step", "spike_score", "skipped_step"} & record.keys()
    }
    assert named == {90: (85, float(f"{scores[84]:.6g}"), 88)}
    assert "spike_step" not in records[120]


@pytest.mark.parametrize("stop", [70, 84, 85, 87, 89, 90, 95])
def test_a_stop_does_not_change_the_spikes(stop):
    losses = [2.0 + 0.01 * (step % 7) for step in range(1, 131)]
    losses[84], losses[85], losses[86], losses[119] = 4.0, 5.0, float("nan"), 3.0
    whole, resumed, found = make_meter(), make_meter(), []
    for step, loss in enumerate(losses, 1):
        for meter in (whole, resumed):
            meter.add(metrics(loss))
        if step % 10 == 0:
            found.append(whole.wait_for_record(step))
            assert resumed.wait_for_record(step) == found[-1]
        if step == stop:
            stored = json.loads(json.dumps(resumed.wait_for_unrecorded()))
            resumed = make_meter()
            resumed.restore(stored)
    assert [record["spike_step"] for record in found if "spike_step" in record] == [86, 120]


def test_a_run_that_only_skips_ends():
    meter = make_meter()
    meter.add(metrics("nan", num_skipped=49, in_a_row=49))
    meter.wait_for_record(40)
    meter.add(metrics("nan", num_skipped=50, in_a_row=50))
    with pytest.raises(FloatingPointError, match=r"of 50 steps in a row, up to step 60, is not finite\. Lower --optim"):
        meter.wait_for_record(60)


def test_a_stop_between_two_records_does_not_change_the_next_one():
    losses = [0.1, 0.2, 0.3, 0.7, 0.6]
    whole, before, after = make_meter(), make_meter(), make_meter()
    for number, loss in enumerate(losses):
        for meter in (whole, before if number < 3 else after):
            meter.add(metrics(loss, grad_norm=1 / (1 + number)))
        if number == 2:
            after.restore(json.loads(json.dumps(before.wait_for_unrecorded())))
    assert after.wait_for_record(5) == whole.wait_for_record(5)
    nothing = Unrecorded(trailing_losses=np.asarray(losses, np.float32).tolist())
    assert after.wait_for_unrecorded() == dataclasses.asdict(nothing)


MODEL = GPT2Config(vocab_size=65, seq_len=8, num_layers=1, num_heads=1, embed_dim=8)
SAVE_EVERY, RECORD_EVERY = 20, 10


def last_step(optimizer, train_step, kill_after=None):
    """The step at which a run ends that has no finite loss from step 23 on, killed and resumed once or not at all."""
    state, meter = create_train_state(MODEL, optimizer, jax.random.key(0)), make_meter()
    saved, step = jax.tree.map(np.asarray, state), 0
    while step < 200:
        step += 1
        windows = np.full((2, 9), 65 if step >= 23 else 3, np.uint16)  # 65 is no token
        state, found = train_step(state, windows, jax.random.key(1))
        meter.add(found)
        if step % RECORD_EVERY == 0:
            try:
                meter.wait_for_record(step)
            except FloatingPointError:
                return step
        if step % SAVE_EVERY == 0:
            saved = jax.tree.map(np.asarray, state)
        if step == kill_after:
            counters = {name: getattr(saved, name) for name in ("step", "num_skipped", "num_skipped_in_a_row")}
            arrays = {"params": saved.params, "opt_state": saved.opt_state}
            state = TrainState(**jax.tree.map(jnp.asarray, counters | arrays))
            meter, step, kill_after = make_meter(), int(saved.step), None
    return None


@pytest.mark.slow
@pytest.mark.fault
def test_a_kill_does_not_move_the_step_at_which_a_diverged_run_ends(record_property):
    record_property("fault", "a diverged run is killed while it skips steps")
    record_property("lost", "steps since the last checkpoint")
    optimizer = create_optimizer(OptimizerConfig(), 200)
    train_step = make_train_step(MODEL, optimizer)
    assert last_step(optimizer, train_step) == 80  # 22 + 50 steps, then the next that is recorded
    assert [last_step(optimizer, train_step, kill_after) for kill_after in (15, 41, 79)] == [80] * 3
