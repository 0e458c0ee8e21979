"""Token sequences of one or more files, mixtures of sequences, and their windows."""

import functools
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, cast, get_args, runtime_checkable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from owt_data._errors import (
    DataError,
    UnreadableError,
    check_choice,
    check_integer,
    check_type,
    is_number,
    show,
    show_name,
)
from owt_data._options import OrderKind
from owt_data._paths import LocalTokens, RemoteTokens, is_uri, look_up
from owt_data._tokens.layout import MOST_IDS, RAW, Layout, widest
from owt_data._tokens.mixture_stages import MIXTURE_ROUND, NEVER, Shares, shares_of
from owt_data._tokens.window_order import (
    as_int64,
    check_seed,
    count_windows,
    num_windows,
    window_starts,
)

# A ranged read waits tens of milliseconds for the storage and needs little CPU.
_REMOTE_READERS = 32
# A file in object storage that is open takes about 1 KB of memory, and no file descriptor.
_OPEN_FILES, _OPEN_REMOTE_FILES = 256, 1 << 16

# Windows in object storage that are at most this far apart are one request, as it waits longer than it reads them. A
# request is about as large as the second number, so that there are several to wait for at once.
_GAP_TOKENS, _RANGE_TOKENS = 1 << 15, 1 << 20


@runtime_checkable
class Tokens(Protocol):
    """Tokens that windows are read from. Can be pickled, without the files that are open."""

    def __len__(self) -> int:
        """Number of tokens."""
        ...

    def num_windows(self, seq_len: int) -> int:
        """Return the number of non-overlapping windows of `seq_len` inputs."""
        ...

    def windows(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.integer]:
        """Return the windows at indices of an order, `uint16` or `uint32[N, seq_len + 1]`; see `window_starts`."""
        ...

    def starts(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.int64]:
        """Return the position of the first token of each of these windows among all tokens, `int64[N]`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one file."""

    path: str
    """The token file: a local path, or a URI."""

    start: int
    """First token."""

    stop: int
    """One past the last token."""

    layout: Layout = RAW
    """Header and width of the file's tokens. Default: raw little-endian uint16."""

    def __post_init__(self) -> None:
        check_type("path", self.path, str, "a text", "Give the path as text.")
        start = check_integer("start", self.start, least=0)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", check_integer("stop", self.stop, least=start))
        check_type("layout", self.layout, Layout, "a Layout")

    def __len__(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens of one or more files, one after the other. A window may cross files.

    >>> import numpy as np, tempfile
    >>> file = tempfile.NamedTemporaryFile()
    >>> np.arange(10, dtype="<u2").tofile(file.name)
    >>> tail, head = (TokenSpan(path=file.name, start=a, stop=b) for a, b in [(6, 10), (0, 6)])
    >>> tokens = TokenSequence((tail, head))
    >>> tokens.read_windows(np.array([2]), seq_len=3)
    array([[8, 9, 0, 1]], dtype=uint16)
    """

    spans: tuple[TokenSpan, ...]
    """The spans, in order."""

    vocab_size: int | None = None
    """Number of ids. A token that is not smaller raises a `DataError` when it is read. None: every token is valid."""

    _bounds: list[int] = field(init=False, repr=False, compare=False)
    """The number of tokens before each span, and of all tokens, so that a position is found by bisection."""

    dtype: np.dtype[np.uint16] | np.dtype[np.uint32] = field(init=False, repr=False, compare=False)
    """The type of the tokens that are read: uint32 if a file has tokens of 32 bits, else uint16."""

    _open_remote: "Callable[[str], RemoteTokens] | None" = field(init=False, repr=False, compare=False)
    """Opens a file in object storage, which stays open; None if all files are local."""

    def __post_init__(self) -> None:
        _check_tuple("spans", self.spans, TokenSpan)
        object.__setattr__(self, "_bounds", [0, *accumulate(span.stop - span.start for span in self.spans)])
        object.__setattr__(self, "dtype", widest(layout.dtype for layout in {span.layout for span in self.spans}))
        is_remote = any(is_uri(span.path) for span in self.spans)
        object.__setattr__(self, "_open_remote", _opener_of_remote_files() if is_remote else None)
        if self.vocab_size is not None:
            size = check_integer("vocab_size", self.vocab_size, least=1, most=MOST_IDS)
            object.__setattr__(self, "vocab_size", size)

    def __reduce__(self) -> tuple[type["TokenSequence"], tuple[tuple[TokenSpan, ...], int | None]]:
        """Pickle the spans, without the files that are open."""
        return TokenSequence, (self.spans, self.vocab_size)

    def __len__(self) -> int:
        """Number of tokens."""
        return self._bounds[-1]

    def find_span(self, position: int) -> int:
        """Return the number of the span that has a token, or the number of spans for a position after all tokens."""
        return bisect_right(self._bounds, position) - 1

    @property
    def is_remote(self) -> bool:
        """Return whether a file is in object storage."""
        return self._open_remote is not None

    def num_windows(self, seq_len: int) -> int:
        """Return the number of non-overlapping windows of `seq_len` inputs."""
        return num_windows(len(self), seq_len)

    def between(self, start: int, stop: int) -> "TokenSequence":
        """Return the tokens `[start, stop)` as a sequence.

        Raises:
            DataError: the range is not within the tokens.
        """
        start, stop = self._check_range(start, stop)
        spans, first = [], 0
        for span in self.spans:
            low, high = max(start - first, 0), min(stop - first, len(span))
            if low < high:
                spans.append(replace(span, start=span.start + low, stop=span.start + high))
            first += len(span)
        return TokenSequence(tuple(spans), self.vocab_size)

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Read the tokens `[start, stop)` into memory.

        Raises:
            DataError: the range is not within the tokens, or a file cannot be read, is cut short, or holds a token
                outside the vocabulary.
        """
        start, stop = self._check_range(start, len(self) if stop is None else stop)
        tokens = np.empty(stop - start, dtype=self.dtype)
        SequenceReader(self, in_order=True).copy(start, tokens)
        self._check_ids(np.array([start]), tokens[None])
        return tokens

    def read_windows(self, starts: NDArray[np.int64], seq_len: int) -> NDArray[np.integer]:
        """Read the windows that begin at `starts`, `int64[N]`, as `uint16` or `uint32[N, seq_len + 1]`.

        Raises:
            DataError: a start or `seq_len` is out of range, or a file cannot be read, is cut short, or holds a token
                outside the vocabulary.
        """
        count_windows(len(self), seq_len)
        seq_len = int(seq_len)
        starts = as_int64("start", starts, most=len(self) - seq_len - 1)
        windows = np.empty((len(starts), seq_len + 1), dtype=self.dtype)
        if self.is_remote:
            self._read_remote(starts, windows)
        else:
            reader = SequenceReader(self)
            for start, window in zip(starts.tolist(), windows, strict=True):
                reader.copy(start, window)
        self._check_ids(starts, windows)
        return windows

    def _read_remote(self, starts: NDArray[np.int64], windows: NDArray[np.integer]) -> None:
        """Read windows in ranges, each of windows that are close to one another, by several threads."""
        if not len(starts):
            return
        order = np.argsort(starts)
        ordered = starts[order]
        is_far = np.diff(ordered) > windows.shape[1] + _GAP_TOKENS
        cuts = np.flatnonzero(is_far | (np.diff(ordered // _RANGE_TOKENS) > 0)) + 1
        groups = np.split(order, cuts)
        ranges = [(int(starts[group[0]]), int(starts[group[-1]]) + windows.shape[1]) for group in groups]
        reader = SequenceReader(self)

        def read(group: NDArray[np.int64], start: int, stop: int) -> None:
            tokens = np.empty(stop - start, dtype=windows.dtype)
            reader.copy(start, tokens)
            windows[group] = sliding_window_view(tokens, windows.shape[1])[starts[group] - start]

        with ThreadPoolExecutor(_REMOTE_READERS) as threads:
            list(threads.map(read, groups, *zip(*ranges, strict=True)))

    def _check_range(self, start: int, stop: int) -> tuple[int, int]:
        start = check_integer("start", start, least=0, most=len(self))
        return start, check_integer("stop", stop, least=start, most=len(self))

    def _check_ids(self, starts: NDArray[np.int64], windows: NDArray[np.integer]) -> None:
        """Check the tokens of windows that begin at `starts`."""
        if self.vocab_size is None or int(windows.max(initial=0)) < self.vocab_size:
            return
        row, column = np.unravel_index(int(np.argmax(windows >= self.vocab_size)), windows.shape)
        position = int(starts[row] + column)
        number = self.find_span(position)
        span = self.spans[number]
        check_ids(windows[row, column:], self.vocab_size, span.path, span.start + position - self._bounds[number])

    def windows(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.integer]:
        """Return the windows at indices of an order, `uint16` or `uint32[N, seq_len + 1]`; see `window_starts`."""
        return self.read_windows(self.starts(indices, seq_len=seq_len, order=order, seed=seed), seq_len)

    def starts(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.int64]:
        """Return the first token of each of the windows at these indices of an order, `int64[N]`."""
        return window_starts(indices, order=order, seed=seed, num_tokens=len(self), seq_len=seq_len)


def _opener_of_remote_files() -> Callable[[str], RemoteTokens]:
    """Return a function that opens a file in object storage once, for all threads."""
    lock, opened = threading.Lock(), functools.lru_cache(_OPEN_REMOTE_FILES)(RemoteTokens)

    def open_file(uri: str) -> RemoteTokens:
        with lock:
            return opened(uri)

    return open_file


class SequenceReader:
    """Reader of a sequence that keeps files open. Safe to use from several threads."""

    def __init__(self, sequence: TokenSequence, *, max_open_files: int = _OPEN_FILES, in_order: bool = False) -> None:
        self._sequence = sequence
        opening = functools.partial(LocalTokens, in_order=in_order)
        self._open_local: Callable[[str], LocalTokens] = functools.lru_cache(max_open_files)(opening)

    def copy(self, start: int, out: NDArray[np.integer]) -> None:
        """Copy the tokens from `start` on into `out`."""
        sequence = self._sequence
        number = sequence.find_span(start)
        while len(out):
            span = sequence.spans[number]
            first = span.start + start - sequence._bounds[number]
            here = out[: span.stop - first]
            open_file = sequence._open_remote if is_uri(span.path) else self._open_local
            assert open_file is not None, "the sequence has a file in object storage"
            stored = here if here.dtype == span.layout.dtype else np.empty(len(here), span.layout.dtype)
            if len(here) and not open_file(span.path).copy(span.layout.place(first), stored):
                raise UnreadableError(
                    f"{show_name(span.path)} has been cut short: it had at least {span.layout.place(span.stop)} bytes, "
                    f"and has {look_up(span.path).size or 0}. Restore the file, and run the same command again."
                )
            if stored is not here:
                here[:] = stored
            out, start, number = out[len(here) :], start + len(here), number + 1


def check_ids(tokens: NDArray[np.integer], vocab_size: int, path: str, start: int) -> None:
    """Check that tokens, read from the token `start` of a file on, are ids of a vocabulary.

    Raises:
        DataError: an id is outside the vocabulary.
    """
    if int(tokens.max(initial=0)) >= vocab_size:
        offset = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"The ids in {show_name(path)} must be below {vocab_size}, the vocabulary of the tokenizer, got "
            f"{tokens[offset]} at token {start + offset}. Name the right tokenizer or a folder with a "
            "manifest.json, or restore a damaged file."
        )


@dataclass(frozen=True, slots=True)
class TokenMixture:
    """Mixture of sequences by weight. Each round of 65 536 consecutive windows has the exact proportions.

    The sequence of a window, and the window's index in the order of that sequence, are pure functions of the seed and
    the index. Each sequence begins its next epoch when its own windows are used up.

    Later stages may have other weights. The windows before a stage are those of the mixture without it, and each
    sequence goes on where it was: its windows are read once an epoch, whatever the stages.

    Raises:
        DataError: the weights do not match the sequences, or one is too small for a window in a round; or the stages
            are not in order.
    """

    sequences: tuple[TokenSequence, ...]

    weights: tuple[float, ...]
    """Relative share of windows of each sequence, in the first stage. With later stages, it may be 0."""

    stages: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """The later stages: index of the first window, and the weights from there on. A weight may be 0."""

    _shares: Shares = field(init=False, repr=False, compare=False)
    """The windows of each sequence in a round of each stage."""

    def __post_init__(self) -> None:
        _check_tuple("sequences", self.sequences, TokenSequence)
        check_type("stages", self.stages, tuple, "a tuple", "Convert a list with tuple(...).")
        if not all(isinstance(stage, tuple) and len(stage) == 2 for stage in self.stages):
            raise DataError(f"Each of stages must be a pair of a window and weights, got {show(self.stages)}.")
        stages = [(check_integer("The window of a stage", start, least=1), weights) for start, weights in self.stages]
        starts = [0, *(start for start, _ in stages)]
        if sorted(set(starts)) != starts:
            raise DataError(f"The windows of the stages must ascend, got {show(starts[1:])}. Put them in order.")
        rounds = [self._shares_of(weights) for weights in (self.weights, *(weights for _, weights in stages))]
        if not all(map(any, zip(*rounds, strict=True))):
            raise self._weights_error(self.weights)
        object.__setattr__(self, "stages", tuple(stages))
        object.__setattr__(self, "_shares", Shares(tuple(starts), tuple(rounds)))

    def __reduce__(self) -> tuple[type["TokenMixture"], tuple[Any, ...]]:
        """Pickle the fields without those that follow from them."""
        return TokenMixture, (self.sequences, self.weights, self.stages)

    def _shares_of(self, weights: tuple[float, ...]) -> tuple[int, ...]:
        """Return the windows of each sequence in a round, for the weights of a stage."""
        check_type("weights", weights, tuple, "a tuple", "Convert a list with tuple(...).")
        are_numbers = all(is_number(weight) and 0 <= weight <= sys.float_info.max for weight in weights)
        fit = are_numbers and len(weights) == len(self.sequences) and 0 < sum(map(float, weights)) < float("inf")
        if not fit:
            raise self._weights_error(weights)
        shares = shares_of([*map(float, weights)])  # sums of numpy's small numbers would overflow
        if any(weight > 0 and share == 0 for weight, share in zip(weights, shares, strict=True)):
            raise self._weights_error(weights)
        return tuple(shares)

    def _weights_error(self, weights: tuple[float, ...]) -> DataError:
        in_stages = ", in one of the stages" if self.stages else ""
        return DataError(
            f"The weights must be {len(self.sequences)} finite numbers, and give each sequence at least one window in "
            f"{MIXTURE_ROUND}{in_stages}, got {show(list(weights))}. Raise the small ones, or leave out their "
            "sequences."
        )

    def __len__(self) -> int:
        """Number of tokens in all sequences."""
        return sum(map(len, self.sequences))

    def num_windows(self, seq_len: int) -> int:
        """Return the number of non-overlapping windows in all sequences; 0 if a sequence has no window."""
        counts = [sequence.num_windows(seq_len) for sequence in self.sequences]
        return sum(counts) if all(counts) else 0

    def windows(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.integer]:
        """Return the windows at these indices, `uint16` or `uint32[N, seq_len + 1]`.

        Each sequence gives its windows in the order.

        Raises:
            DataError: the order is `sequential`, which a mixture does not have.
        """
        parts = self._by_sequence(indices, seq_len, order, seed)
        dtype = widest(sequence.dtype for sequence in self.sequences)
        windows = np.empty((len(indices), int(seq_len) + 1), dtype=dtype)
        for number, here, own_index, own_seed in parts:
            windows[here] = self.sequences[number].windows(own_index, seq_len=seq_len, order=order, seed=own_seed)
        return windows

    def starts(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.int64]:
        """Return the first token of each window, `int64[N]`: its position in the sequences, one after another.

        Raises:
            DataError: the order is `sequential`, which a mixture does not have.
        """
        firsts = [0, *accumulate(map(len, self.sequences))]
        parts = self._by_sequence(indices, seq_len, order, seed)
        starts = np.empty(len(indices), dtype=np.int64)
        for number, here, own_index, own_seed in parts:
            own = self.sequences[number].starts(own_index, seq_len=seq_len, order=order, seed=own_seed)
            starts[here] = firsts[number] + own
        return starts

    def _by_sequence(
        self, indices: NDArray[np.int64], seq_len: int, order: OrderKind, seed: int
    ) -> list[tuple[int, NDArray[np.bool_], NDArray[np.int64], int]]:
        """Return, for each sequence of these windows: its number, which windows, their indices in it, and its seed."""
        check_choice("order", order, get_args(OrderKind))
        if order == "sequential":
            raise DataError(
                "The order of a mixture must be shuffle, random or sequential-first, got sequential. Read its "
                "sequences one by one."
            )
        seed = check_seed(seed)
        count_windows(len(self), seq_len)
        most = NEVER - MIXTURE_ROUND * len(self.stages)  # the rounds of a stage are counted from its beginning
        which, own_index = self.deal(as_int64("index", indices, most=most), seed)
        selections = [(number, which == number) for number in range(len(self.sequences))]
        return [
            (number, here, own_index[here], self.seed_of(number, seed)) for number, here in selections if here.any()
        ]

    def deal(self, indices: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each index, the number of its sequence and the index of the window in that sequence's order."""
        return self._shares.deal(indices, seed)

    def undeal(self, which: int, own_indices: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the indices of windows of one sequence, by their indices in its own order: the inverse of `deal`.

        The index of a window that no stage reads is the largest of 64 bits.
        """
        return self._shares.undeal(which, own_indices, seed)

    def counts(self, stop_index: int, seed: int) -> list[int]:
        """Return the number of windows of each sequence among the windows before an index.

        Args:
            stop_index: the index.
            seed: see `window_starts`.

        Raises:
            DataError: an argument is out of its range.
        """
        return self._shares.counts(check_integer("stop_index", stop_index, least=0), check_seed(seed))

    def own_stop(self, which: int, stop_index: int, seed: int) -> int:
        """Return a number above the indices, in the order of one sequence, of its windows before an index."""
        return self._shares.own_stop(which, stop_index, seed)

    def seed_of(self, which: int, seed: int) -> int:
        """Return the seed of the order of one sequence."""
        return (seed + which) % 2**64


def _check_tuple(name: str, values: object, kind: type) -> None:
    """Check that a field is a tuple of objects of one class."""
    check_type(name, values, tuple, "a tuple", "Convert a list with tuple(...).")
    for value in cast("tuple[object, ...]", values):
        if not isinstance(value, kind):  # most often there are many, and all are
            check_type(f"Each of {name}", value, kind, f"a {kind.__name__}")


def concatenate(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Join sequences of one vocabulary."""
    sizes = {sequence.vocab_size for sequence in sequences}
    spans = tuple(span for sequence in sequences for span in sequence.spans)
    return TokenSequence(spans, sizes.pop() if len(sizes) == 1 else None)


def local_sequence(
    paths: Sequence[os.PathLike[str]], vocab_size: int | None = None, layout: Layout = RAW
) -> TokenSequence:
    """Join complete local files of one layout. Empty files are left out."""
    sizes = [(os.fspath(path), layout.num_tokens(os.path.getsize(path))) for path in paths]
    spans = (TokenSpan(path=path, start=0, stop=size, layout=layout) for path, size in sizes if size)
    return TokenSequence(tuple(spans), vocab_size)
