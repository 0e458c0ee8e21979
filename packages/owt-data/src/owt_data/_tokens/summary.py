"""Counts and checksum of a token file, collected while its tokens are written or read."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from owt_data._tokens.manifest import FileRecord


class Summary:
    """Running counts of tokens and documents, and the checksum.

    Args:
        end_of_text: the token that ends a document.
    """

    def __init__(self, end_of_text: int) -> None:
        self._end_of_text = end_of_text
        self._digest = hashlib.sha256()
        self._num_tokens = 0
        self._num_ends = 0
        self._last = end_of_text
        self.largest = 0
        """Largest id so far."""

    def add(self, tokens: NDArray[np.uint16]) -> None:
        """Add the next tokens."""
        self._digest.update(tokens.data)
        self._num_tokens += len(tokens)
        self._num_ends += int(np.count_nonzero(tokens == self._end_of_text))
        if len(tokens):
            self._last = int(tokens[-1])
            self.largest = max(self.largest, int(tokens.max()))

    def record(self) -> FileRecord:
        """Return the manifest's record of the tokens so far. A last document without its end counts."""
        return FileRecord(
            num_tokens=self._num_tokens,
            num_documents=self._num_ends + (self._last != self._end_of_text),
            sha256=self._digest.hexdigest(),
        )
