"""The positions of the windows of a step, against the windows that a reader gets."""

import numpy as np
import pytest

from owt_data import (
    Batches,
    DataError,
    GrowingTokens,
    PrepareOptions,
    TokenMixture,
    TokenSequence,
    TokenSpan,
    prepare,
    read_steps,
    step_starts,
)

SEQ_LEN, BATCH = 7, 6


def sequence(tmp_path, name, first, size):
    """A file in which each token is its own number: `first`, `first + 1`, ..."""
    path = tmp_path / name
    path.write_bytes(np.arange(first, first + size, dtype="<u2").tobytes())
    return TokenSequence((TokenSpan(path=str(path), start=0, stop=size),))


def batches(order, rank=0, world_size=1):
    return Batches(seq_len=SEQ_LEN, global_batch_size=BATCH, rank=rank, world_size=world_size, order=order, seed=5)


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential", "sequential-first"])
def test_the_windows_of_a_step_begin_there(order, tmp_path):
    tokens = sequence(tmp_path, "a.bin", 0, 300)
    for step, windows in read_steps(tokens, batches(order), start_step=0, stop_step=20):  # two epochs and more
        np.testing.assert_array_equal(step_starts(tokens, batches(order), step), windows[:, 0])
    # Each worker gets the positions of all workers.
    np.testing.assert_array_equal(step_starts(tokens, batches(order, 2, 3), 4), step_starts(tokens, batches(order), 4))


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential-first"])
def test_positions_in_a_mixture_count_over_its_sequences(order, tmp_path):
    parts = sequence(tmp_path, "a.bin", 0, 100), sequence(tmp_path, "b.bin", 100, 90), sequence(tmp_path, "c", 190, 77)
    mixture = TokenMixture(parts, (1.0, 5.0, 2.0))
    for step, windows in read_steps(mixture, batches(order), start_step=0, stop_step=30):
        np.testing.assert_array_equal(step_starts(mixture, batches(order), step), windows[:, 0])


def test_a_mixture_has_no_sequential_order(tmp_path):
    mixture = TokenMixture((sequence(tmp_path, "a.bin", 0, 100),), (1.0,))
    with pytest.raises(DataError, match="order of a mixture must be shuffle"):
        step_starts(mixture, batches("sequential"), 0)


def test_tokens_that_are_being_prepared_have_the_positions_of_the_complete_ones(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "nine char"}\n' * 40)
    prepare(str(text), tmp_path / "out", PrepareOptions(tokenizer="bytes"))
    growing = GrowingTokens(tmp_path / "out", "train", is_one_source=True)
    complete = GrowingTokens(tmp_path / "out", "train", is_one_source=True)
    assert len(complete) > 30 * BATCH
    assert complete.is_complete
    whole = TokenSequence((TokenSpan(path=str(tmp_path / "out" / "train.bin"), start=0, stop=len(complete)),))
    for step in (0, 30):
        expected = step_starts(whole, batches("sequential-first"), step)
        np.testing.assert_array_equal(step_starts(growing, batches("sequential-first"), step), expected)


@pytest.mark.parametrize("step", [-1, 2**62])
def test_a_step_is_a_whole_number_in_range(step, tmp_path):
    with pytest.raises(DataError, match="step must be"):
        step_starts(sequence(tmp_path, "a.bin", 0, 100), batches("shuffle"), step)
