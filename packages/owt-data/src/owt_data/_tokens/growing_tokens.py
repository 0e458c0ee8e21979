"""Tokens of a folder that is being prepared: read from its shards, and from `train.bin` once that exists."""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from owt_data._complete_files import write_file
from owt_data._errors import DataError, UnreadableError, check_choice, check_integer, one_line, show_name
from owt_data._options import STREAM_ORDERS, OrderKind
from owt_data._paths import TRAIN_NAME, VAL_NAME, name_text, open_regular
from owt_data._tokenizer_names import width_for
from owt_data._tokens.journal import JournalPlace, read_journal_after, shard_folder, shard_path, staging_path
from owt_data._tokens.layout import RAW, Layout
from owt_data._tokens.manifest import read_manifest
from owt_data._tokens.sequence import TokenSequence, concatenate, local_sequence
from owt_data._tokens.window_order import as_int64, check_seed, num_windows

_WANTED_NAME, _RUNNING_NAME, _ERROR_NAME = "wanted", "running", "error.txt"
_POLL_S = 0.1
_MOST_DIGITS, _MOST_CHARS = 20, 1 << 16
# Seconds until a network file system shows the files of another machine, or a preparation without a sign of life counts
# as killed; and until a folder counts as not shared.
_PATIENCE_S, _SHARED_WITHIN_S = 90.0, 15.0

T = TypeVar("T")


@dataclass(slots=True)
class _Wait:
    """A wait for tokens, by the clock of this process: its start, and the last sign of life with its time."""

    since_s: float
    sign_of_life: int | None = None
    sign_s: float = 0.0


class GrowingTokens:
    """Training or validation tokens of a folder, before and after the folder is complete. Can be pickled.

    The tokens that exist are a prefix of the complete tokens. Hence a window never changes. A window that does not
    exist yet is waited for.

    Args:
        folder: the folder that is being prepared.
        split: the tokens to read.
        is_one_source: True if the first shard is the validation tokens (`split="start"`), False if each split has its
            own source.
        vocab_size: number of ids; see `TokenSequence`.
    """

    def __init__(
        self, folder: Path, split: Literal["train", "val"], *, is_one_source: bool, vocab_size: int | None = None
    ) -> None:
        check_choice("split", split, ("train", "val"))
        self._folder = Path(name_text(folder))
        self._split: Literal["train", "val"] = split
        self._is_one_source = is_one_source
        self._vocab_size = vocab_size
        self.is_complete = False
        """True after a call that has found the complete tokens."""
        self._num_wanted = 0
        self._forget()

    def _forget(self) -> None:
        # One value, because several threads may look for tokens.
        self._found = TokenSequence((), self._vocab_size), JournalPlace()

    @property
    def _tokens(self) -> TokenSequence:
        """The tokens that the last call has found."""
        return self._found[0]

    def __len__(self) -> int:
        """Return the number of tokens that exist.

        Raises:
            DataError: the folder cannot be read.
        """
        self._retry(self._refresh)
        return len(self._tokens)

    @property
    def folder(self) -> Path:
        """The folder that is being prepared."""
        return self._folder

    @property
    def split(self) -> Literal["train", "val"]:
        """The tokens that are read."""
        return self._split

    @property
    def is_one_source(self) -> bool:
        """True if the first shard is the validation tokens."""
        return self._is_one_source

    def existing(self) -> TokenSequence:
        """Return the tokens that exist, as a sequence.

        Raises:
            DataError: the folder cannot be read.
        """
        self._retry(self._refresh)
        return self._tokens

    def num_windows(self, seq_len: int) -> int:
        """Return the number of non-overlapping windows of `seq_len` inputs that exist.

        Raises:
            DataError: the folder cannot be read.
        """
        return num_windows(len(self), seq_len)

    def windows(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.integer]:
        """Return the windows at these indices of an order, `uint16[N, seq_len + 1]` or `uint32`. Wait until they exist.

        Raises:
            DataError: the order needs the number of all tokens, or the preparation has failed or ended.
            FileNotFoundError: this machine has no such folder.
        """
        check_choice("order", order, get_args(OrderKind))
        if order not in STREAM_ORDERS:
            raise DataError(
                f"The order of tokens that are being prepared must be {' or '.join(STREAM_ORDERS)}, got "
                f"{show_name(order)}. Choose one of these, or prepare the tokens first."
            )
        seed = check_seed(seed)
        seq_len = check_integer("seq_len", seq_len, least=1)
        indices = as_int64("index", indices)
        last = int(indices.max(initial=0))

        def read() -> NDArray[np.integer] | None:
            if (self._split == "train" and last >= num_windows(len(self._tokens), seq_len)) or not len(self._tokens):
                self._refresh()
            if self.is_complete or self._split == "val":
                return self._tokens.windows(indices, seq_len=seq_len, order=order, seed=seed)
            self._want((last + 1) * seq_len + 1)
            tokens = self._tokens  # another thread may look for them again
            exists = last < num_windows(len(tokens), seq_len)
            return tokens.read_windows(indices * seq_len, seq_len) if exists else None

        return self._wait_for(read)

    def starts(self, indices: NDArray[np.int64], *, seq_len: int, order: OrderKind, seed: int) -> NDArray[np.int64]:
        """Return the first token of each of the windows at these indices, `int64[N]`. Wait until the windows exist.

        Raises:
            DataError: see `windows`.
        """
        last = int(indices.max(initial=0))

        def find() -> NDArray[np.int64] | None:
            if last >= num_windows(len(self._tokens), seq_len):
                self._refresh()
            if self.is_complete or self._split == "val":
                return self._tokens.starts(indices, seq_len=seq_len, order=order, seed=seed)
            self._want((last + 1) * seq_len + 1)
            return indices * seq_len if last < num_windows(len(self._tokens), seq_len) else None

        return self._wait_for(find)

    def _wait_for(self, read: Callable[[], T | None]) -> T:
        """Call a function until it returns something."""
        wait = _Wait(time.monotonic())
        while (found := self._retry(read)) is None:
            self._check_running(wait)
            time.sleep(_POLL_S)
        return found

    def _retry(self, read: Callable[[], T]) -> T:
        """Call a function until it does not fail.

        Shards are deleted once the folder is complete, and a network file system may show the complete folder later.
        """
        since = time.monotonic()
        while True:
            try:
                return read()
            except (UnreadableError, FileNotFoundError):
                if self.is_complete or time.monotonic() - since > _PATIENCE_S:
                    raise
                self._forget()
            time.sleep(_POLL_S)

    def _check_running(self, wait: _Wait) -> None:
        """Check that tokens which are waited for can still come."""
        now = time.monotonic()
        sign_of_life = _read_sign_of_life(self._folder)
        if sign_of_life != wait.sign_of_life:
            wait.sign_of_life, wait.sign_s = sign_of_life, now
        is_running = sign_of_life is not None and now - wait.sign_s < _PATIENCE_S
        if is_running or read_manifest(self._folder) is not None:
            return
        raise_failure(self._folder)
        waited_s = now - wait.since_s
        if sign_of_life is None and not self._found[1].num_records and waited_s > _SHARED_WITHIN_S:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
        if waited_s > _PATIENCE_S:
            raise DataError(
                f"The preparation of {show_name(self._folder)} has ended before its last tokens. Start it again, or "
                "finish it with owt-data prepare."
            )

    def _refresh(self) -> None:
        """Find the tokens that exist."""
        if self.is_complete:
            return
        if read_manifest(self._folder) is not None:
            name = {"train": TRAIN_NAME, "val": VAL_NAME}[self._split]
            self._found = self._sequence([self._folder / name]), JournalPlace()
            self.is_complete = True
            return
        shards = shard_folder(staging_path(self._folder), "all" if self._is_one_source else self._split)
        tokens, place = self._found
        records, place = read_journal_after(shards, place)
        if not place.num_records and read_manifest(self._folder) is not None:
            return self._refresh()  # complete since the first look, and the journal was deleted
        numbers = range(place.num_records - len(records), place.num_records)
        if not records and numbers.start:
            return
        kept = [tokens] if numbers.start else []  # none of an earlier preparation
        if self._is_one_source and self._split == "train":
            numbers = range(max(1, numbers.start), numbers.stop)
        elif self._is_one_source:
            numbers = range(numbers.start, min(1, numbers.stop))
        new = self._sequence([shard_path(shards, number) for number in numbers])
        self._found = concatenate([*kept, new]), place

    def _sequence(self, paths: list[Path]) -> TokenSequence:
        layout = RAW if self._vocab_size is None else Layout(width_for(self._vocab_size))
        return local_sequence(paths, self._vocab_size, layout)

    def _want(self, stop: int) -> None:
        """Tell the preparation that the tokens before `stop` are needed."""
        num_val_shards = 1 if self._is_one_source else 0
        num_wanted = self._tokens.find_span(stop - 1) + 1 + num_val_shards
        # A reader that waits looks again, because another reader may have written a smaller number after it.
        is_waiting = stop > len(self._tokens)
        if num_wanted > self._num_wanted or (is_waiting and read_num_wanted(self._folder) < num_wanted):
            self._num_wanted = num_wanted
            with contextlib.suppress(FileNotFoundError):  # the folder is complete
                write_file(staging_path(self._folder) / _WANTED_NAME, str(num_wanted))


def read_num_wanted(folder: Path) -> int:
    """Return the number of shards that the readers of a folder need; 2 at first."""
    try:
        text = _read(staging_path(folder) / _WANTED_NAME)
    except FileNotFoundError:
        return 2
    return int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else 2


def note_start(folder: Path) -> None:
    """Note for the readers of a folder that its preparation has started."""
    staging = staging_path(folder)
    (staging / _ERROR_NAME).unlink(missing_ok=True)
    (staging / _RUNNING_NAME).touch()


def note_life(folder: Path) -> None:
    """Note for the readers of a folder that its preparation still runs."""
    with contextlib.suppress(OSError):  # it has ended
        os.utime(staging_path(folder) / _RUNNING_NAME)


def _read_sign_of_life(folder: Path) -> int | None:
    """Return a number that changes while the preparation of a folder runs, or None if it has ended."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (staging_path(folder) / _RUNNING_NAME).stat().st_mtime_ns
    return None


def note_end(folder: Path, error: Exception | None) -> None:
    """Note for the readers of a folder that its preparation has ended, and the error if it has failed.

    The end is noted by deleting a file, which also works on a full disk.
    """
    staging = staging_path(folder)
    with contextlib.suppress(OSError):  # the disk is full, or the folder is complete
        if error is not None:
            text = (
                str(error)
                if isinstance(error, DataError)
                else f"The preparation of {show_name(folder)} has failed: {one_line(repr(error))}."
            )
            write_file(staging / _ERROR_NAME, text)
    with contextlib.suppress(OSError):
        (staging / _RUNNING_NAME).unlink()


def raise_failure(folder: Path) -> None:
    """Raise the error that the preparation of a folder has noted, if any.

    Raises:
        DataError: the error.
    """
    with contextlib.suppress(FileNotFoundError):
        raise DataError(_read(staging_path(folder) / _ERROR_NAME))


def _read(path: Path) -> str:
    with open_regular(path, "r", encoding="utf-8") as file:
        return file.read(_MOST_CHARS)
