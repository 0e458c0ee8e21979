"""The sources of validation tokens, such as the names of a mixture: which one each predicted token is of."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_WINDOWS = 16
"""Windows of each source, at least, in a validation on a part of the tokens, if the part has as many."""


class ValidationSources:
    """Sources whose tokens follow each other. A source may have several ranges of the tokens.

    Args:
        spans: name and number of tokens of each range, in the order of the tokens; none for tokens of one source.
    """

    def __init__(self, spans: Sequence[tuple[str, int]]) -> None:
        self.names = tuple(dict.fromkeys(name for name, _ in spans))
        """Name of each source."""
        self._bounds = np.cumsum([0, *(length for _, length in spans)])
        self._of_span = np.array([self.names.index(name) for name, _ in spans], np.int64)

    def of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the source of each token, by its position, in the same shape."""
        return self._of_span[np.searchsorted(self._bounds, positions, side="right") - 1]

    def more_windows(self, indices: NDArray[np.int64], num_windows: int, seq_len: int) -> NDArray[np.int64]:
        """Return windows that a part of all windows needs, so that each source has some of its own.

        A source has as many as `LEAST_WINDOWS`, as the part, or as there are, whichever is the least; spread evenly
        over its tokens.

        Args:
            indices: the part: indices of windows, ascending.
            num_windows: number of all windows, which follow each other.
            seq_len: inputs per window.
        """
        more = [np.empty(0, np.int64)]
        for number in range(len(self.names)):
            ranges = [
                self._windows(span, num_windows, seq_len) for span in np.flatnonzero(self._of_span == number).tolist()
            ]
            own = np.unique(np.concatenate(ranges))
            count = min(LEAST_WINDOWS, len(indices), len(own))
            if np.isin(own, indices).sum() < count:
                more.append(np.setdiff1d(own[np.arange(count) * len(own) // count], indices))
        return np.unique(np.concatenate(more))

    def _windows(self, span: int, num_windows: int, seq_len: int) -> NDArray[np.int64]:
        """Return the windows whose targets are all in a range; for a shorter one, that which has its first target."""
        start, stop = max(1, int(self._bounds[span])), int(self._bounds[span + 1])
        own = np.arange(-(-(start - 1) // seq_len), min(num_windows, (stop - 1) // seq_len))
        first = (start - 1) // seq_len
        return own if len(own) or start >= stop or first >= num_windows else np.array([first])
