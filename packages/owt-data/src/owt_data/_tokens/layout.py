"""Layouts of token files: raw tokens, or those of llm.c and modded-nanogpt behind a header, of 16 or of 32 bits."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from owt_data._errors import DataError, show_name
from owt_data._paths import read_head
from owt_data._tokenizer_names import Width, width_for

MOST_IDS = 1 << 31
"""Largest vocabulary. A model takes ids as int32."""

_HEADER_BYTES = 1024
# By the first of the 256 int32 of a header: the width of the tokens, and the known versions, the second int32. The
# third one is the number of tokens. llm.c writes 32 bits for Llama 3.
_HEADERS: dict[int, tuple[Width, tuple[int, ...]]] = {20240520: ("<u2", (1,)), 20240801: ("<u4", (1, 7))}
_MAGIC = {width: magic for magic, (width, _) in _HEADERS.items()}
_QUESTIONS = 20240522
# The first bytes tell the width of raw tokens. Fewer than the second number are taken for 16 bits.
_HEAD_BYTES, _LEAST_HEAD_BYTES = 4096, 128


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a token file."""

    width: Width = "<u2"
    """numpy type of a token on disk."""

    offset: int = 0
    """Bytes before the first token."""

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """The numpy type of a token."""
        return np.dtype(self.width)

    def __str__(self) -> str:
        """Format the layout for errors."""
        header = "with llm.c's header" if self.offset else "without a header"
        return f"a file of {8 * self.bytes_per_token}-bit tokens {header}"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token."""
        return self.dtype.itemsize

    def place(self, token: int) -> int:
        """Return the byte of the file at which a token begins."""
        return self.offset + token * self.bytes_per_token

    def num_tokens(self, num_bytes: int) -> int:
        """Return the number of complete tokens in a file of a size."""
        return max(0, num_bytes - self.offset) // self.bytes_per_token


RAW = Layout()
"""Raw little-endian uint16."""


def widest(dtypes: Iterable[np.dtype[np.uint16] | np.dtype[np.uint32]]) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the type that holds tokens of all these types; uint16 if there is none."""
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=RAW.dtype)


def find_layout(path: str, size: int, vocab_size: int) -> Layout:
    """Return the layout of a token file without a manifest. Its first bytes are read.

    A header of llm.c gives the width. Without one, tokens have 32 bits if the vocabulary needs them, or if every second
    value of 16 bits is 0.

    Args:
        path: a path or a URI.
        size: bytes of the file.
        vocab_size: number of ids of the tokenizer.

    Raises:
        DataError: the file has another format, or not the size that its header gives, or cannot be read.
    """
    head = read_head(path, min(size, _HEAD_BYTES)) if size else b""
    layout = _behind_header(path, size, head) or _raw(path, head, vocab_size)
    if (size - layout.offset) % layout.bytes_per_token:
        constraint = {2: "an even number of bytes, two per token", 4: "a multiple of four bytes, four per token"}
        raise DataError(f"{show_name(path)} must have {constraint[layout.bytes_per_token]}, got {size}.")
    return layout


def _behind_header(path: str, size: int, head: bytes) -> Layout | None:
    """Return the layout that a header gives, or None if the file does not begin with one."""
    magic, version, num_tokens = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic == _QUESTIONS:
        raise DataError(
            f"{show_name(path)} must hold tokens of text, got llm.c's questions of an evaluation. Name its token files."
        )
    if magic not in _HEADERS:
        return None
    width, versions = _HEADERS[magic]
    if version not in versions:
        raise DataError(
            f"{show_name(path)} must have a header of version {' or '.join(map(str, versions))}, as llm.c and "
            f"modded-nanogpt write it, got version {version}. Copy or make the file again."
        )
    layout = Layout(width, _HEADER_BYTES)
    if size != layout.place(num_tokens) or num_tokens < 0:
        raise DataError(
            f"{show_name(path)} must have {layout.place(max(0, num_tokens))} bytes for the {num_tokens} tokens of its "
            f"header, got {size}. Copy or make the file again."
        )
    if num_tokens == 0:
        raise DataError(f"{show_name(path)} must hold tokens, got a header without any. Copy or make the file again.")
    return layout


def missing_header_error(path: str, other: str, layout: Layout) -> DataError:
    """Return the error for a file without a header beside another one of a layout with a header.

    Raises:
        DataError: the file cannot be read.
    """
    return DataError(
        f"{show_name(path)} must begin with the number {_MAGIC[layout.width]} of llm.c's header, as {show_name(other)} "
        f"does, got {int.from_bytes(read_head(path, 4), 'little')}. Copy it again, or name the files as train=... and "
        "val=...."
    )


def _raw(path: str, head: bytes, vocab_size: int) -> Layout:
    """Return the layout of a file without a header."""
    if head.startswith(b"\x93NUMPY"):
        raise DataError(
            f"{show_name(path)} must hold raw tokens, got a .npy file. Write them with astype('<u2').tofile(...)."
        )
    words = np.frombuffer(head[: len(head) & ~7], "<u2")
    is_long = len(head) >= _LEAST_HEAD_BYTES
    if is_long and not words.reshape(-1, 4)[:, 1:].any():
        raise DataError(
            f"{show_name(path)} must hold tokens of 16 or 32 bits, got values of 64 bits. Write them with "
            "astype('<u4').tofile(...)."
        )
    return Layout("<u4") if is_long and not words[1::2].any() else Layout(width_for(vocab_size))
