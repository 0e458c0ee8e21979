"""Window order: the first token of each window, as a pure function of seed and index. No iterator state can be lost.

Every order is computed per index. `shuffle` permutes the positions of an epoch by a Feistel network (Luby and Rackoff,
1988) over the smallest rectangle of `rows * 2**bits` cells that holds them. Positions that land outside the epoch are
permuted again until they land inside, known as cycle walking (Black and Rogaway, 2002, "Ciphers with Arbitrary Finite
Domains", methods 2 and 3). The permutation is never stored, and every index of every epoch takes equal time and memory.
"""

from collections.abc import Iterator
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import DataError, check_choice, check_integer, show
from owt_data._options import OrderKind

WINDOW_ORDER_VERSION = 2
"""Incremented by every change to an order. A run cannot resume under another version."""

_U64 = NDArray[np.uint64]
_ROUNDS = 6
_MASK_63, _MASK_64 = (1 << 63) - 1, (1 << 64) - 1

# Indices in a block. The arrays of a block fit into a core's cache, which makes numpy several times faster.
_BLOCK = 1 << 16


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Return the number of non-overlapping windows of `seq_len` inputs; the last input needs a next token as target.

    Raises:
        DataError: `num_tokens` is not an integer of at least 0, or `seq_len` not one of at least 1.
    """
    num_tokens = check_integer("num_tokens", num_tokens, least=0)
    seq_len = check_integer("seq_len", seq_len, least=1)
    return max(0, num_tokens - 1) // seq_len


def count_windows(num_tokens: int, seq_len: int) -> int:
    """Return `num_windows`, which must not be 0.

    Raises:
        DataError: it is 0, or an argument is out of its range.
    """
    count = num_windows(num_tokens, seq_len)
    if count == 0:
        seq_len = int(seq_len)
        needed = f"at least {seq_len + 1}, one window of {seq_len} inputs and a target"
        raise DataError(f"The tokens must be {needed}, got {num_tokens}. Give more text or a shorter seq_len.")
    return count


def as_int64(name: str, values: NDArray[np.int64], *, most: int = _MASK_63) -> NDArray[np.int64]:
    """Return an array of indices or starts as `int64[N]`. Products of smaller integers would overflow.

    Args:
        name: `index` or `start`, for errors.
        values: the array.
        most: upper bound.

    Raises:
        DataError: it is no array of integers of one axis, it has a mask, or a value is out of its range.
    """
    is_masked = isinstance(values, np.ma.MaskedArray)
    if not isinstance(values, np.ndarray) or is_masked or values.dtype.kind not in "iu" or values.ndim != 1:
        remedy = "Convert a list with np.array(values, np.int64)."
        raise DataError(f"Each {name} must be an integer in an array int64[N], got {show(values)}. {remedy}")
    check_integer(f"The smallest {name}", int(values.min(initial=0)), least=0)
    check_integer(f"The largest {name}", int(values.max(initial=0)), least=0, most=most)
    return values.astype(np.int64, copy=False)


def check_seed(seed: int) -> int:
    """Check and return the seed of an order: seeds of more than 64 bits would have the orders of others.

    Raises:
        DataError: it is no integer of 64 bits.
    """
    return check_integer("seed", seed, least=0, most=_MASK_64)


def window_starts(
    indices: NDArray[np.int64], *, order: OrderKind, seed: int, num_tokens: int, seq_len: int
) -> NDArray[np.int64]:
    """Return the first token of the windows at these indices of an order.

    `shuffle` visits every non-overlapping window once per epoch. Each epoch has its own order and its own start offset.
    `random` draws starts with replacement, as nanoGPT does. `sequential` repeats the windows from first to last.
    `sequential-first` is `sequential` in the first epoch and `shuffle` in all later epochs.

    Args:
        indices: window indices, `int64[N]`, from 0 to `2**63 - 1`. They are not bounded by the number of windows.
        order: `shuffle`, `random`, `sequential` or `sequential-first`.
        seed: seed of the pseudo-random orders, from 0 to `2**64 - 1`.
        num_tokens: length of the token sequence.
        seq_len: inputs per window. A window spans `seq_len + 1` tokens.

    Returns:
        `int64[N]`, each between 0 and `num_tokens - seq_len - 1`.

    Raises:
        DataError: there are fewer tokens than one window needs, or an argument is out of its range.

    >>> import numpy as np
    >>> window_starts(np.arange(4), order="shuffle", seed=6, num_tokens=41, seq_len=10).tolist()
    [10, 0, 30, 20]
    """
    check_choice("order", order, get_args(OrderKind))
    seed = check_seed(seed)
    count = count_windows(num_tokens, seq_len)
    num_tokens, seq_len = int(num_tokens), int(seq_len)
    indices = as_int64("index", indices)
    starts = np.empty(len(indices), dtype=np.int64)
    for begin in range(0, len(indices), _BLOCK):
        block, out = indices[begin : begin + _BLOCK], starts[begin : begin + _BLOCK]
        if order == "random":
            draws = _mix(np.uint64(_key(seed, 0)) + block.astype(np.uint64))
            out[:] = draws % np.uint64(num_tokens - seq_len)
        elif order == "sequential":
            np.multiply(block % count, seq_len, out=out)
        elif order == "shuffle":
            _shuffle(block, out, seed, count, num_tokens, seq_len)
        else:  # sequential-first
            _shuffle(block, out, seed, count, num_tokens, seq_len)
            np.copyto(out, block * seq_len, where=block < count)
    return starts


def shuffled(
    indices: NDArray[np.int64], size: int, seed: int
) -> Iterator[tuple[NDArray[np.bool_] | slice, int, NDArray[np.int64]]]:
    """Split unbounded indices into epochs of `size` positions, and permute each epoch in its own order.

    Yields:
        `(where, epoch, positions)`: a selection of the indices that lie in the epoch, and their positions after the
        epoch's permutation, below `size`.
    """
    first, last = int(indices.min()) // size, int(indices.max()) // size
    if first == last:
        yield slice(None), first, _permute(indices - first * size, size, _key(seed, first + 1))
        return
    epochs = indices // size
    for epoch in sorted(set(epochs.tolist())):
        here = epochs == epoch
        yield here, epoch, _permute(indices[here] - epoch * size, size, _key(seed, epoch + 1))


def unshuffled(positions: NDArray[np.int64], size: int, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices whose positions, after the permutation of their epoch, are these: the inverse of `shuffled`.

    Args:
        positions: positions in an epoch, below `size`, `int64[N]`.
        size: positions of an epoch.
        seed: the seed.
        epochs: the epoch of each position, `int64[N]`.
    """
    return epochs * size + _permute(positions, size, _keys(seed, epochs + 1), inverse=True)


def epoch_offsets(
    epochs: NDArray[np.int64], *, order: OrderKind, seed: int, num_tokens: int, seq_len: int
) -> NDArray[np.int64]:
    """Return the first token that the windows of each epoch read, in an order without repetition, `int64[N]`."""
    spare = num_tokens - 1 - num_windows(num_tokens, seq_len) * seq_len
    offsets = (_keys(seed, epochs + 1) % np.uint64(spare + 1)).astype(np.int64)
    return np.where(is_sequential(epochs, order), 0, offsets)


def is_sequential(epochs: NDArray[np.int64], order: OrderKind) -> NDArray[np.bool_]:
    """Return whether the windows of each epoch are in the order of the tokens, `bool[N]`."""
    return (epochs == 0) & (order == "sequential-first") | (order == "sequential")


def _shuffle(
    indices: NDArray[np.int64], out: NDArray[np.int64], seed: int, count: int, num_tokens: int, seq_len: int
) -> None:
    spare = num_tokens - 1 - count * seq_len
    for where, epoch, windows in shuffled(indices, count, seed):
        out[where] = windows * seq_len + _key(seed, epoch + 1) % (spare + 1)


def _mix(x: _U64) -> _U64:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, stream: int) -> int:
    """Return the 64-bit key of a numbered stream of a seed."""
    return int(_keys(seed, np.array([stream]))[0])


def _keys(seed: int, streams: NDArray[np.int64]) -> _U64:
    """Return the 64-bit keys of numbered streams of a seed."""
    mixed = _mix(np.array([seed & _MASK_64], dtype=np.uint64))
    return _mix(mixed ^ streams.astype(np.uint64))


def _permute(positions: NDArray[np.int64], size: int, key: int | _U64, *, inverse: bool = False) -> NDArray[np.int64]:
    """Evaluate a permutation of `range(size)`, or its inverse, at `positions`. Each position may have its own key.

    The inverse walks the same cycle backwards, from an image to the position before the cells outside the range.
    """
    word = np.uint32 if size < 1 << 31 else np.uint64
    images = positions.astype(word)
    _feistel(images, size, key, inverse=inverse)
    outside = np.flatnonzero(images >= size)
    while outside.size:
        walked = images[outside]
        _feistel(walked, size, key if isinstance(key, int) else key[outside], inverse=inverse)
        images[outside] = walked
        outside = outside[walked >= size]
    return images.astype(np.int64)


def _feistel(x: NDArray[np.unsignedinteger], size: int, key: int | _U64, *, inverse: bool) -> None:
    """Permute the cells `x` of the rectangle in place. Rounds change row and column in turn, by a hash of the other.

    The inverse undoes the rounds from the last to the first: a hash that was added is subtracted.

    Words of 32 bits, used if the cells fit, are twice as fast as 64 bits. A coordinate fits into `half` a word, so its
    product with a fraction of `half` bits does not overflow.
    """
    word = x.dtype.type
    width = 8 * x.itemsize
    half = width // 2
    bits = max(2, (size - 1).bit_length()) // 2
    num_rows = -(-size >> bits)
    num_columns = 1 << bits
    numbers = np.arange(1, 2 * _ROUNDS + 1, dtype=np.uint64)
    round_keys = (_mix(np.asarray(key, np.uint64)[..., None] ^ numbers) >> np.uint64(64 - width)).astype(word)
    constant = word(0xD6E8FEB86659FD93 >> (64 - width) | 1)
    row, column = x >> word(bits), x & word(num_columns - 1)
    mixed, other = np.empty_like(x), np.empty_like(x)
    for number in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
        np.bitwise_xor(row if number % 2 else column, round_keys[..., 2 * number], out=mixed)
        np.multiply(mixed, round_keys[..., 2 * number + 1] | word(1), out=mixed)
        np.right_shift(mixed, word(half - 1), out=other)
        np.bitwise_xor(mixed, other, out=mixed)
        np.multiply(mixed, constant, out=mixed)
        if number % 2:
            np.right_shift(mixed, word(width - bits), out=mixed)
            np.bitwise_xor(column, mixed, out=column)
        else:
            # The upper half of the hash, as a fraction, times `num_rows` is below `num_rows`. It is added modulo.
            np.right_shift(mixed, word(half), out=mixed)
            np.multiply(mixed, word(num_rows), out=mixed)
            np.right_shift(mixed, word(half), out=mixed)
            if inverse:
                np.subtract(row, mixed, out=row)  # wraps to a huge number below 0
                np.add(row, word(num_rows), out=mixed)
            else:
                np.add(row, mixed, out=row)
                np.subtract(row, word(num_rows), out=mixed)  # wraps to a huge number if the row is in range
            np.minimum(row, mixed, out=row)
    np.left_shift(row, word(bits), out=row)
    np.bitwise_or(row, column, out=x)
