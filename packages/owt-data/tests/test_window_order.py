import numpy as np
import pytest

from owt_data import DataError, num_windows, window_starts

# Computed once; a run that was started anywhere must go on with these anywhere.
SHUFFLE = [19542, 99422, 61062, 86062, 5222, 2712]
SECOND_EPOCH = [54963, 82443, 56423]
RANDOM = [40858, 2452, 34559, 12922, 69126, 5734]


# By the number of windows: up to 2**31 - 1, the words have 32 bits.
LARGE = {
    (1 << 31) - 1: [269661954, 6017160552, 6395106237, 3617323105],
    1 << 31: [6278730561, 5379671931, 2927738247, 4385698192],
    (1 << 33) + 7: [24869809656, 12003069621, 22912229031, 7096767085],
}


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


NUM_WINDOWS = 1_000_003


def test_a_million_windows_are_visited_once_in_every_epoch():
    orders = {}
    for seed in (1, 2):
        for epoch in (0, 1):
            indices = np.arange(epoch * NUM_WINDOWS, (epoch + 1) * NUM_WINDOWS)
            visited = starts(indices, "shuffle", seed=seed, num_tokens=10 * NUM_WINDOWS + 1) // 10
            assert np.bincount(visited, minlength=NUM_WINDOWS).tolist() == [1] * NUM_WINDOWS
            orders[seed, epoch] = visited
    for other in ((1, 1), (2, 0)):
        assert (orders[1, 0] == orders[other]).mean() < 1e-5


def test_a_million_windows_show_no_structure():
    epochs = [
        starts(np.arange(NUM_WINDOWS) + epoch * NUM_WINDOWS, "shuffle", num_tokens=10 * NUM_WINDOWS + 1) // 10
        for epoch in (0, 1)
    ]
    ranks = epochs[0]
    # Rank correlations, with the position, with neighbours near and far, and with the next epoch. Those of
    # independent orders have a standard error of 1 / sqrt(n), and stay within four of them.
    for series in (np.arange(NUM_WINDOWS), *(np.roll(ranks, lag) for lag in (1, 2, 32, 1024, 1 << 17)), epochs[1]):
        assert abs(np.corrcoef(ranks, series)[0, 1]) < 4 / np.sqrt(NUM_WINDOWS)
    # Pairs of neighbours fill a square evenly: the statistic has mean 63 * 63 and a standard error of 89.
    counts = np.histogram2d(ranks[:-1], ranks[1:], bins=64, range=[[0, NUM_WINDOWS]] * 2)[0]
    expected = (NUM_WINDOWS - 1) / 64**2
    assert abs(((counts - expected) ** 2 / expected).sum() - 63**2) < 5 * 89


def test_a_permutation_of_more_than_32_bits_has_no_repetition():
    indices = np.arange(1 << 20) * 4096
    visited = starts(indices, "shuffle", num_tokens=(1 << 33) + 1, seq_len=1)
    assert len(np.unique(visited)) == 1 << 20
    assert visited.max() > 1 << 32


def test_every_index_is_independent():
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


def test_sequential_repeats():
    assert starts(np.arange(5), "sequential", num_tokens=31).tolist() == [0, 10, 20, 0, 10]


def test_sequential_first_shuffles_from_the_second_epoch_on():
    order = starts(np.arange(300), "sequential-first", num_tokens=1003).tolist()
    assert order[:100] == list(range(0, 1000, 10))
    assert order[100:] == starts(np.arange(100, 300), "shuffle", num_tokens=1003).tolist()


def test_the_order_is_the_same_everywhere():
    assert starts(np.arange(6), "shuffle", seed=2357).tolist() == SHUFFLE
    assert starts(np.arange(10_000, 10_003), "shuffle", seed=2357).tolist() == SECOND_EPOCH
    assert starts(np.arange(6), "random", seed=2357).tolist() == RANDOM


@pytest.mark.parametrize("count", LARGE)
def test_the_order_of_many_windows_is_the_same_everywhere(count):
    found = starts([0, 1, count - 1, count], "shuffle", seed=2357, num_tokens=3 * count + 2, seq_len=3)
    assert found.tolist() == LARGE[count]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer of at least 1, got 0"),
        ({"indices": [-1]}, "The smallest index must be an integer of at least 0, got -1"),
    ],
)
def test_arguments_out_of_range_are_rejected(arguments, message):
    with pytest.raises(DataError, match=message):
        starts(**{"indices": [0], "order": "shuffle", **arguments})


def test_too_few_tokens_are_rejected():
    with pytest.raises(DataError, match=r"The tokens must be at least 11, .* got 10"):
        starts([0], "shuffle", num_tokens=10)
