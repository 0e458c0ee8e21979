"""Batches of rows of any lengths, in few shapes: each shape is a program to compile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

_SCORED_MULTIPLE = 4
# A row may have as many scored positions as it has inputs, and at least so many.
_FEWEST_SHARED = 8


class Row(NamedTuple):
    """Tokens, the last of which are scored."""

    tokens: list[int]
    """Token ids: at least one more than are scored, and at most one more than the model's context."""

    num_scored: int
    """The number of tokens to score, at the end."""

    @property
    def inputs(self) -> list[int]:
        """All tokens but the last: the model computes the next token at each of them."""
        return self.tokens[:-1]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are computed at once, and the shape of their arrays."""

    rows: list[list[int]]
    """The numbers of the rows that share a row of the arrays, for at most `size` of these."""

    size: int
    """Rows of the arrays."""

    length: int
    """Inputs of a row."""

    num_scored: int
    """Scored positions of a row."""


def batches(
    rows: Sequence[Row],
    *,
    most_tokens: int,
    context: int,
    multiple: int,
    length_multiple: int,
    program_tokens: int,
) -> Iterator[Batch]:
    """Put rows together, the longest first.

    Args:
        rows: the rows.
        most_tokens: inputs of a batch at most, unless `multiple` rows have more.
        context: inputs of a row at most.
        multiple: the number of devices, which divides the number of rows of a batch.
        length_multiple: divides the inputs of a row, but for the context: one evaluation has shapes of another.
        program_tokens: the tokens that are computed in the time in which a program is compiled.
    """
    by_length: dict[int, list[list[int]]] = {}
    for shared in _shared(rows):
        length = min(context, _rounded_up(len(rows[shared[0]].inputs), length_multiple))
        by_length.setdefault(length, []).append(shared)
    for lengths in _joined({length: len(of_length) for length, of_length in by_length.items()}, program_tokens):
        chosen = [shared for length in lengths for shared in by_length[length]]
        num_scored = max(sum(rows[number].num_scored for number in shared) for shared in chosen)
        most = max(multiple, most_tokens // lengths[0])
        size = _rounded_up(-(-len(chosen) // -(-len(chosen) // most)), multiple)
        for first in range(0, len(chosen), size):
            part = chosen[first : first + size]
            yield Batch(part, size, length=lengths[0], num_scored=_rounded_up(num_scored, _SCORED_MULTIPLE))


def _shared(rows: Sequence[Row]) -> list[list[int]]:
    """Put rows together whose inputs are the beginning of those of the first of them, such as short answers.

    At most as many positions are scored together as the first row has inputs.
    """
    found: list[list[int]] = []
    inputs, free = list[int](), -1
    # The beginning of a row comes right after the rows that have it, the longest first.
    for number in sorted(range(len(rows)), key=lambda number: (rows[number].inputs, -number), reverse=True):
        row = rows[number]
        if row.num_scored <= free and inputs[: len(row.inputs)] == row.inputs:
            found[-1].append(number)
        else:
            found.append([number])
            inputs, free = row.inputs, max(_FEWEST_SHARED, len(row.inputs))
        free -= row.num_scored
    return found


def _joined(counts: dict[int, int], program_tokens: int) -> list[list[int]]:
    """Join lengths, the longest of which all get, so that padding and compiling take the least time.

    >>> _joined({64: 100, 56: 100, 16: 100}, program_tokens=1000)
    [[64, 56], [16]]

    Args:
        counts: the number of rows by their length.
        program_tokens: the tokens that are computed in the time in which a program is compiled.
    """
    lengths = sorted(counts, reverse=True)
    before = [0, *accumulate(counts[length] for length in lengths)]
    # For the first 0, 1, 2, ... lengths: the least tokens, and where the last of the joined parts starts.
    tokens, starts = [0], [0]
    for stop in range(1, len(before)):
        options = (
            (tokens[start] + lengths[start] * (before[stop] - before[start]) + program_tokens, start)
            for start in range(stop)
        )
        least, start = min(options)
        tokens.append(least)
        starts.append(start)
    found: list[list[int]] = []
    stop = len(lengths)
    while stop:
        found.append(lengths[starts[stop] : stop])
        stop = starts[stop]
    return found[::-1]


def _rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number, and at least one of it."""
    return max(1, -(-number // multiple)) * multiple
