"""Batches of rows of any lengths, in few shapes: each shape is a program to compile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_SHORTEST = 32
_FEWEST_SCORED = 8


class Row(NamedTuple):
    """Tokens, the last of which are scored."""

    tokens: list[int]
    """Token ids: at least one more than are scored, and at most one more than the model's context."""

    num_scored: int
    """The number of tokens to score, at the end."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are computed at once, and the shape of their arrays."""

    rows: list[int]
    """The numbers of the rows, at most `size`."""

    size: int
    """Rows of the arrays."""

    length: int
    """Inputs of a row."""

    num_scored: int
    """Scored positions of a row."""


def padded_length(length: int, most: int) -> int:
    """Return the length of an array for a row: a power of two, or 1.5 times one, from 32 on; at most `most`.

    >>> [padded_length(length, 1000) for length in (1, 33, 49, 65, 97, 900)]
    [32, 48, 64, 96, 128, 1000]
    """
    power = 1 << max(0, length - 1).bit_length()
    shorter = power * 3 // 4
    return min(most, max(_SHORTEST, shorter if length <= shorter else power))


def batches(rows: Sequence[Row], *, most_tokens: int, context: int, multiple: int) -> Iterator[Batch]:
    """Put rows together, the longest first. The end of one length is filled up with the next shorter rows.

    Args:
        rows: the rows.
        most_tokens: inputs of a batch at most, unless `multiple` rows have more.
        context: inputs of a row at most.
        multiple: the number of devices, which divides the number of rows of a batch.
    """

    def shape(number: int) -> tuple[int, int]:
        row = rows[number]
        length, num_scored = padded_length(len(row.tokens) - 1, context), _FEWEST_SCORED
        while num_scored < row.num_scored:
            num_scored *= 4
        return length, min(length, num_scored)

    shapes = [shape(number) for number in range(len(rows))]
    order = sorted(range(len(rows)), key=lambda number: (shapes[number], number), reverse=True)
    first = 0
    while first < len(order):
        length = shapes[order[first]][0]
        needed = 1 << (len(order) - first - 1).bit_length()  # a few rows need no large batch
        size = -(-min(needed, max(1, most_tokens // length)) // multiple) * multiple
        chosen = order[first : first + size]
        yield Batch(rows=chosen, size=size, length=length, num_scored=max(shapes[number][1] for number in chosen))
        first += size
