"""Names of tokenizers, and facts about those that need no files. Cheap to import, for command lines."""

from typing import Literal, NamedTuple

TokenizerName = Literal["bytes", "gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"]
Width = Literal["<u2", "<u4"]
"""numpy type of a token on disk."""


class _Vocabulary(NamedTuple):
    vocab_size: int
    end_of_text: int


VOCABULARIES = {
    "bytes": _Vocabulary(257, 256),
    "gpt2": _Vocabulary(50_257, 50_256),
    "r50k_base": _Vocabulary(50_257, 50_256),
    "p50k_base": _Vocabulary(50_281, 50_256),
    "cl100k_base": _Vocabulary(100_277, 100_257),
    "o200k_base": _Vocabulary(200_019, 199_999),
}
"""Number of ids, and the id of the end-of-text token, of each tokenizer of `TokenizerName`."""


def is_tokenizer_file(name: str) -> bool:
    """Return whether a tokenizer is a `tokenizer.json`, and not one of `TokenizerName`."""
    return name not in VOCABULARIES


def width_for(vocab_size: int) -> Width:
    """Return the width of the tokens of a vocabulary: 16 bits up to 65 536 ids, else 32 bits.

    >>> width_for(50_257), width_for(65_536), width_for(65_537)
    ('<u2', '<u2', '<u4')
    """
    return "<u2" if vocab_size <= 1 << 16 else "<u4"
