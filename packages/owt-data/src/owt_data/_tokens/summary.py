"""Counts and checksum of a token file, collected while its tokens are written or read."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from owt_data._paths import TRAIN_NAME, VAL_NAME
from owt_data._tokens.manifest import FileRecord, SplitKind

CONTINUING: dict[SplitKind, str] = {"position": VAL_NAME, "start": TRAIN_NAME}
"""By split, the file that may begin inside a document."""


def summary_of(name: str, documents: str, split: SplitKind, end_of_text: int) -> "Summary":
    """Return an empty summary of a token file.

    Args:
        name: `train.bin` or `val.bin`.
        documents: the kind of documents; see `PrepareOptions`.
        split: how the text was split.
        end_of_text: the token that ends a document, or begins it.
    """
    begins = documents == "wikitext-titles"
    return Summary(end_of_text, begins=begins, continues=CONTINUING.get(split) == name)


class Summary:
    """Running counts of tokens and documents, and the checksum.

    Args:
        end_of_text: the token that ends a document, or begins it.
        begins: whether the token begins a document.
        continues: whether the file may begin inside a document whose start is in another file.
    """

    def __init__(self, end_of_text: int, *, begins: bool, continues: bool) -> None:
        self._end_of_text = end_of_text
        self._begins = begins
        self._continues = continues
        self._digest = hashlib.sha256()
        self._num_tokens = 0
        self._num_ends = 0
        self._first = self._last = end_of_text
        self.largest = 0
        """Largest id so far."""

    def add(self, tokens: NDArray[np.integer]) -> None:
        """Add the next tokens."""
        self._digest.update(tokens.data)
        self._num_ends += int(np.count_nonzero(tokens == self._end_of_text))
        if len(tokens):
            self._first = self._first if self._num_tokens else int(tokens[0])
            self._last = int(tokens[-1])
            self.largest = max(self.largest, int(tokens.max()))
        self._num_tokens += len(tokens)

    def record(self) -> FileRecord:
        """Return the manifest's record of the tokens so far. A document without its end-of-text token counts."""
        if self._begins:
            # Text before the first title belongs to the first document, unless it continues another file.
            continued = self._continues and self._first != self._end_of_text
            num_documents = max(self._num_ends + continued, min(1, self._num_tokens))
        else:
            num_documents = self._num_ends + (self._last != self._end_of_text)
        return FileRecord(
            num_tokens=self._num_tokens,
            num_documents=num_documents,
            sha256=self._digest.hexdigest(),
        )
