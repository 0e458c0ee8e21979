"""Batches of a worker, read by a thread of its own."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from owt_data import Batches, DataError, TokenSequence, read_steps
from owt_data._stream.ray_reader import _read_steps


def steps_of(tokens: Any, *, start_step: Any = 0, stop_step: Any = 3, prefetch_steps: int = 4, **changed: Any) -> Any:
    batches = Batches(**{"seq_len": 16, "global_batch_size": 8, **changed})
    return read_steps(tokens, batches, start_step=start_step, stop_step=stop_step, prefetch_steps=prefetch_steps)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer of at least 1, got 0"),
        ({"global_batch_size": 0}, "global_batch_size must be an integer of at least 1, got 0"),
        ({"rank": 1}, "rank must be an integer from 0 to 0, got 1"),
        ({"world_size": 3}, "global_batch_size must be a multiple of the 3 workers, got 8"),
        ({"start_step": -1}, "start_step must be an integer of at least 0, got -1"),
        ({"stop_step": 0}, "stop_step must be an integer of at least 1, got 0"),
        ({"stop_step": 1 << 61}, "stop_step must be an integer from 0 to"),
        ({"start_step": 10**400, "stop_step": 10**400 + 1}, "start_step must be an integer from 0 to"),
        ({"prefetch_steps": 0}, "prefetch_steps must be an integer of at least 1, got 0"),
    ],
)
def test_read_steps_checks_its_arguments_at_the_call(changed, message, tokens):
    with pytest.raises(DataError) as caught:
        steps_of(tokens, **changed)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential"])
def test_a_task_of_a_stream_reads_the_rows_of_its_rank(order, tokens):
    """In this process: Ray runs it in others."""
    batches = Batches(seq_len=7, global_batch_size=9, rank=1, world_size=3, order=order, seed=11)
    found = _read_steps({"id": np.array([0, 1, 5])}, tokens=tokens, batches=batches, start_step=4)
    assert found["step"].tolist() == [4, 5, 9]
    rows = tokens.windows(np.arange(10 * 9), seq_len=7, order=order, seed=11).reshape(10, 9, 8)
    np.testing.assert_array_equal(found["tokens"], rows[[4, 5, 9], 3:6])


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential"])
def test_ranks_make_up_the_same_global_batches_from_any_step(order, tokens):
    given = {"start_step": 90, "stop_step": 120, "order": order, "seed": 3, "world_size": 4}
    shares = []
    for rank in range(4):
        steps, windows = zip(*steps_of(tokens, **given, rank=rank), strict=True)
        assert steps == tuple(range(90, 120))
        shares.append(np.stack(windows))
    expected = tokens.windows(np.arange(90 * 8, 120 * 8), seq_len=16, order=order, seed=3)
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), expected.reshape(30, 8, 17))


def test_steps_are_shuffled_by_one_seed_unless_they_are_given_another(tokens: TokenSequence) -> None:
    """A change of the defaults would change the batches of runs that rely on them."""
    windows = [windows for _, windows in steps_of(tokens)]
    expected = tokens.windows(np.arange(24), seq_len=16, order="shuffle", seed=2357)
    np.testing.assert_array_equal(np.concatenate(windows), expected)


class CountedTokens:
    """Tokens that count the reads of windows."""

    def __init__(self, tokens: TokenSequence) -> None:
        self._tokens, self.num_reads = tokens, 0

    def __len__(self):
        return len(self._tokens)

    def num_windows(self, seq_len):
        return self._tokens.num_windows(seq_len)

    def windows(self, indices, **order):
        self.num_reads += 1
        return self._tokens.windows(indices, **order)

    def starts(self, indices, **order):
        return self._tokens.starts(indices, **order)


@pytest.mark.parametrize("prefetch_steps", [1, 7])
def test_the_thread_reads_as_far_ahead_as_asked(prefetch_steps, tokens, wait_until):
    counted = CountedTokens(tokens)
    steps = steps_of(counted, stop_step=1000, prefetch_steps=prefetch_steps)
    time.sleep(0.05)
    assert counted.num_reads == 0
    for step in range(3):
        assert next(steps)[0] == step
        # Besides those that were taken and those that wait, the thread holds one.
        wait_until(lambda step=step: counted.num_reads >= step + prefetch_steps + 2)
        time.sleep(0.05)
        assert counted.num_reads == step + prefetch_steps + 2


@pytest.mark.parametrize("prefetch_steps", [1, 1 << 40])
def test_the_thread_ends_with_its_iterator(prefetch_steps, tokens, wait_until):
    before, counted = set(threading.enumerate()), CountedTokens(tokens)
    steps = steps_of(counted, stop_step=1 << 40, prefetch_steps=prefetch_steps)
    next(steps)
    wait_until(lambda: counted.num_reads >= 3)
    (reader,) = set(threading.enumerate()) - before
    assert reader.daemon  # else a process with an iterator that is not used up could not end
    del steps
    reader.join(30)
    assert not reader.is_alive()
