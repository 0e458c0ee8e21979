"""Tokenizers in the files of Hugging Face's `tokenizers` and `transformers`."""

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from owt_data._tokenizer_files import read_tokenizer_file, tokenizer_name
from owt_data._tokenizer_names import is_tokenizer_file
from owt_data._tokenizers import load_tokenizer


def tokenizer_files(name: str, *, max_tokens: int) -> dict[str, str]:
    """Return the files from which `transformers` makes a tokenizer, as texts by their names.

    They are `tokenizer.json` and `tokenizer_config.json`. The ids are those of `load_tokenizer`, but the text of the
    end-of-text token becomes that token, as in every tokenizer of `transformers`.

    Args:
        name: the tokenizer.
        max_tokens: the context length of the model, in tokens.

    Raises:
        DataError: the name is unknown, or the files of the tokenizer cannot be downloaded.
    """
    serialized, end_of_text = _serialize(name)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "model_max_length": max_tokens,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": serialized,
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def _serialize(name: str) -> tuple[str, str]:
    """Return the text of `tokenizer.json`, and the text of the end-of-text token."""
    name = tokenizer_name(name)
    if is_tokenizer_file(name):
        file = read_tokenizer_file(name)
        return file.content.decode(), file.end_of_text
    tokenizer = load_tokenizer(name)
    assert isinstance(tokenizer, tiktoken.Encoding)  # as all named ones
    text = json.dumps(_as_object(tokenizer), ensure_ascii=False, indent=1) + "\n"
    return text, tokenizer.decode([tokenizer.eot_token])


def _as_object(tokenizer: tiktoken.Encoding) -> dict[str, Any]:
    ranks, special = tokenizer._mergeable_ranks, tokenizer._special_tokens
    characters = _byte_characters()

    def as_text(piece: bytes) -> str:
        return "".join(map(characters.__getitem__, piece))

    pieces = sorted(ranks, key=ranks.__getitem__)
    splits = [(piece, _parts(piece, ranks)) for piece in pieces if len(piece) > 1]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, token_id in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        # Words matter to merges alone.
        "pre_tokenizer": _pre_tokenizer(tokenizer._pat_str) if splits else _byte_level(),
        "post_processor": _byte_level(trim_offsets=False),
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # tiktoken also finds a token that no merges lead to, if it is a complete word.
            "ignore_merges": any(len(parts) > 2 for _, parts in splits),
            "vocab": {as_text(piece): ranks[piece] for piece in pieces} | special,
            "merges": [" ".join(map(as_text, parts)) for _, parts in splits if len(parts) == 2],
        },
    }


def _parts(piece: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return the tokens that the merges before a token make of its bytes: two, if the token is the merge of them.

    tiktoken merges any two neighbors whose bytes are a token, the lowest rank first. When it makes this token, no merge
    of a lower rank is left, within its bytes or around them. The neighbors are then these two.
    """
    parts = [piece[i : i + 1] for i in range(len(piece))]
    rank = ranks[piece]
    while len(parts) > 2:
        lowest, at = min((ranks.get(one + other, rank), i) for i, (one, other) in enumerate(pairwise(parts)))
        if lowest >= rank:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_characters() -> list[str]:
    """Return the character of each byte in a byte-level vocabulary: its own if it is visible, or one above 255."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    if pattern == r50k_pat_str:
        return _byte_level()  # the same words, by an expression that all readers of such files know
    # The expressions of `tokenizers` have no possessive `{1,3}+`, and their `$` also matches before a line break. In
    # tiktoken's patterns no match depends on what a possessive quantifier gives back.
    pattern = re.sub(r"(?<!\\)([+*?}])\+", r"\1", pattern).replace("$", r"\z")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _byte_level(**changes: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True} | changes
