"""Token files opened for reading."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import DataError
from owt_data._manifest import TRAIN_NAME, VAL_NAME, Manifest, read_manifest
from owt_data._tokenizers import load_tokenizer

# Validation's share of a single token file, taken from its end.
_VAL_FRACTION = 0.1
_BYTES_PER_TOKEN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one file. Holds no open file, so it travels between processes."""

    path: Path
    """The file: raw little-endian uint16."""

    start: int
    """First token."""

    stop: int
    """One past the last token."""

    def __len__(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def read(self) -> NDArray[np.uint16]:
        """The tokens, mapped from the file, which is read only where they are looked at."""
        whole = np.memmap(self.path, dtype="<u2", mode="r")
        return whole[self.start : self.stop]

    def read_windows(self, starts: NDArray[np.int64], seq_len: int) -> NDArray[np.uint16]:
        """The windows that begin at `starts` (`int64[N]`), as `uint16[N, seq_len + 1]`."""
        tokens = self.read()
        windows = np.empty((len(starts), seq_len + 1), dtype=np.uint16)
        for row, start in enumerate(starts.tolist()):
            windows[row] = tokens[start : start + seq_len + 1]
        return windows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenData:
    """Tokens to train on, tokens to validate on, and what identifies them."""

    train: TokenSpan
    """Training tokens."""

    val: TokenSpan
    """Validation tokens."""

    tokenizer: str
    """Name of the tokenizer that wrote them."""

    vocab_size: int
    """Number of ids; every token is below it."""

    fingerprint: dict[str, Any]
    """Equal for equal tokens under an equal tokenizer: what a checkpoint remembers of the data."""


def is_prepared(name: str) -> bool:
    """Whether a data path names token files, rather than text that is yet to be prepared."""
    path = Path(name).expanduser()
    return path.suffix == ".bin" or (path.is_dir() and (path / TRAIN_NAME).exists())


def open_tokens(name: str, *, tokenizer: str) -> TokenData:
    """Open a folder of token files, or one token file, which is split 90/10 by position.

    With a manifest, sizes are checked against it and its checksums identify the data. Without one, the
    files are read through once, to identify them and to check that every id is in the vocabulary.

    Args:
        name: a folder with `train.bin` and `val.bin`, or a `.bin` file.
        tokenizer: what wrote the tokens, where no manifest says so.

    Raises:
        DataError: a file is missing, truncated, or holds ids outside the vocabulary.
    """
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        train, val = _whole_file(path / TRAIN_NAME), _whole_file(path / VAL_NAME)
        manifest = read_manifest(path)
        if manifest is not None:
            return _from_manifest(manifest, train, val)
        digests = {span.path.name: _scan(span, tokenizer) for span in (train, val)}
    else:
        whole = _whole_file(path)
        boundary = round(len(whole) * (1 - _VAL_FRACTION))
        train = TokenSpan(path=path, start=0, stop=boundary)
        val = TokenSpan(path=path, start=boundary, stop=len(whole))
        digests = {"split": boundary, "whole": _scan(whole, tokenizer)}
    return TokenData(
        train=train,
        val=val,
        tokenizer=tokenizer,
        vocab_size=load_tokenizer(tokenizer).n_vocab,
        fingerprint={"tokenizer": tokenizer, **digests},
    )


def _whole_file(path: Path) -> TokenSpan:
    if not path.exists():
        raise DataError(f"expected the token file {path}, which does not exist: check the path, or prepare the text")
    size = os.path.getsize(path)
    if size % _BYTES_PER_TOKEN:
        raise DataError(
            f"expected an even number of bytes in {path}, two per token, got {size}: it is truncated or no token "
            "file, write it again"
        )
    return TokenSpan(path=path, start=0, stop=size // _BYTES_PER_TOKEN)


def _from_manifest(manifest: Manifest, train: TokenSpan, val: TokenSpan) -> TokenData:
    for span in (train, val):
        expected = manifest.files[span.path.name].num_tokens
        if len(span) != expected:
            raise DataError(
                f"expected {expected} tokens in {span.path}, as its manifest says, found {len(span)}: prepare it again"
            )
    return TokenData(
        train=train,
        val=val,
        tokenizer=manifest.tokenizer,
        vocab_size=manifest.vocab_size,
        fingerprint={
            "tokenizer": manifest.tokenizer,
            **{name: record.sha256 for name, record in manifest.files.items()},
        },
    )


def _scan(span: TokenSpan, tokenizer: str) -> str:
    """SHA-256 of a file without a manifest, whose ids are checked on the way."""
    vocab_size = load_tokenizer(tokenizer).n_vocab
    tokens, digest = span.read() if len(span) else np.empty(0, np.uint16), hashlib.sha256()
    for start in range(0, len(tokens), 1 << 24):
        chunk = tokens[start : start + (1 << 24)]
        largest = int(chunk.max())
        if largest >= vocab_size:
            raise DataError(
                f"expected ids below {vocab_size} in {span.path}, the vocabulary of the tokenizer {tokenizer}, found "
                f"{largest}: name the tokenizer that wrote the file with --tokenizer"
            )
        digest.update(chunk.tobytes())
    return digest.hexdigest()
