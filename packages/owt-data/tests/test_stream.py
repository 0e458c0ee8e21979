"""Windows through a real Ray cluster."""

import functools
import logging
import os

import numpy as np
import pytest
import ray

from owt_data import DataError, iter_steps, step_windows, token_windows, window_starts

SEQ_LEN, BATCH, STEPS = 16, 8, 700
steps_of = functools.partial(step_windows, seq_len=SEQ_LEN, global_batch_size=BATCH, seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def expected(span, order, first, last):
    """The global batches of steps `[first, last)`, computed without Ray."""
    starts = window_starts(
        np.arange(first * BATCH, last * BATCH), order=order, seed=3, num_tokens=len(span), seq_len=SEQ_LEN
    )
    return span.read_windows(starts, SEQ_LEN).reshape(-1, BATCH, SEQ_LEN + 1)


def collect(dataset):
    steps, tokens = zip(*iter_steps(dataset), strict=True)
    return list(steps), np.stack(tokens)


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_a_stream_is_the_window_order_step_by_step(span, order):
    dataset = steps_of(span, rank=0, world_size=1, start_step=0, stop_step=STEPS, order=order)
    steps, tokens = collect(dataset)
    assert steps == list(range(STEPS))
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, expected(span, order, 0, STEPS))


def test_ranks_make_up_the_same_global_batches_from_any_step(span):
    parts = []
    for rank in range(4):
        dataset = steps_of(span, rank=rank, world_size=4, start_step=650, stop_step=STEPS)
        steps, tokens = collect(dataset)
        assert steps == list(range(650, STEPS))
        parts.append(tokens)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected(span, "shuffle", 650, STEPS))


def test_order_holds_over_many_blocks(span, monkeypatch):
    monkeypatch.setattr("owt_data._stream._BLOCK_BYTES", 4096)
    dataset = steps_of(span, rank=1, world_size=2, start_step=0, stop_step=STEPS)
    steps, tokens = collect(dataset)
    assert steps == list(range(STEPS))
    np.testing.assert_array_equal(tokens, expected(span, "shuffle", 0, STEPS)[:, BATCH // 2 :])


def test_token_windows_are_inputs_and_targets(span):
    rows = token_windows(span, seq_len=SEQ_LEN, num_rows=100, order="sequential").take_all()
    assert len(rows) == 100
    assert rows[3]["x"].dtype == rows[3]["y"].dtype == np.int32
    np.testing.assert_array_equal(sorted(row["x"][0] for row in rows), np.arange(100) * SEQ_LEN)
    for row in rows:
        np.testing.assert_array_equal(row["x"] + 1, row["y"])


def test_workers_that_do_not_divide_the_batch_are_refused(span):
    with pytest.raises(DataError, match="expected a global batch that 3 workers divide, got 8"):
        steps_of(span, rank=0, world_size=3, start_step=0, stop_step=1)


def test_no_steps_are_refused(span):
    with pytest.raises(DataError, match="expected 0 <= start_step < stop_step, got 5 and 5"):
        steps_of(span, rank=0, world_size=1, start_step=5, stop_step=5)


def test_too_few_tokens_are_refused_at_once(span):
    with pytest.raises(DataError, match="expected at least 6001 tokens"):
        token_windows(span, seq_len=6000, num_rows=1)
