"""Positions of the windows of an order, and the inverse: the windows that read given tokens."""

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import LARGEST, DataError, check_choice, check_function, check_integer
from owt_data._options import STREAM_ORDERS, OrderKind
from owt_data._tokens.growing_tokens import GrowingTokens
from owt_data._tokens.sequence import TokenMixture, Tokens
from owt_data._tokens.window_order import (
    as_int64,
    check_seed,
    epoch_offsets,
    is_sequential,
    num_windows,
    unshuffled,
    window_starts,
)

_Found = tuple[NDArray[np.int64], NDArray[np.int64]]

# Windows whose starts are drawn at once.
_BLOCK = 1 << 20


def window_positions(
    tokens: Tokens, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int
) -> NDArray[np.int64]:
    """Return the position of the first token of the windows at these indices of an order, `int64[N]`.

    Positions count the tokens as `TokenDocuments` does: those of a mixture count its sequences one after the other.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        indices: window indices, `int64[N]`.
        seq_len: inputs per window.
        order: see `window_starts`.
        seed: see `window_starts`.

    Raises:
        DataError: an argument is out of its range, or a window of tokens that are being prepared does not exist yet.
    """
    indices = as_int64("index", indices)
    if isinstance(tokens, GrowingTokens):
        count = tokens.num_windows(seq_len)  # looks whether the folder has become complete
        if not tokens.is_complete:
            _check_exists(count, int(indices.max(initial=0)), order)  # `starts` would wait
    return tokens.starts(indices, seq_len=seq_len, order=order, seed=seed)


def find_windows(
    tokens: Tokens,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    *,
    seq_len: int,
    order: OrderKind,
    seed: int,
    stop_index: int,
    report: Callable[[float], None] | None = None,
) -> _Found:
    """Find the windows of an order that read tokens of ranges: the inverse of `window_positions`.

    `shuffle` inverts the permutation of each epoch in closed form. `random` computes the starts of all windows.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        starts: first positions of ranges, `int64[N]`. The ranges must not overlap, nor lie in two sequences of a
            mixture; documents do not.
        stops: one past the last positions, `int64[N]`.
        seq_len: inputs per window. A window reads `seq_len + 1` tokens.
        order: see `window_starts`.
        seed: see `window_starts`.
        stop_index: windows before this index are found; of tokens that are being prepared, those that exist.
        report: called with the share done.

    Returns:
        `(ranges, indices)`, `int64[M]` each: for each pair of a range and a window that reads some of its tokens, the
        number of the range and the index of the window. The indices ascend.

    Raises:
        DataError: an argument is out of its range, or ranges overlap.
    """
    check_choice("order", order, get_args(OrderKind))
    check_function("report", report)
    seed, seq_len = check_seed(seed), check_integer("seq_len", seq_len, least=1)
    stop_index = check_integer("stop_index", stop_index, least=0, most=LARGEST)
    num_tokens = len(tokens)
    starts, stops = as_int64("start", starts, most=num_tokens), as_int64("stop", stops, most=num_tokens)
    are_pairs = len(starts) == len(stops) and bool((stops >= starts).all())
    by_start = np.lexsort((stops, starts)) if are_pairs else np.empty(0, np.int64)
    by_start = by_start[stops[by_start] > starts[by_start]]
    first, last = starts[by_start], stops[by_start]
    if not are_pairs or (last[:-1] > first[1:]).any():
        raise DataError("The ranges must be pairs of a start and a stop that do not overlap, got others.")
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for share, part in _search(tokens, first, last, seq_len, order, seed, stop_index):
        found.append(part)
        if report is not None:
            report(share)
    ranges, indices = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    by_index = np.lexsort((ranges, indices))
    return by_start[ranges[by_index]], indices[by_index]


def _search(
    tokens: Tokens,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    seq_len: int,
    order: OrderKind,
    seed: int,
    stop_index: int,
) -> Iterator[tuple[float, _Found]]:
    """Yield the share done, and pairs of ranges and windows."""
    if isinstance(tokens, TokenMixture):
        yield from _search_mixture(tokens, starts, stops, seq_len, order, seed, stop_index)
        return
    num_tokens = len(tokens)
    count = num_windows(num_tokens, seq_len)
    if isinstance(tokens, GrowingTokens) and not tokens.is_complete:
        order, stop_index = "sequential", min(stop_index, count)
    if not count or not len(starts):
        return
    if order == "random":
        for begin in range(0, stop_index, _BLOCK):
            end = min(begin + _BLOCK, stop_index)
            block = np.arange(begin, end)
            firsts = window_starts(block, order=order, seed=seed, num_tokens=num_tokens, seq_len=seq_len)
            low = np.searchsorted(stops, firsts, side="right")
            high = np.searchsorted(starts, firsts + seq_len + 1, side="left")
            windows, ranges = _expand(low, high)
            yield end / stop_index, (ranges, block[windows])
        return
    num_epochs = -(-stop_index // count)
    at_once = max(1, _BLOCK // max(1, len(starts)))
    for begin in range(0, num_epochs, at_once):
        epochs = np.arange(begin, min(begin + at_once, num_epochs))
        offsets = epoch_offsets(epochs, order=order, seed=seed, num_tokens=num_tokens, seq_len=seq_len)[:, None]
        # The first window of a range is that whose last token, the target of its last input, is in the range.
        low = np.clip((starts - offsets - 1) // seq_len, 0, count)
        high = np.clip((stops - offsets - 1) // seq_len + 1, 0, count)
        cells, numbers = _expand(low.ravel(), high.ravel())
        epochs, ranges = epochs[cells // len(starts)], cells % len(starts)
        indices = np.where(
            is_sequential(epochs, order), numbers + epochs * count, unshuffled(numbers, count, seed, epochs)
        )
        before_stop = indices < stop_index
        yield min(1.0, (begin + at_once) / num_epochs), (ranges[before_stop], indices[before_stop])


def _search_mixture(
    tokens: TokenMixture,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    seq_len: int,
    order: OrderKind,
    seed: int,
    stop_index: int,
) -> Iterator[tuple[float, _Found]]:
    before = 0  # tokens
    for number, sequence in enumerate(tokens.sequences):
        after = before + len(sequence)
        inside = np.flatnonzero((starts >= before) & (starts < after))
        own_seed = tokens.seed_of(number, seed)
        own_starts, own_stops = starts[inside] - before, stops[inside] - before
        own_stop = tokens.own_stop(number, stop_index, seed)
        for done, (ranges, own) in _search(sequence, own_starts, own_stops, seq_len, order, own_seed, own_stop):
            indices = tokens.undeal(number, own, seed)
            before_stop = indices < stop_index
            yield (number + done) / len(tokens.sequences), (inside[ranges[before_stop]], indices[before_stop])
        before = after


def _expand(low: NDArray[np.int64], high: NDArray[np.int64]) -> _Found:
    """Return each row `i` and each number in `[low[i], high[i])`, as two arrays."""
    counts = np.maximum(high - low, 0)
    rows = np.repeat(np.arange(len(low)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + low[rows]


def _check_exists(count: int, last: int, order: OrderKind) -> None:
    """Check that windows of tokens that are being prepared exist.

    Args:
        count: number of windows that exist.
        last: largest index of the windows.
        order: their order.

    Raises:
        DataError: a window does not exist yet, or the order needs all tokens.
    """
    if order not in STREAM_ORDERS:
        raise DataError(
            f"The order of tokens that are being prepared must be {' or '.join(STREAM_ORDERS)}, got {order}. Prepare "
            "the tokens first."
        )
    if last >= count:
        raise DataError(
            f"The windows must be among the first {count}, whose tokens exist, got window {last} of tokens that are "
            "being prepared. Wait for them."
        )
