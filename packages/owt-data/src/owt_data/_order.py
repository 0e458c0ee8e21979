"""Which window comes when: a pure function, so that no iterator state exists that a crash could lose.

Both orders are computed per index. `shuffle` sends an epoch's positions through a Feistel network
(Luby and Rackoff, 1988) whose domain is the next power of two, and walks the cycle until it is back
among the windows (Black and Rogaway, 2002, "Ciphers with Arbitrary Finite Domains", method 2): a
permutation that is never written down, and takes the same time at any index of any epoch.
"""

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import DataError
from owt_data._options import OrderKind

_U64 = NDArray[np.uint64]
_ROUNDS = 6  # even, so that the two halves end with the widths they began with
_MASK_64 = (1 << 64) - 1


def num_windows(num_tokens: int, seq_len: int) -> int:
    """How many windows of `seq_len` inputs, each with its next token as target, lie side by side."""
    return max(0, num_tokens - 1) // seq_len


def window_starts(
    indices: NDArray[np.int64], *, order: OrderKind, seed: int, num_tokens: int, seq_len: int
) -> NDArray[np.int64]:
    """Where in the tokens the windows with these indices begin.

    `shuffle` visits every non-overlapping window once per epoch, each epoch in an order and from a start
    offset of its own. `random` draws starts with replacement, as nanoGPT does. `sequential` goes from
    the first window to the last, and round again.

    Args:
        indices: window numbers, `int64[N]`, from 0 without end.
        order: one of the three.
        seed: what the pseudo-random orders depend on, beside the index and the two lengths.
        num_tokens: length of the token sequence.
        seq_len: inputs per window. A window spans `seq_len + 1` tokens.

    Returns:
        `int64[N]`, each between 0 and `num_tokens - seq_len - 1`.

    Raises:
        DataError: the tokens do not fill one window.

    >>> import numpy as np
    >>> window_starts(np.arange(4), order="shuffle", seed=3, num_tokens=41, seq_len=10).tolist()
    [30, 20, 0, 10]
    """
    count = num_windows(num_tokens, seq_len)
    if count == 0:
        raise DataError(
            f"expected at least {seq_len + 1} tokens, which one window of {seq_len} inputs needs, got {num_tokens}: "
            "give more text or a shorter model.seq_len"
        )
    if order == "random":
        draws = _mix(np.uint64(_key(seed, 0)) + indices.astype(np.uint64))
        return (draws % np.uint64(num_tokens - seq_len)).astype(np.int64)
    epochs, positions = np.divmod(indices, count)
    if order == "sequential":
        return positions * seq_len
    spare = num_tokens - 1 - count * seq_len
    starts = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        key = _key(seed, epoch + 1)
        windows = _permute(positions[here].astype(np.uint64), count, key).astype(np.int64)
        starts[here] = windows * seq_len + key % (spare + 1)
    return starts


def _mix(x: _U64) -> _U64:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, stream: int) -> int:
    """A 64-bit key for a numbered stream of a seed."""
    mixed = int(_mix(np.array([seed & _MASK_64], dtype=np.uint64))[0])
    return int(_mix(np.array([mixed ^ stream], dtype=np.uint64))[0])


def _permute(positions: _U64, size: int, key: int) -> _U64:
    """A permutation of `range(size)`, evaluated at `positions`."""
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    round_keys = _mix(np.uint64(key) ^ np.arange(1, _ROUNDS + 1, dtype=np.uint64))
    images = _feistel(positions, bits - low_bits, low_bits, round_keys)
    outside = np.flatnonzero(images >= size)
    while outside.size:
        images[outside] = _feistel(images[outside], bits - low_bits, low_bits, round_keys)
        outside = outside[images[outside] >= size]
    return images


def _feistel(x: _U64, high_bits: int, low_bits: int, round_keys: _U64) -> _U64:
    """An alternating Feistel network over `high_bits + low_bits` bits."""
    high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
    for key in round_keys:
        mixed = (low ^ key) * np.uint64(0xD6E8FEB86659FD93)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        high, low = low, high ^ (mixed >> np.uint64(64 - high_bits))
        high_bits, low_bits = low_bits, high_bits
    return (high << np.uint64(low_bits)) | low
