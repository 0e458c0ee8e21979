"""Sequences of token files and mixtures of them: pure functions of seed and index."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

from owt_data import DataError, TokenMixture, TokenSequence, TokenSpan

WINDOWS = {"seq_len": 8, "order": "shuffle", "seed": 5}


@pytest.fixture
def files(tmp_path, positions) -> list[TokenSequence]:
    """The tokens 0 to 4999 in files of uneven lengths."""
    bounds = [0, 7, 1000, 1001, 4000, 5000]
    return [positions(tmp_path / f"{a}.bin", a, b) for a, b in pairwise(bounds)]


def sequence(sequences) -> TokenSequence:
    return TokenSequence(tuple(span for piece in sequences for span in piece.spans))


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential"])
def test_many_files_have_the_windows_of_one(order, tokens, files):
    joined = sequence(files)
    assert len(joined) == len(tokens) == 5000
    indices = np.arange(2000)
    expected = tokens.windows(indices, seq_len=8, order=order, seed=5)
    np.testing.assert_array_equal(joined.windows(indices, seq_len=8, order=order, seed=5), expected)
    np.testing.assert_array_equal(joined.read(995, 1003), np.arange(995, 1003))


def test_a_slice_of_a_sequence_is_a_sequence(files):
    joined = sequence(files)
    for start, stop in ((0, 5000), (3, 3), (6, 8), (1000, 1001), (999, 4001), (4999, 5000)):
        piece = joined.between(start, stop)
        assert len(piece) == stop - start
        np.testing.assert_array_equal(piece.read(), np.arange(start, stop))


def test_tokens_travel_between_processes(files):
    mixture = TokenMixture((sequence(files[:2]), sequence(files[2:])), (1.0, 2.0))
    again = pickle.loads(pickle.dumps(mixture))
    assert again == mixture
    indices = np.arange(100)
    np.testing.assert_array_equal(again.windows(indices, **WINDOWS), mixture.windows(indices, **WINDOWS))


@pytest.fixture
def mixture(tmp_path, positions) -> TokenMixture:
    """Three sequences without common tokens, mixed 6 : 3 : 1."""
    sequences = [positions(tmp_path / f"{a}.bin", a, b) for a, b in ((0, 20_000), (20_000, 60_000), (60_000, 65_000))]
    return TokenMixture(tuple(sequences), (6, 3, 1))


def test_a_mixture_keeps_its_proportions(mixture):
    first = mixture.windows(np.arange(3 << 16), **WINDOWS)[:, 0]
    sequence_of = np.searchsorted([20_000, 60_000], first, side="right")
    for number in range(3):
        shares = np.bincount(sequence_of[number << 16 : (number + 1) << 16]) / (1 << 16)
        np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=1e-5)
    # A few hundred windows have nearly the same shares: within five standard errors of independent draws.
    for begin in range(0, 1 << 16, 4096):
        share = (sequence_of[begin : begin + 512] == 0).mean()
        assert abs(share - 0.6) < 5 * np.sqrt(0.24 / 512)
    assert (sequence_of[: 1 << 16] != sequence_of[1 << 16 : 2 << 16]).mean() > 0.4


def test_each_sequence_of_a_mixture_visits_its_windows_once_an_epoch(mixture):
    first = mixture.windows(np.arange(3 << 16), **WINDOWS)[:, 0]
    for piece, (low, high) in zip(mixture.sequences, ((0, 20_000), (20_000, 60_000), (60_000, 65_000)), strict=True):
        visits = first[(first >= low) & (first < high)]
        counts = np.unique(visits // 8, return_counts=True)[1]
        epochs = len(visits) / piece.num_windows(8)
        # Start offsets move windows across a multiple of eight, which may count a window once more or less.
        assert counts.max() - epochs < 3
        assert epochs - counts[1:-1].min() < 3


def test_any_window_of_a_mixture_is_independent(mixture):
    indices = np.array([5, 123_456_789, 70_000, 6, 5])
    together = mixture.windows(indices, **WINDOWS)
    for index, window in zip(indices, together, strict=True):
        np.testing.assert_array_equal(mixture.windows(np.array([index]), **WINDOWS)[0], window)
    assert together[:, 0].tolist() == MIXED
    assert mixture.windows(np.empty(0, dtype=np.int64), **WINDOWS).shape == (0, 9)


# Computed once; a run that was started anywhere must go on with these anywhere.
MIXED = [39012, 18411, 17922, 2253, 39012]


def test_weights_that_give_a_sequence_no_window_are_rejected(files):
    for weights in ((1e308, 1e308), (1.0, 0.0), (1.0, -1.0), (1.0, float("inf")), (1.0, 1e-9)):
        with pytest.raises(
            DataError,
            match=r"The weights must be 2 finite numbers, and give each sequence at least one window in 65536",
        ):
            TokenMixture((files[0], files[1]), weights)
    with pytest.raises(DataError, match=r"The weights must be 2 finite numbers, .* got \[1.0\]"):
        TokenMixture((files[0], files[1]), (1.0,))


def test_a_mixture_has_no_sequential_order(mixture):
    with pytest.raises(DataError, match="The order of a mixture must be shuffle or random, got sequential"):
        mixture.windows(np.arange(3), seq_len=8, order="sequential", seed=1)


def test_a_sequence_too_short_for_a_window_gives_no_windows(mixture, tmp_path):
    short = TokenSequence((TokenSpan(path=mixture.sequences[0].spans[0].path, start=0, stop=8),))
    assert mixture.num_windows(8) == sum((n - 1) // 8 for n in (20_000, 40_000, 5_000))
    assert TokenMixture((mixture.sequences[0], short), (1, 1)).num_windows(8) == 0
