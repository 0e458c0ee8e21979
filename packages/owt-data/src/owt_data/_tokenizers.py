"""The tokenizers that token files are written with. Both are tiktoken encodings."""

import hashlib

import tiktoken

from owt_data._errors import DataError

END_OF_TEXT = "<|endoftext|>"
_VOCAB_SIZES = {"bytes": 257, "gpt2": 50_257}


def vocab_size(name: str) -> int:
    """Number of ids of a tokenizer, known without its files.

    Raises:
        DataError: the name is unknown.
    """
    if name not in _VOCAB_SIZES:
        raise DataError(f"The tokenizer must be {' or '.join(_VOCAB_SIZES)}, got {name!r}. Choose one.")
    return _VOCAB_SIZES[name]


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokenizer of that name.

    `gpt2` is GPT-2's byte-pair encoding, 50 257 ids, whose two files tiktoken downloads on first use
    (or finds in `TIKTOKEN_CACHE_DIR`). `bytes` is the 256 bytes and end-of-text, 257 ids, and needs
    nothing.

    Raises:
        DataError: the name is unknown, or the download failed.

    >>> load_tokenizer("bytes").encode_ordinary("Hi")
    [72, 105]
    """
    vocab_size(name)
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"(?s:.+)",
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    try:
        return tiktoken.get_encoding(name)
    # The errors of requests are OSErrors; a download of something else, as behind a login page, is a ValueError.
    except (OSError, ValueError) as error:
        raise DataError(
            f"the files of tokenizer {name!r} could not be downloaded ({type(error).__name__}). Connect to the network "
            "once, or set TIKTOKEN_CACHE_DIR to a folder that has them. Text may be prepared with the tokenizer bytes, "
            "which needs no files."
        ) from error


def tokenizer_digest(tokenizer: tiktoken.Encoding) -> str:
    """SHA-256 of the tokenizer's pieces in order of their ids: equal where two tokenizers encode alike."""
    digest = hashlib.sha256()
    for token in tokenizer.token_byte_values():
        digest.update(len(token).to_bytes(4, "little") + token)
    digest.update(tokenizer._pat_str.encode())
    return digest.hexdigest()
