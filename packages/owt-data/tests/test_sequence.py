"""Sequences of token files and mixtures of them: pure functions of seed and index."""

import os
import pickle
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from owt_data import DataError, TokenMixture, TokenSequence, TokenSpan
from owt_data._tokens.layout import Layout
from owt_data._tokens.sequence import SequenceReader

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


@pytest.mark.parametrize(("first", "second"), [((10, 20), (3, 7)), ((999, 4001), (2, 2001)), ((1500, 5000), (0, 3500))])
def test_a_slice_of_a_slice_begins_where_the_slice_does(first, second, files):
    piece = sequence(files).between(*first).between(*second)
    np.testing.assert_array_equal(piece.read(), np.arange(first[0] + second[0], first[0] + second[1]))


def test_tokens_travel_between_processes(files):
    mixture = TokenMixture((sequence(files[:2]), sequence(files[2:])), (1.0, 2.0))
    again = pickle.loads(pickle.dumps(mixture))
    assert again == mixture
    indices = np.arange(100)
    np.testing.assert_array_equal(again.windows(indices, **WINDOWS), mixture.windows(indices, **WINDOWS))


@pytest.mark.parametrize("widths", [("<u2", "<u4"), ("<u4", "<u2")])
def test_tokens_of_two_widths_are_read_as_those_of_the_wider_one(widths, tmp_path):
    """Ids above 65 535 stay, whichever comes first."""
    parts, expected = [], []
    for number, width in enumerate(widths):
        expected.append(np.arange(100, dtype=width) + (200_000 if width == "<u4" else 0))
        expected[-1].tofile(tmp_path / f"{number}.bin")
        parts.append(TokenSpan(path=str(tmp_path / f"{number}.bin"), start=0, stop=100, layout=Layout(width)))
    content = TokenSequence(tuple(parts)).read()
    assert (content.dtype, content.tolist()) == (np.uint32, np.concatenate(expected).tolist())
    windows = TokenMixture(tuple(TokenSequence((part,)) for part in parts), (1.0, 1.0)).windows(
        np.arange(16), **WINDOWS
    )
    assert {*windows.ravel().tolist()} <= {*content.tolist()}
    assert len({*(windows[:, 0] > 65_535).tolist()}) == 2


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


@pytest.mark.parametrize("order", ["shuffle", "random", "sequential-first"])
def test_each_sequence_of_a_mixture_keeps_the_order_and_has_its_own_seed(order, mixture):
    given = {"seq_len": 8, "order": order}
    seed = 2**64 - 2  # the largest seeds go on with 0
    first = mixture.windows(np.arange(1 << 16), **given, seed=seed)[:, 0]
    for number, (piece, low, high) in enumerate(
        zip(mixture.sequences, (0, 20_000, 60_000), (20_000, 60_000, 65_000), strict=True)
    ):
        here = first[(first >= low) & (first < high)]
        expected = piece.windows(np.arange(len(here)), **given, seed=(seed + number) % 2**64)[:, 0]
        np.testing.assert_array_equal(np.sort(here), np.sort(expected))


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
    with pytest.raises(DataError, match="The order of a mixture must be shuffle, random or sequential-first, got"):
        mixture.windows(np.arange(3), seq_len=8, order="sequential", seed=1)


def test_a_sequence_too_short_for_a_window_gives_no_windows(mixture, tmp_path):
    short = TokenSequence((TokenSpan(path=mixture.sequences[0].spans[0].path, start=0, stop=8),))
    assert mixture.num_windows(8) == sum((n - 1) // 8 for n in (20_000, 40_000, 5_000))
    assert TokenMixture((mixture.sequences[0], short), (1, 1)).num_windows(8) == 0


@pytest.mark.parametrize("place", [0, 6, 7, 999, 1000, 1001, 4998])
def test_an_id_outside_the_vocabulary_is_named_with_its_file_and_place(place, files):
    joined = sequence(files)
    number = next(i for i, stop in enumerate([7, 1000, 1001, 4000, 5000]) if place < stop)
    (span,) = files[number].spans
    first = [0, 7, 1000, 1001, 4000][number]
    values = np.fromfile(span.path, "<u2")
    values[place - first] = 65_535
    values.tofile(span.path)
    limited = TokenSequence(joined.spans, vocab_size=5000)
    constraint = "must be below 5000, the vocabulary of the tokenizer"
    message = f"The ids in {span.path} {constraint}, got 65535 at token {place - first}."
    for read in (
        lambda tokens: tokens.windows(np.arange(6000), **WINDOWS),
        lambda tokens: tokens.read_windows(np.array([4990, min(max(0, place - 3), 4991)]), 8),
        lambda tokens: tokens.read(max(0, place - 1)),
        lambda tokens: tokens.between(max(0, place - 4), 5000).read(),
    ):
        read(joined)
        with pytest.raises(DataError) as caught:
            read(limited)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("start", "name"), [(-1, "smallest"), (4992, "largest"), (5000, "largest")])
def test_windows_outside_the_tokens_are_rejected(start, name, files):
    with pytest.raises(DataError, match=f"The {name} start must be an integer .*, got {start}"):
        sequence(files).read_windows(np.array([5, start]), 8)


def test_every_id_below_the_vocabulary_is_read(files):
    limited = TokenSequence(sequence(files).spans, vocab_size=5000)
    np.testing.assert_array_equal(limited.read(), np.arange(5000))


@pytest.mark.fault
@pytest.mark.parametrize("size", [0, 1, 4096, 9_990])
def test_a_file_that_is_cut_short_is_named_with_both_sizes(size, tokens, record_property):
    record_property("fault", f"a token file cut to {size} bytes while windows are read")
    record_property("lost", "nothing: the read fails with a sentence")
    tokens.windows(np.arange(10), **WINDOWS)
    (span,) = tokens.spans
    os.truncate(span.path, size)
    with pytest.raises(
        DataError, match=f"^{span.path} has been cut short: it had at least 10000 bytes, and has {size}\\. "
    ):
        tokens.read_windows(np.array([4991]), 8)


def test_a_system_without_vectored_reads_has_the_same_tokens(
    files: list[TokenSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)  # as on older macOS
    monkeypatch.setattr("owt_data._paths._STREAM_BYTES", 7)
    joined = sequence(files)
    np.testing.assert_array_equal(joined.read(3, 1010), np.arange(3, 1010))
    np.testing.assert_array_equal(joined.read_windows(np.array([990, 4991]), 8), [range(990, 999), range(4991, 5000)])
    os.truncate(joined.spans[-1].path, 1991)
    with pytest.raises(DataError, match=r"it had at least 2000 bytes, and has 1991\."):
        joined.read(4000)


def test_the_system_reads_ahead_of_tokens_in_their_order_and_not_of_windows(
    files: list[TokenSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("has no such advice")
    advised: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *advice: advised.append(advice))
    joined = sequence(files)
    joined.read()
    assert advised == []
    joined.read_windows(np.array([3, 990]), 8)  # of two files
    assert advised == [(0, 0, os.POSIX_FADV_RANDOM)] * 2


def test_a_read_calls_no_function_for_each_file(tokens: TokenSequence) -> None:
    (span,) = tokens.spans

    def num_calls(num_spans: int) -> int:
        many = TokenSequence(tuple(replace(span, start=10, stop=20) for _ in range(num_spans)), vocab_size=5000)
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            many.windows(np.arange(3), seq_len=8, order="shuffle", seed=1)
        finally:
            sys.setprofile(None)
        return len(calls)

    num_calls(10)
    assert abs(num_calls(5000) - num_calls(50)) < 300  # the windows may cross a file more


def test_files_stay_closed_after_a_read(files):
    joined = sequence(files)
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(20):
        joined.windows(np.arange(100), **WINDOWS)
    assert len(list(Path("/dev/fd").iterdir())) <= before


def test_a_file_that_was_deleted_is_named(tokens):
    (span,) = tokens.spans
    Path(span.path).unlink()
    with pytest.raises(DataError, match=f"^{span.path} must be readable, got No such file or directory"):
        tokens.windows(np.arange(7), **WINDOWS)


def test_a_pipe_in_place_of_a_token_file_is_rejected(tokens):
    (span,) = tokens.spans
    Path(span.path).unlink()
    os.mkfifo(span.path)
    with pytest.raises(DataError, match="must be a regular file, got a pipe, a device or a socket"):
        tokens.windows(np.arange(7), **WINDOWS)


def test_weights_of_any_size_are_compared(files):
    with pytest.raises(DataError, match="The weights must be 2 finite numbers"):
        TokenMixture((files[0], files[1]), (10**400, 1.0))


def test_a_reader_keeps_no_more_files_open_than_its_limit(files):
    """A preparation copies from thousands of shards."""
    joined, read = sequence(files), np.empty(5000, np.uint16)
    before = len(list(Path("/dev/fd").iterdir()))
    reader = SequenceReader(joined, max_open_files=2)
    reader.copy(0, read)
    assert len(list(Path("/dev/fd").iterdir())) <= before + 2
    np.testing.assert_array_equal(read, np.arange(5000))


def test_an_index_whose_round_does_not_fit_into_64_bits_is_rejected(files):
    """The rounds of a stage are counted from its beginning."""
    sequences, last = (sequence(files[:3]), files[3]), np.array([2**63 - 1])
    assert TokenMixture(sequences, (1.0, 1.0)).windows(last, **WINDOWS).shape == (1, 9)
    stages = ((70_001, (1.0, 2.0)), (80_001, (2.0, 1.0)))
    mixture = TokenMixture(sequences, (1.0, 1.0), stages)
    assert mixture.windows(last - 2 * 65_536, **WINDOWS).shape == (1, 9)
    with pytest.raises(
        DataError, match=f"The largest index must be an integer from 0 to {2**63 - 1 - 2 * 65_536}, got"
    ):
        mixture.windows(last - 2 * 65_536 + 1, **WINDOWS)
