"""Tokenizers: `bytes` and those of tiktoken as its encodings, and those of `tokenizer.json` files."""

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tiktoken
from numpy.typing import NDArray

from owt_data._errors import DataError, show
from owt_data._tokenizer_files import read_tokenizer_file, tokenizer_name
from owt_data._tokenizer_names import is_tokenizer_file, width_for

_END_OF_TEXT = "<|endoftext|>"

# tiktoken's split pattern of gpt2, and a faster one with the same matches. tiktoken's regex library backtracks, but it
# compiles a group without look-around and possessive quantifiers to an automaton. Nothing follows the group, hence its
# greedy matches are the possessive ones.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_FAST_PATTERN = r"""(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$)|\s+(?!\S)|\s"""


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer, as `load_tokenizer` returns it: the methods of a tiktoken encoding that the packages use."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def n_vocab(self) -> int:
        """Number of ids: the largest one and one more."""
        ...

    @property
    def eot_token(self) -> int:
        """Id of the end-of-text token."""
        ...

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of a text, in which the text of a special token is ordinary text."""
        ...

    def decode(self, tokens: Sequence[int], errors: str = "replace") -> str:
        """Return the text of tokens."""
        ...

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the text of tokens."""
        ...

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token."""
        ...

    def is_special_token(self, token: int) -> bool:
        """Return whether an id is that of a special token, such as end-of-text, or of no token."""
        ...


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer by name.

    `bytes` has 257 ids, the 256 bytes and end-of-text, and needs no files. `gpt2` is GPT-2's byte-pair encoding with
    50 257 ids. It and `r50k_base`, `p50k_base`, `cl100k_base` and `o200k_base` are encodings of tiktoken. On first use,
    tiktoken downloads their files or finds them in `TIKTOKEN_CACHE_DIR`. A path is that of a `tokenizer.json` of the
    library tokenizers, or of a folder with one; `PATH::TOKEN` names the end-of-text token.

    Raises:
        DataError: the name is unknown, the download failed, or a file cannot be read.

    >>> load_tokenizer("bytes").encode_ordinary("Hi")
    [72, 105]
    """
    name = tokenizer_name(name)
    if is_tokenizer_file(name):
        from owt_data._json_tokenizer import JsonTokenizer  # the library is not needed otherwise

        return JsonTokenizer(name, read_tokenizer_file(name))
    return _bytes_tokenizer() if name == "bytes" else _encoding(name)


def load_fast_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer that encodes as `load_tokenizer`'s does, `gpt2` in about 0.6 of the time.

    Only for encoding: its digest is another one.

    Raises:
        DataError: as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(name)
    return _faster(tokenizer) if isinstance(tokenizer, tiktoken.Encoding) else tokenizer


def _encoding(name: str) -> tiktoken.Encoding:
    try:
        return _with_every_id(tiktoken.get_encoding(name))
    # `requests` raises OSErrors. The download of another file, such as a login page, is a ValueError.
    except (OSError, ValueError) as error:
        raise DataError(
            f"The files of tokenizer {show(name)} could not be downloaded: {type(error).__name__}. Connect to the "
            "network, set TIKTOKEN_CACHE_DIR to a folder that has them, or prepare text with the tokenizer bytes."
        ) from error


@functools.cache
def _with_every_id(plain: tiktoken.Encoding) -> tiktoken.Encoding:
    """Return an encoding that can decode every id: a model may draw those that `cl100k_base` leaves unused."""
    unused = set(range(plain.n_vocab)) - set(plain._mergeable_ranks.values()) - set(plain._special_tokens.values())
    if not unused:
        return plain
    return tiktoken.Encoding(
        plain.name,
        pat_str=plain._pat_str,
        mergeable_ranks=plain._mergeable_ranks,
        special_tokens={**plain._special_tokens, **{f"<|unused_{number}|>": number for number in sorted(unused)}},
    )


@functools.cache
def _bytes_tokenizer() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s:.+)",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={_END_OF_TEXT: 256},
    )


@functools.cache
def _faster(plain: tiktoken.Encoding) -> tiktoken.Encoding:
    if plain._pat_str != _PATTERN:  # `bytes`, or another version of tiktoken
        return plain
    return tiktoken.Encoding(
        plain.name, pat_str=_FAST_PATTERN, mergeable_ranks=plain._mergeable_ranks, special_tokens=plain._special_tokens
    )


def encode_pieces(pieces: Iterable[tuple[str, bool, bool]], tokenizer: Tokenizer) -> NDArray[np.integer]:
    """Return the tokens of pieces of text, one after the other, in the width that `prepare` writes.

    Args:
        pieces: at least one piece: its text, whether an end-of-text token precedes it, and whether one follows it. The
            text of a special token is ordinary text.
        tokenizer: the encoding.
    """
    end_of_text = np.array([tokenizer.eot_token], dtype=np.uint32)
    is_bytes = tokenizer.name == "bytes"  # tiktoken takes one text for one word, in more than linear time
    tokens = []
    for text, starts, ends in pieces:
        if starts:
            tokens.append(end_of_text)
        if is_bytes:
            tokens.append(np.frombuffer(text.encode(), np.uint8))
        elif isinstance(tokenizer, tiktoken.Encoding):
            tokens.append(tokenizer.encode_to_numpy(text, allowed_special=set(), disallowed_special=()))
        else:
            tokens.append(np.array(tokenizer.encode_ordinary(text), np.uint32))
        if ends:
            tokens.append(end_of_text)
    return np.concatenate(tokens).astype(width_for(tokenizer.n_vocab))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer: of its pieces in order of their ids, or of its `tokenizer.json`.

    Equal digests mean equal encodings.
    """
    if not isinstance(tokenizer, tiktoken.Encoding):
        return read_tokenizer_file(tokenizer.name).sha256
    digest = hashlib.sha256()
    for token_id in range(tokenizer.n_vocab):
        piece = tokenizer.decode_single_token_bytes(token_id)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    digest.update(tokenizer._pat_str.encode())
    return digest.hexdigest()
