"""Positions of windows and the inverse, against the windows that are read."""

import itertools

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
    find_windows,
    open_tokens,
    prepare_in_background,
    read_steps,
    window_positions,
)
from owt_data._tokens.window_order import _permute

KEYS = (0, 1, 123_456_789_123_456_789, (1 << 64) - 1)
ORDERS = ("shuffle", "random", "sequential", "sequential-first")


@pytest.mark.parametrize("key", KEYS)
def test_the_inverse_of_a_permutation_gives_every_position_back(key):
    for size in (*range(1, 140), 255, 257, 1000, 4095, 4097, 65_535, 65_537, 99_991):
        positions = np.arange(size)
        np.testing.assert_array_equal(_permute(_permute(positions, size, key), size, key, inverse=True), positions)
        np.testing.assert_array_equal(_permute(_permute(positions, size, key, inverse=True), size, key), positions)


@pytest.mark.parametrize("size", [1_000_003, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 33) + 7, (1 << 40) - 3])
def test_the_inverse_of_a_large_permutation_gives_every_position_back(size):
    positions = np.unique(np.append(np.random.default_rng(size).integers(0, size, 50_000), [0, size - 1]))
    for key in KEYS:
        images = _permute(positions, size, key)
        np.testing.assert_array_equal(_permute(images, size, key, inverse=True), positions)


def sequences(positions, folder):
    """Sequences of one file, and of two files; tokens equal their positions."""
    yield positions(folder / "one.bin", 0, 1003)
    first, second = positions(folder / "a.bin", 0, 411), positions(folder / "b.bin", 411, 1003)
    yield TokenSequence((*first.spans, *second.spans))
    yield TokenMixture((first, second), (3.0, 1.0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(("seq_len", "batch", "seed"), [(10, 7, 1), (1, 64, 2), (64, 3, 2**64 - 1), (400, 5, 9)])
def test_positions_are_those_of_the_windows_that_steps_read(order, number, seq_len, batch, seed, positions, tmp_path):
    tokens = next(itertools.islice(sequences(positions, tmp_path), number, None))
    if number == 2 and order == "sequential":
        pytest.skip("a mixture has no such order")
    batches = Batches(seq_len=seq_len, global_batch_size=batch, order=order, seed=seed)
    num_steps = 5 * 1003 // (2 * seq_len * batch) + 3  # several epochs
    for step, windows in read_steps(tokens, batches, start_step=0, stop_step=num_steps):
        indices = np.arange(step * batch, (step + 1) * batch)
        found = window_positions(tokens, indices, seq_len=seq_len, order=order, seed=seed)
        assert windows.tolist() == (found[:, None] + np.arange(seq_len + 1)).tolist()


RANGES = ((0, 1), (1, 2), (2, 9), (9, 9), (9, 200), (300, 411), (411, 412), (500, 777), (1002, 1003))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(("seq_len", "stop_index", "seed"), [(10, 401, 1), (1, 2500, 2), (64, 70, 3), (400, 33, 9)])
def test_the_windows_of_ranges_are_all_that_read_them(
    order, number, seq_len, stop_index, seed, positions, tmp_path, monkeypatch
):
    monkeypatch.setattr("owt_data._tokens.window_search._BLOCK", 1000)  # some searches take several blocks
    tokens = next(itertools.islice(sequences(positions, tmp_path), number, None))
    if number == 2 and order == "sequential":
        pytest.skip("a mixture has no such order")
    windows = tokens.windows(np.arange(stop_index), seq_len=seq_len, order=order, seed=seed)
    expected = {
        (number, index)
        for number, (start, stop) in enumerate(RANGES)
        for index in np.flatnonzero(((windows >= start) & (windows < stop)).any(axis=1)).tolist()
    }
    shuffled = np.random.default_rng(0).permutation(len(RANGES))  # ranges need no order
    starts, stops = np.array(RANGES)[shuffled].T
    shares = []
    ranges, indices = find_windows(
        tokens, starts, stops, seq_len=seq_len, order=order, seed=seed, stop_index=stop_index, report=shares.append
    )
    found = list(zip(shuffled[ranges].tolist(), indices.tolist(), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert indices.tolist() == sorted(indices.tolist())
    assert shares[-1] == 1.0


def test_rounds_of_a_mixture_are_inverted(positions, tmp_path):
    first, second = positions(tmp_path / "a.bin", 0, 4001), positions(tmp_path / "b.bin", 4001, 6000)
    mixture = TokenMixture((first, second), (1.0, 2.5))
    stop_index = 3 * (1 << 16) + 17
    begins = window_positions(mixture, np.arange(stop_index), seq_len=100, order="shuffle", seed=4)
    for start in (0, 4000, 4001, 5999):
        # No window crosses the sequences, of which the second begins at 4001.
        same = (begins >= 4001) == (start >= 4001)
        expected = np.flatnonzero((begins <= start) & (start <= begins + 100) & same).tolist()
        found = find_windows(
            mixture,
            np.array([start]),
            np.array([start + 1]),
            seq_len=100,
            order="shuffle",
            seed=4,
            stop_index=stop_index,
        )
        assert found[1].tolist() == expected


def test_a_range_of_a_token_file_of_9_g_tokens_is_found_at_once(tmp_path):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2 * 9_035_582_198)  # a sparse file
    tokens = TokenSequence((TokenSpan(path=str(path), start=0, stop=9_035_582_198),))
    starts = np.array([5, 4_000_000_000])
    ranges, indices = find_windows(
        tokens, starts, starts + 2000, seq_len=1024, order="shuffle", seed=2357, stop_index=30_000_000
    )
    found = window_positions(tokens, indices, seq_len=1024, order="shuffle", seed=2357)
    assert (found < starts[ranges] + 2000).all()
    assert (found + 1025 > starts[ranges]).all()
    # Each epoch has 8 823 810 windows, and two or three of them read 2000 tokens. The windows are those of 3.4 epochs.
    assert [int((ranges == number).sum()) for number in (0, 1)] == [7, 9]


@pytest.fixture
def growing(tmp_path):
    """Tokens of a preparation that has stopped before its end."""
    source = tmp_path / "book.txt"
    source.write_text("".join(f"line {n} of a book\n" for n in range(300_000)))
    options = PrepareOptions(tokenizer="bytes", split="start")
    with prepare_in_background(str(source), tmp_path / "out", options, num_processes=1) as data:
        data.train.windows(np.array([0]), seq_len=64, order="sequential", seed=0)
    found = open_tokens(tmp_path / "out", tokenizer="bytes")
    assert found.fingerprint == found.source_fingerprint  # not complete
    return found.train


@pytest.mark.parametrize("order", ["sequential", "sequential-first"])
def test_windows_that_exist_in_unfinished_tokens_are_found(order, growing):
    count = growing.num_windows(64)
    windows = growing.windows(np.arange(count), seq_len=64, order=order, seed=1)
    starts = window_positions(growing, np.arange(count), seq_len=64, order=order, seed=1)
    sequence = growing.existing()
    assert (windows == sequence.read_windows(starts, 64)).all()
    ranges, indices = find_windows(
        growing, np.array([64]), np.array([65]), seq_len=64, order=order, seed=1, stop_index=10**9
    )
    assert (ranges.tolist(), indices.tolist()) == ([0, 0], [0, 1])
    with pytest.raises(DataError, match=f"among the first {count}, whose tokens exist, got window {count}"):
        window_positions(growing, np.array([count]), seq_len=64, order=order, seed=1)


def test_tokens_that_were_completed_since_have_positions_of_every_epoch(prepared):
    growing = GrowingTokens(prepared, "train", is_one_source=True)
    indices, order = np.arange(3 * growing.num_windows(64)), {"seq_len": 64, "order": "sequential-first", "seed": 1}
    expected = open_tokens(prepared, tokenizer="bytes").train.starts(indices, **order)
    for tokens in (growing, GrowingTokens(prepared, "train", is_one_source=True)):  # the second one has not looked yet
        assert window_positions(tokens, indices, **order).tolist() == expected.tolist()
    new = GrowingTokens(prepared, "train", is_one_source=True)
    found = find_windows(new, np.array([5]), np.array([6]), stop_index=len(indices), **order)[1]
    assert found.tolist() == np.flatnonzero((expected <= 5) & (expected >= 5 - 64)).tolist()


def test_unfinished_tokens_have_no_order_that_needs_all(growing):
    with pytest.raises(DataError, match="must be sequential or sequential-first, got shuffle"):
        window_positions(growing, np.array([0]), seq_len=64, order="shuffle", seed=1)


@pytest.mark.parametrize(
    ("starts", "stops"), [([5, 7], [8, 9]), ([5], [4]), ([1, 2], [2])], ids=["overlap", "backwards", "number"]
)
def test_ranges_that_overlap_are_rejected(starts, stops, tokens):
    with pytest.raises(DataError, match="The ranges must be pairs of a start and a stop that do not overlap"):
        find_windows(tokens, np.array(starts), np.array(stops), seq_len=9, order="shuffle", seed=1, stop_index=9)
