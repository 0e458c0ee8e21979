"""The difference of two runs, with intervals that say what they cover. No function reads a file.

Two runs of one seed read the same windows at each step, so the noise of the batches cancels in the difference of their
losses. What stays is the noise of the training: the parameters of two runs that differ in nothing but the keys of
dropout part in the first steps, and stay apart. The difference of their losses is then a level of its own for each
pair, which hardly moves within some hundred steps. Blocks of these steps do not show it: the interval of batch means,
or of Newey and West, is several times too narrow (`benchmarks/results/compare.md`). It is right for the two trained
models, and wrong for their options. Therefore there are three intervals:

- `of_options` covers the noise of the training. It takes all steps of one pair.
- `of_models` covers other text of the same kind. It holds for these two models.
- `over_seeds` covers other seeds. It takes several pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Confidence of every interval."""

RECENT = 0.25
"""The share of the steps, the last ones, whose mean loss is compared."""

MIN_STEPS = 40
"""The fewest steps that can be compared."""

_BLOCKS_OF_STEPS = 12
_BLOCKS_OF_RECENT = 8
_MOST_BLOCKS_OF_TEXT = 32
# Means of a random walk over neighbouring blocks of equal length L have increments of variance 2L/3 and covariance L/6.
_OVERLAP = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its interval, at `LEVEL`."""

    mean: float
    """The estimate, in nats per token."""

    half_width: float
    """Half the width of the interval, in nats per token."""

    df: int
    """Degrees of freedom of the quantile of Student's t."""

    @property
    def is_different(self) -> bool:
        """True if zero is outside of the interval."""
        return abs(self.mean) > self.half_width


@cache
def t_quantile(df: int, level: float = LEVEL) -> float:
    """Return the quantile x of Student's t with P(|T| < x) = level.

    T = sqrt(df) tan(a), and the density of the angle a is proportional to cos(a) ** (df - 1). It is integrated by the
    trapezoidal rule, to 6 digits up to 10,000 degrees of freedom.

    >>> [round(t_quantile(df), 3) for df in (1, 2, 11, 1000)]
    [12.706, 4.303, 2.201, 1.962]

    Args:
        df: degrees of freedom, at least 1.
        level: the probability.
    """
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (df - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(df) * math.tan(float(np.interp(level * below[-1], below, angles)))


def of_options(differences: NDArray[np.float64]) -> Interval:
    """Return the mean difference over the last quarter of the steps, with the noise of the training.

    Training noise without an effect of the options is taken as a process without a preferred direction: its increments
    from block to block of the steps are independent, symmetric, and of any size, as those of a random walk whose speed
    changes. The level at the end is the sum of all increments (before the first step, both runs predict alike), and
    Student's t of the increments tests whether they have a direction. This test is valid for increments of unequal
    variance at levels up to 8 %: Bakirov and Szekely (2005); Ibragimov and Mueller (2010), "t-statistic based
    correlation and heterogeneity robust inference", JBES 28(4). The increments of means over neighbouring blocks are
    correlated, for which the error has a factor. Noise that returns to its mean makes the test conservative.

    The test is done for two divisions into 12 blocks, each at half of the error rate (Bonferroni), and the narrower
    interval is taken: equal blocks for a difference that grows to the end, and blocks that are equal in the logarithm
    of the step for one that comes early. Of the latter, the last block is the last quarter of the steps, the one before
    it the last quarter of the steps before, and so on.

    The price: an effect that comes within one block, and then does not grow, or that shrinks after an early maximum, is
    not distinguished from noise, however large it is. `over_seeds` has no such limit.

    Args:
        differences: the difference of the losses of each step, `float64[N]`, N at least `MIN_STEPS`.
    """
    num_steps = len(differences)
    sums = np.concatenate([[0.0], np.cumsum(differences)])
    equal = [num_steps * (number + 1) // _BLOCKS_OF_STEPS for number in range(_BLOCKS_OF_STEPS)]
    found = []
    for ends in (equal, _early_ends(num_steps)):
        means = np.diff(sums[[0, *ends]]) / np.diff([0, *ends])
        increments = np.diff(means, prepend=0.0)
        error = math.sqrt(_OVERLAP * len(increments)) * float(increments.std(ddof=1))
        df = len(increments) - 1
        found.append((t_quantile(df, (1 + LEVEL) / 2) * error, df))
    half_width, df = min(found)
    return Interval(mean=float(differences[-num_recent(num_steps) :].mean()), half_width=half_width, df=df)


def num_recent(num_steps: int) -> int:
    """Return the number of steps in the last quarter of the steps."""
    return num_steps - int(num_steps * (1 - RECENT))


def _early_ends(num_steps: int) -> list[int]:
    """Return the ends of blocks that are equal in the logarithm of the step, in the order of steps. None is empty."""
    ends = [num_steps]
    while len(ends) < _BLOCKS_OF_STEPS and int(ends[0] * (1 - RECENT)) > 0:
        ends.insert(0, int(ends[0] * (1 - RECENT)))
    return ends


def of_recent_batches(differences: NDArray[np.float64]) -> Interval:
    """Return the mean difference over the last quarter of the steps, with the noise of the batches alone.

    Batch means of 8 equal blocks. The interval covers other batches, not other training noise.

    Args:
        differences: the difference of the losses of each step, `float64[N]`, N at least `MIN_STEPS`.
    """
    recent = differences[-num_recent(len(differences)) :]
    return _of_blocks(recent, np.ones(len(recent)), _BLOCKS_OF_RECENT)


def of_models(differences: NDArray[np.float64], counts: NDArray[np.float64]) -> Interval | None:
    """Return the mean difference of two models on a text, with the sampling of the text.

    Neighbouring windows are often of one document. Therefore the windows form at most 32 blocks of neighbours, which
    are taken as independent. The interval covers other texts of this kind. It does not cover other seeds.

    Args:
        differences: the difference of the mean losses of each window, `float64[N]`, in the order of the text.
        counts: the number of tokens that each window counts, `float64[N]`.

    Returns:
        The interval; None for a single window.
    """
    if len(differences) < 2:
        return None
    return _of_blocks(differences, counts, _MOST_BLOCKS_OF_TEXT)


def over_seeds(differences: Sequence[float]) -> Interval:
    """Return the mean difference over pairs of runs, each pair of a seed of its own. The interval covers other seeds.

    Args:
        differences: the difference of each pair, at least two.
    """
    values = np.asarray(differences, np.float64)
    df = len(values) - 1
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean=float(values.mean()), half_width=t_quantile(df) * error, df=df)


def unpaired_steps(first: NDArray[np.float64], second: NDArray[np.float64], half_width: float) -> float:
    """Return how many steps of independent batches would give the mean difference of two runs this half-width.

    The variance of the losses is half the mean square of their successive differences, without the trend of the curve:
    von Neumann (1941).

    Args:
        first: the losses of the recent steps of one run.
        second: those of the other one.
        half_width: half the width of the interval, for the noise of the batches alone, above 0.
    """
    variance = sum(float(np.mean(np.diff(losses) ** 2)) / 2 for losses in (first, second))
    return variance * (NormalDist().inv_cdf((1 + LEVEL) / 2) / half_width) ** 2


def _of_blocks(values: NDArray[np.float64], weights: NDArray[np.float64], most_blocks: int) -> Interval:
    """Return the weighted mean of values, whose error follows from the means of blocks of neighbours."""
    num_blocks = min(most_blocks, len(values))
    firsts = np.arange(num_blocks) * len(values) // num_blocks
    of_blocks = np.add.reduceat(weights, firsts)
    mean = float((weights * values).sum() / weights.sum())
    residuals = np.add.reduceat(weights * values, firsts) - mean * of_blocks
    error = math.sqrt(num_blocks / (num_blocks - 1) * float((residuals**2).sum())) / float(weights.sum())
    return Interval(mean=mean, half_width=t_quantile(num_blocks - 1) * error, df=num_blocks - 1)
