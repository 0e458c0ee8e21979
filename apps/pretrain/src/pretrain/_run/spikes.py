"""Spikes of the training loss: steps whose loss is far above that of the steps before."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

TRAILING = 100
"""The number of losses before a step that its score depends on. Skipped steps have none."""

FEWEST = 50
"""Losses before the first step that has a score."""

THRESHOLD = 10.0
"""The score from which a step is a spike. `benchmarks/results/blame.md` has the false alarms of normal runs."""

# The median of the absolute values of a centered normal distribution, times this number, is its standard deviation. The
# difference of two such numbers has the square root of 2 times their deviation.
_DEVIATIONS = 1.4826 / math.sqrt(2)
# A deviation below this share of the median is noise of rounding, as in a run whose loss does not change.
_LEAST_DEVIATION = 1e-3
_ROWS_AT_ONCE = 4096


class Spike(NamedTuple):
    """A step whose loss is a spike."""

    step: int
    """The step."""

    score: float
    """Its distance from the median of the losses before it, in deviations of their noise: see `spike_scores`."""


def spike_scores(losses: Sequence[float] | NDArray[np.float32], *, first: int = 0) -> NDArray[np.float64]:
    """Return the robust z-score of each loss: its distance from the median of the `TRAILING` losses before it.

    The unit is the standard deviation of the noise of these losses, as the median of the absolute differences between
    two in a row shows it (von Neumann et al., 1941, doi:10.1214/aoms/1177731746, with medians): the fall of the losses
    in the course of the training does not count. A loss that falls has a negative score.

    Args:
        losses: the loss of each step, in nats per token; not finite for a step without a loss.
        first: the index of the first score to compute. The losses before it are those that the scores depend on.

    Returns:
        `float64[N - first]`. NaN for a step without a loss, and with fewer than `FEWEST` losses before it.
    """
    values = np.asarray(losses, np.float64)
    is_loss = np.isfinite(values)
    found = np.full(len(values), np.nan)
    found[is_loss] = _scores(values[is_loss], int(is_loss[:first].sum()))
    return found[first:]


def _scores(values: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    found = np.full(len(values), np.nan)
    for index in range(max(first, FEWEST), min(TRAILING, len(values))):
        found[index] = _deviations(values[None, :index], values[index : index + 1])[0]
    for start in range(max(first, TRAILING), len(values), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, len(values))
        before = sliding_window_view(values[start - TRAILING : stop - 1], TRAILING)
        found[start:stop] = _deviations(before, values[start:stop])
    return found


def _deviations(before: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each value from the median of its row, in deviations of the row."""
    medians = np.median(before, axis=1)
    deviations = _DEVIATIONS * np.median(np.abs(np.diff(before, axis=1)), axis=1)
    return (values - medians) / np.maximum(deviations, _LEAST_DEVIATION * np.abs(medians))


def largest_spike(losses: Sequence[float] | NDArray[np.float32]) -> Spike | None:
    """Return the spike with the largest score among the losses of the steps 1, 2, ..., or None if there is none."""
    scores = np.nan_to_num(spike_scores(losses), nan=-np.inf)
    if not len(scores) or scores.max() < THRESHOLD:
        return None
    return Spike(step=int(scores.argmax()) + 1, score=float(scores.max()))
