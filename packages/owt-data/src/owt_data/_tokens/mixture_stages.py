"""The windows of a mixture: which sequence each one is of, and its index in the order of this sequence.

A mixture has stages with weights of their own. A stage deals windows to the sequences in rounds of 65 536, each with
the exact proportions, in a pseudo-random order. The last round of a stage ends where the next stage begins. The windows
of each sequence that this round has skipped are the first ones that the later stages take. Hence each window of an
epoch is read once, and a stage that is added at the end changes no window before it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import DataError, check_integer, is_number, show
from owt_data._tokens.window_order import shuffled, unshuffled

MIXTURE_ROUND = 1 << 16
"""Windows in a round of a mixture. Each round has the exact proportions."""

NEVER = (1 << 63) - 1
"""The index of a window that no stage reads."""

_Indices = NDArray[np.int64]

MixtureWeight = float | list[tuple[int, float]]
"""Weight of a sequence in a mixture: a number; or for stages, pairs of the index of a window, and the weight from this
window on. The first pair is that of window 0."""


class Shares(NamedTuple):
    """The stages of a mixture."""

    starts: tuple[int, ...]
    """Index of the first window of each stage; 0 for the first stage."""

    rounds: tuple[tuple[int, ...], ...]
    """For each stage, the windows of each sequence in a round."""

    def deal(self, indices: _Indices, seed: int) -> tuple[_Indices, _Indices]:
        """Return, for each index, the number of its sequence and the index of the window in that sequence's order."""
        if len(self.starts) == 1 and len(indices):
            return _stages(self, seed)[0].deal(indices, seed)
        which, own = np.empty_like(indices), np.empty_like(indices)
        of_stage = np.searchsorted(self.starts, indices, side="right") - 1
        for number in np.unique(of_stage).tolist():
            here = np.flatnonzero(of_stage == number)
            which[here], own[here] = _stages(self, seed)[number].deal(indices[here], seed)
        return which, own

    def undeal(self, sequence: int, own: _Indices, seed: int) -> _Indices:
        """Return the indices of windows of a sequence, by their indices in its order; `NEVER` if no stage reads them.

        This is the inverse of `deal`.
        """
        indices = np.full_like(own, NEVER)
        for stage, stop in zip(_stages(self, seed), (*self.starts[1:], NEVER), strict=True):
            rest = np.flatnonzero(indices == NEVER)
            found = stage.undeal(sequence, own[rest], seed)
            indices[rest] = np.where(found < stop, found, NEVER)
        return indices

    def counts(self, stop: int, seed: int) -> list[int]:
        """Return the number of windows of each sequence before the index `stop`."""
        return _stages(self, seed)[self._stage_before(stop)].counts(stop, seed)

    def own_stop(self, sequence: int, stop: int, seed: int) -> int:
        """Return a number above the index, in its sequence, of each window of a sequence before the index `stop`."""
        return _stages(self, seed)[self._stage_before(stop)].own_stop(sequence, stop)

    def _stage_before(self, stop: int) -> int:
        return max(0, int(np.searchsorted(self.starts, stop)) - 1)


class _Stage(NamedTuple):
    """A stage with what the earlier ones leave."""

    start: int
    """Index of the first window."""

    first_round: int
    """Number of its first round, counted over all stages. Each round of a mixture has its own order."""

    shares: _Indices
    """Windows of each sequence in a round."""

    bounds: _Indices
    """Places in a round before those of each sequence, and of all."""

    skipped: tuple[_Indices, ...]
    """For each sequence, the indices in its order that earlier stages have skipped, ascending. They come first."""

    following: tuple[int, ...]
    """For each sequence, the index in its order that comes after the skipped ones."""

    def deal(self, indices: _Indices, seed: int) -> tuple[_Indices, _Indices]:
        """See `Shares.deal`. All indices are those of this stage."""
        which, numbers = np.empty_like(indices), np.empty_like(indices)
        for where, number, places in shuffled(self._in_rounds(indices), MIXTURE_ROUND, seed):
            chosen = np.searchsorted(self.bounds, places, side="right") - 1
            which[where] = chosen
            numbers[where] = (number - self.first_round) * self.shares[chosen] + places - self.bounds[chosen]
        own = numbers
        if any(map(len, self.skipped)):
            for sequence in np.unique(which).tolist():
                here = np.flatnonzero(which == sequence)
                own[here] = self._own(sequence, numbers[here])
        else:
            own += np.array(self.following)[which]
        return which, own

    def undeal(self, sequence: int, own: _Indices, seed: int) -> _Indices:
        """See `Shares.undeal`. An index that a later stage also has is one after the end of this stage."""
        share, skipped = int(self.shares[sequence]), self.skipped[sequence]
        numbers = own - self.following[sequence] + len(skipped)
        place = np.searchsorted(skipped, own)
        is_skipped = np.append(skipped, -1)[place] == own
        numbers = np.where(is_skipped, place, np.where(own < self.following[sequence], -1, numbers))
        indices = np.full_like(own, NEVER)
        has_place = np.flatnonzero(numbers >= 0) if share else np.empty(0, np.int64)
        rounds, places = np.divmod(numbers[has_place], max(1, share))
        dealt = unshuffled(places + self.bounds[sequence], MIXTURE_ROUND, seed, rounds + self.first_round)
        indices[has_place] = dealt - self.first_round * MIXTURE_ROUND + self.start
        return indices

    def counts(self, stop: int, seed: int) -> list[int]:
        """See `Shares.counts`."""
        num_rounds, rest = divmod(stop - self.start, MIXTURE_ROUND)
        before = np.array(self.following) - [len(skipped) for skipped in self.skipped]
        places = self._last_places(stop, seed) if rest else np.empty(0, np.int64)
        in_last = np.diff(np.searchsorted(np.sort(places), self.bounds))
        return (before + num_rounds * self.shares + in_last).tolist()

    def own_stop(self, sequence: int, stop: int) -> int:
        """See `Shares.own_stop`."""
        dealt = -(-(stop - self.start) // MIXTURE_ROUND) * int(self.shares[sequence])
        return self.following[sequence] + max(0, dealt - len(self.skipped[sequence]))

    def then(self, start: int, shares: tuple[int, ...], seed: int) -> "_Stage":
        """Return the next stage."""
        num_rounds, rest = divmod(start - self.start, MIXTURE_ROUND)
        places = np.sort(self._last_places(start, seed)) if rest else np.empty(0, np.int64)
        skipped, following = [], []
        for sequence, share in enumerate(self.shares.tolist()):
            first, last = np.searchsorted(places, self.bounds[sequence : sequence + 2])
            unread = np.setdiff1d(np.arange(share), places[first:last] - self.bounds[sequence]) if rest else places
            end = (num_rounds + (rest > 0)) * share
            left = self.skipped[sequence]
            skipped.append(np.concatenate([self._own(sequence, num_rounds * share + unread), left[end:]]))
            following.append(self.following[sequence] + max(0, end - len(left)))
        first_round = self.first_round + num_rounds + (rest > 0)
        return _stage(start, first_round, shares, tuple(skipped), tuple(following))

    def _in_rounds(self, indices: _Indices) -> _Indices:
        return indices - self.start + self.first_round * MIXTURE_ROUND

    def _last_places(self, stop: int, seed: int) -> _Indices:
        """Return the places, in the last round before an index, that this round has dealt."""
        begin = self.start + (stop - self.start) // MIXTURE_ROUND * MIXTURE_ROUND
        ((_, _, places),) = shuffled(self._in_rounds(np.arange(begin, stop)), MIXTURE_ROUND, seed)
        return places

    def _own(self, sequence: int, numbers: _Indices) -> _Indices:
        """Return the indices in the order of a sequence, by the number of the window in this stage."""
        skipped = self.skipped[sequence]
        own = numbers + (self.following[sequence] - len(skipped))
        is_skipped = numbers < len(skipped)
        own[is_skipped] = skipped[numbers[is_skipped]]
        return own


def _stage(
    start: int,
    first_round: int,
    shares: tuple[int, ...],
    skipped: tuple[_Indices, ...],
    following: tuple[int, ...],
) -> _Stage:
    bounds = np.concatenate([[0], np.cumsum(shares)])
    return _Stage(start, first_round, np.array(shares), bounds, skipped, following)


@lru_cache(maxsize=32)
def _stages(shares: Shares, seed: int) -> tuple[_Stage, ...]:
    """Return the stages of a seed. Each takes one evaluation of a round, once in a process."""
    none = len(shares.rounds[0])
    stages = [_stage(0, 0, shares.rounds[0], (np.empty(0, np.int64),) * none, (0,) * none)]
    for start, of_stage in zip(shares.starts[1:], shares.rounds[1:], strict=True):
        stages.append(stages[-1].then(start, of_stage, seed))
    return tuple(stages)


def shares_of(weights: list[float]) -> list[int]:
    """Return the windows of each sequence in a round, rounded by the largest-remainder method."""
    exact = [weight / sum(weights) * MIXTURE_ROUND for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: MIXTURE_ROUND - sum(shares)]:
        shares[number] += 1
    return shares


def split_weights(weights: list[MixtureWeight]) -> tuple[tuple[float, ...], tuple[tuple[int, tuple[float, ...]], ...]]:
    """Return the weights of the first stage, and those of the later ones with their first windows.

    Args:
        weights: the weight of each sequence.

    Raises:
        DataError: a weight is neither a number nor a list of pairs whose windows ascend from 0.
    """
    changes = [_changes(weight) for weight in weights]
    starts = sorted({start for of_one in changes for start in of_one})
    stages = [(start, tuple(_at(of_one, start) for of_one in changes)) for start in starts]
    return stages[0][1], tuple(stages[1:])


def _changes(weight: MixtureWeight) -> dict[int, float]:
    """Return a weight by the first window from which it holds."""
    pairs: Any = weight if isinstance(weight, list | tuple) else [(0, weight)]
    are_pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 and is_number(pair[1]) for pair in pairs)
    if not are_pairs or not pairs:
        raise DataError(
            f"A weight must be a number, or pairs of a window and a number such as [(0, 0.7), (5000, 0.3)], got "
            f"{show(weight)}."
        )
    starts = [check_integer("The window of a weight", start, least=0) for start, _ in pairs]
    if starts[0] != 0 or sorted(set(starts)) != starts:
        raise DataError(f"The windows of a weight must ascend from 0, got {show(starts)}. Put them in order.")
    return dict(zip(starts, (number for _, number in pairs), strict=True))


def _at(changes: dict[int, float], window: int) -> float:
    return changes[max(start for start in changes if start <= window)]
