"""Tokenizers `gpt2` and `bytes`, as tiktoken encodings."""

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
import tiktoken
from numpy.typing import NDArray

from owt_data._errors import DataError, show

_END_OF_TEXT = "<|endoftext|>"
_VOCAB_SIZES = {"bytes": 257, "gpt2": 50_257}

# tiktoken's split pattern of gpt2, and a faster one with the same matches. tiktoken's regex library backtracks, but it
# compiles a group without look-around and possessive quantifiers to an automaton. Nothing follows the group, hence its
# greedy matches are the possessive ones.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_FAST_PATTERN = r"""(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$)|\s+(?!\S)|\s"""


def vocab_size(name: str) -> int:
    """Return the number of ids of a tokenizer. Needs no tokenizer files.

    Raises:
        DataError: the name is unknown.
    """
    if not isinstance(name, str) or name not in _VOCAB_SIZES:
        raise DataError(f"The tokenizer must be {' or '.join(_VOCAB_SIZES)}, got {show(name)}.")
    return _VOCAB_SIZES[name]


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Load a tokenizer by name.

    `gpt2` is GPT-2's byte-pair encoding with 50 257 ids. On first use, tiktoken downloads its two files or finds them
    in `TIKTOKEN_CACHE_DIR`. `bytes` has 257 ids, the 256 bytes and end-of-text, and needs no files.

    Raises:
        DataError: the name is unknown, or the download failed.

    >>> load_tokenizer("bytes").encode_ordinary("Hi")
    [72, 105]
    """
    vocab_size(name)
    if name == "bytes":
        return _bytes_tokenizer()
    try:
        return tiktoken.get_encoding(name)
    # `requests` raises OSErrors. The download of another file, such as a login page, is a ValueError.
    except (OSError, ValueError) as error:
        raise DataError(
            f"The files of tokenizer {show(name)} could not be downloaded: {type(error).__name__}. Connect to the "
            "network, set TIKTOKEN_CACHE_DIR to a folder that has them, or prepare text with the tokenizer bytes."
        ) from error


def load_fast_tokenizer(name: str) -> tiktoken.Encoding:
    """Load a tokenizer that encodes as `load_tokenizer`'s does, `gpt2` in about 0.6 of the time.

    Only for encoding: its digest is another one.

    Raises:
        DataError: as `load_tokenizer`.
    """
    return _faster(load_tokenizer(name))


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


def encode_pieces(pieces: Iterable[tuple[str, bool, bool]], tokenizer: tiktoken.Encoding) -> NDArray[np.uint16]:
    """Return the tokens of pieces of text, one after the other.

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
        else:
            tokens.append(tokenizer.encode_to_numpy(text, allowed_special=set(), disallowed_special=()))
        if ends:
            tokens.append(end_of_text)
    return np.concatenate(tokens).astype("<u2")


def tokenizer_digest(tokenizer: tiktoken.Encoding) -> str:
    """Return the SHA-256 of a tokenizer's pieces in order of their ids. Equal digests mean equal encodings."""
    digest = hashlib.sha256()
    for token_id in range(tokenizer.n_vocab):
        piece = tokenizer.decode_single_token_bytes(token_id)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    digest.update(tokenizer._pat_str.encode())
    return digest.hexdigest()
