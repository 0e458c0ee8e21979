"""Tokenizer of a `tokenizer.json`, by the library tokenizers, with the methods of a tiktoken encoding."""

import os
from collections.abc import Sequence
from functools import cached_property

# `prepare` has a process for each core, and a fork after the use of threads prints a warning. Set before the import.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

from owt_data._errors import DataError, one_line, show_name
from owt_data._tokenizer_files import TokenizerFile

# Where sentencepiece has a blank.
_BLANK = "\u2581"


class JsonTokenizer:
    """Tokenizer of a `tokenizer.json`.

    Args:
        name: its name.
        file: its file.

    Raises:
        DataError: the library rejects the file.
    """

    def __init__(self, name: str, file: TokenizerFile) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file.content)
        # The library raises bare Exceptions.
        except Exception as error:
            raise DataError(
                f"{show_name(name)} must be a file that tokenizers {tokenizers.__version__} reads, got an error: "
                f"{one_line(error)}. Name a file that it has written."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # The text of a special token is ordinary text.
        self._tokenizer.encode_special_tokens = True
        self._file = file
        self.name = name
        """The name."""
        self.n_vocab = file.vocab_size
        """Number of ids."""
        self.eot_token = file.ids[file.end_of_text]
        """Id of the end-of-text token."""

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of a text, in which the text of a special token is ordinary text."""
        # Unlike `encode`, it keeps no offsets, which take more memory than the text.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, tokens: Sequence[int], errors: str = "replace") -> str:
        """Return the text of tokens. Bytes that are not UTF-8 are handled as `bytes.decode` does."""
        return self.decode_bytes(tokens).decode("utf-8", errors=errors)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens, one after the other.

        With `ByteLevel`, they are those of the text. Another tokenizer may have changed the text before: a blank that
        it has put before the first word, for instance, stays.
        """
        return b"".join(map(self._pieces.__getitem__, tokens))

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that no token has."""
        return self._pieces[token]

    def is_special_token(self, token: int) -> bool:
        """Return whether an id is that of a special token, or of no token."""
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._file.description.get("added_tokens") or []
        special = {token["id"] for token in added if token.get("special")}
        unused = set(range(self.n_vocab)) - set(self._file.ids.values())
        return frozenset({self.eot_token, *special, *unused})

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The bytes of each token."""
        description, pieces = self._file.description, [b""] * self.n_vocab
        parts = f"{description.get('pre_tokenizer')}{description.get('decoder')}"
        to_bytes = _byte_level_bytes if "'ByteLevel'" in parts else _sentence_piece_bytes
        for piece, token in self._file.ids.items():
            pieces[token] = to_bytes(piece)
        for token in description.get("added_tokens") or []:
            pieces[token["id"]] = token["content"].encode()
        return pieces


def _byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a piece in which each byte is one printable character."""
    found = [_BYTES.get(character) for character in piece]
    return piece.encode() if None in found else bytes(byte for byte in found if byte is not None)


def _sentence_piece_bytes(piece: str) -> bytes:
    """Return the bytes of a piece of sentencepiece, of which `<0x0A>` is one byte."""
    if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(_BLANK, " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of `ByteLevel` stands for: printable ones for themselves, others from 256 on.

    This is the table of GPT-2's `encoder.py`.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
