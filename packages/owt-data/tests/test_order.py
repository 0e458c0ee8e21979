import numpy as np
import pytest

from owt_data import DataError, num_windows, window_starts

# Computed once; a run that was started anywhere must go on with these anywhere.
SHUFFLE = [78482, 6042, 42022, 26332, 35952, 62172]
SECOND_EPOCH = [76873, 81333, 48903]
RANDOM = [40858, 2452, 34559, 12922, 69126, 5734]


def starts(indices, order, seed=1, num_tokens=100_004, seq_len=10):
    return window_starts(np.asarray(indices), order=order, seed=seed, num_tokens=num_tokens, seq_len=seq_len)


def test_windows_need_a_next_token():
    assert [num_windows(n, 10) for n in (0, 10, 11, 20, 21)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000, 10_000])
def test_an_epoch_visits_every_window_once(count):
    num_tokens = 10 * count + 1
    for epoch in range(3):
        visited = starts(np.arange(epoch * count, (epoch + 1) * count), "shuffle", num_tokens=num_tokens)
        np.testing.assert_array_equal(np.sort(visited), np.arange(count) * 10)


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = starts(np.arange(10_000), "shuffle"), starts(np.arange(10_000, 20_000), "shuffle")
    other = starts(np.arange(10_000), "shuffle", seed=2)
    for a, b in ((first, second), (first, other)):
        assert (a != b).mean() > 0.99


def test_an_epochs_start_offset_lies_in_what_windows_leave_over():
    # 100 004 tokens are 10 000 windows and 3 spare starts beside 0.
    offsets = {int(starts([epoch * 10_000], "shuffle")[0] % 10) for epoch in range(40)}
    assert offsets == {0, 1, 2, 3}


def test_the_order_shows_no_structure():
    ranks = starts(np.arange(10_000), "shuffle", num_tokens=100_001)
    for series in (np.arange(10_000), np.roll(ranks, 1), np.roll(ranks, 64)):
        # 4 standard errors of the correlation of independent orders
        assert abs(np.corrcoef(ranks, series)[0, 1]) < 4 / np.sqrt(10_000)


def test_any_index_stands_alone():
    indices = np.array([99_999_999_999, 3, 12_345_678])
    for order in ("shuffle", "random", "sequential"):
        together = starts(indices, order)
        alone = [starts([index], order)[0] for index in indices.tolist()]
        np.testing.assert_array_equal(together, alone)


def test_random_draws_cover_all_starts_evenly():
    drawn = starts(np.arange(200_000), "random", num_tokens=30, seq_len=10)
    counts = np.bincount(drawn)
    assert len(counts) == 20
    np.testing.assert_allclose(counts, 10_000, rtol=0.05)


def test_sequential_goes_round():
    assert starts(np.arange(5), "sequential", num_tokens=31).tolist() == [0, 10, 20, 0, 10]


def test_the_order_is_the_same_everywhere():
    assert starts(np.arange(6), "shuffle", seed=2357).tolist() == SHUFFLE
    assert starts(np.arange(10_000, 10_003), "shuffle", seed=2357).tolist() == SECOND_EPOCH
    assert starts(np.arange(6), "random", seed=2357).tolist() == RANDOM


def test_too_few_tokens_are_refused():
    with pytest.raises(DataError, match=r"expected at least 11 tokens, .* got 10"):
        starts([0], "shuffle", num_tokens=10)
