"""The curves of a run: points, smoothed lines, and the range of an axis."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pretrain._run.metrics import Record

Array = NDArray[np.float64]

_FEW = 20  # A curve of at most so many points is not smoothed.
_SMOOTHED_SHARE = 0.01  # An average takes this share of the points to either side.
_EARLY_SHARE = 0.04  # Values in this share of the steps, and the first two, may be cut off.
_FEWEST = 12  # An axis shows all values if they are fewer.
_SMALLEST = 1e-300  # Smaller values count as 0: quotients of their differences overflow.
_HEADROOM = 1.2  # An axis is longer than the range of the later values by this factor.


def points(records: Iterable[Record], name: str) -> tuple[Array, Array]:
    """Return the steps and the values of a metric, from the records that have it.

    Args:
        records: the records.
        name: name of the metric.
    """
    found = [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
    steps, values = np.asarray(found, np.float64).reshape(-1, 2).T
    return steps, np.where(np.abs(values) < _SMALLEST, 0.0, values)


def smooth(values: Array) -> Array:
    """Return the values smoothed by three centered moving averages, about a Gaussian. A few values stay as they are.

    The averages are short at the beginning, where a loss falls steeply, and at the end, so that the line ends near the
    last value.
    """
    if len(values) <= _FEW:
        return values
    places, longest = np.arange(len(values)), max(2, round(_SMOOTHED_SHARE * len(values)))
    reach = np.minimum(np.minimum(places // 4, longest), np.maximum(places[::-1], longest // 3))
    first, end = places - reach, np.minimum(places + reach + 1, len(values))
    for _ in range(3):
        sums = np.concatenate([[0.0], np.cumsum(values)])
        values = (sums[end] - sums[first]) / (end - first)
    return values


def robust_range(curves: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """Return the lowest and the highest value of an axis on which the first losses do not squeeze the others.

    The highest value of a few early steps, or of a few outliers, is above the range if it would be far above the rest.

    >>> x = np.arange(100.0)
    >>> low, high = robust_range([(x, np.where(x == 0, 11.0, 3.0 - x / 100))])
    >>> round(low, 2), round(high, 2)
    (1.96, 3.19)

    Args:
        curves: positions and values of each curve, at least one point in all.
    """
    everything = np.concatenate([y for _, y in curves])
    end = max(x[-1] for x, _ in curves if len(x))
    later = [y[2:][x[2:] > _EARLY_SHARE * end] for x, y in curves]
    low, highest = float(everything.min()), float(everything.max())
    high = max((float(np.quantile(y, 0.995)) for y in later if len(y)), default=highest)
    high = low + _HEADROOM * (high - low)
    if len(everything) < _FEWEST or highest <= low + 1.5 * (high - low):
        high = highest
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move labels apart along a line, and keep their order.

    >>> spread([10.0, 11.0, 30.0], gap=4.0)
    [8.5, 12.5, 30.0]

    Args:
        positions: where the labels belong.
        gap: least distance of two labels.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _start(groups[-1], positions, gap) < _start(groups[-2], positions, gap) + gap * len(
            groups[-2]
        ):
            last = groups.pop()
            groups[-1] += last
    moved = [0.0] * len(positions)
    for group in groups:
        for place, index in enumerate(group):
            moved[index] = _start(group, positions, gap) + place * gap
    return moved


def _start(group: list[int], positions: Sequence[float], gap: float) -> float:
    return sum(positions[index] for index in group) / len(group) - gap * (len(group) - 1) / 2
