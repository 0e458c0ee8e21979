"""Inspection of token files: counts, and decoded samples."""

import os
from dataclasses import dataclass

from owt_data._errors import DataError, check_integer, show_name
from owt_data._paths import normalize
from owt_data._tokenizers import load_tokenizer
from owt_data._tokens.manifest import Manifest, read_manifest
from owt_data._tokens.open import open_tokens
from owt_data._tokens.sequence import TokenSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Counts and samples of token files."""

    tokenizer: str
    """Name of the tokenizer."""

    vocab_size: int
    """Number of token ids."""

    num_tokens: dict[str, int]
    """Number of tokens by split, `train` and `val`."""

    num_bytes: dict[str, int]
    """Bytes of the tokens by split."""

    samples: dict[str, dict[str, str]]
    """Text of three windows, by split and by `first`, `middle` or `last`."""

    manifest: Manifest | None
    """The manifest, or None."""


def inspect(name: str | os.PathLike[str], *, tokenizer: str = "gpt2", window_tokens: int = 64) -> Inspection:
    """Count the tokens of token files and decode samples.

    Args:
        name: a folder of token files, or a `.bin` file, on disk or in object storage.
        tokenizer: tokenizer of files without a manifest; see `load_tokenizer`.
        window_tokens: length of a sample.

    Raises:
        DataError: as `open_tokens`, there are no training tokens, or `window_tokens` is not positive.
    """
    window_tokens = check_integer("window_tokens", window_tokens, least=1)
    name = normalize(name)
    data = open_tokens(name, tokenizer=tokenizer)
    if not len(data.train):
        raise DataError(f"{show_name(name)} must have training tokens, got 0. Copy it again, or prepare more text.")
    encoding = load_tokenizer(data.tokenizer)
    samples, num_bytes = {}, {}
    for split, tokens in (("train", data.train), ("val", data.val)):
        assert isinstance(tokens, TokenSequence), "one name gives a sequence"
        last = max(0, len(tokens) - window_tokens)
        samples[split] = {}
        num_bytes[split] = sum(len(span) * span.layout.bytes_per_token for span in tokens.spans)
        for place, start in (("first", 0), ("middle", last // 2), ("last", last)):
            window = tokens.read(start, min(start + window_tokens, len(tokens)))
            samples[split][place] = encoding.decode(window.tolist())
    return Inspection(
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size,
        num_tokens={"train": len(data.train), "val": len(data.val)},
        num_bytes=num_bytes,
        samples=samples,
        manifest=None if name.endswith(".bin") else read_manifest(name),
    )
