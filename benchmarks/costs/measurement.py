"""A cost of the packages at several sizes, and the exponent of its growth."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A cost that depends on a size, such as requests to the storage on the number of workers."""

    name: str
    """A short name, for `--only` and the results."""

    what: str
    """The cost in words: "requests of rank 0 during the commit of a checkpoint"."""

    unit: str
    """The unit of the cost, such as "requests", "bytes" or "s"."""

    size: str
    """Unit of the size: "workers", "records" or "documents"."""

    sizes: tuple[int, ...]
    """The sizes, in increasing order."""

    short: tuple[int, ...]
    """The sizes of the short form."""

    cost: Callable[[int, Path], float]
    """Return the cost of a size. The second argument is an empty folder."""

    goal: float
    """The largest exponent that meets the goal: 0.1 for a constant cost, 1.1 for a linear one."""


def exponent(costs: dict[int, float]) -> float:
    """Return the exponent k of the growth `cost ~ size**k` between the largest two sizes.

    A cost of 0 counts as 1e-9: nothing that stays nothing has the exponent 0.

    Args:
        costs: the cost of each size, of at least two sizes.
    """
    (small, cheap), (large, dear) = sorted(costs.items())[-2:]
    return math.log(max(dear, 1e-9) / max(cheap, 1e-9)) / math.log(large / small)
