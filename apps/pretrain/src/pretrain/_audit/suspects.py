"""The windows and the documents of a step, ranked by what they add to its loss and to its gradient.

Shapes: B windows of a batch, W = T + 1 tokens of a window, T predictions.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import GradientShares
from owt_data import TokenDocument, Tokenizer
from pretrain._errors import UsageError, short

Measure = Literal["loss", "gradient"]
"""The number that the order follows: `Suspect.excess` or `Suspect.share`."""

_WINDOW, _DOCUMENT = "w", "d"
_ID = re.compile(rf"(?P<kind>[{_WINDOW}{_DOCUMENT}])(?P<number>[0-9]{{1,18}})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A window of a step, or the part of a document that the windows of a step hold."""

    id: str
    """`w` and the number of the window in the batch, or `d` and the id of the document in the training tokens."""

    windows: list[int]
    """The numbers of the windows in the batch, from 0."""

    num_tokens: int
    """The number of its tokens that are predicted."""

    loss: float
    """Mean loss of these tokens, in nats, before the step."""

    excess: float
    """Its part in the mean loss of the batch, in nats: its share of the predictions, times its loss less the mean loss.
    A few tokens with a high loss have a small part."""

    share: float
    """Its share in the squared norm of the gradient of the step: see `nnx_gpt2.GradientShares.shares`."""

    norm: float | None
    """The norm of the gradient of a window's mean loss; None for a document."""

    source: str | None
    """The file of a document, and the number of its document or row there, from 0; None for a window, and if the index
    of the tokens does not tell it."""

    text: str
    """Its text; of a document, the part in the first of these windows. Empty without the files of the tokenizer."""


def rank_windows(
    found: GradientShares, windows: NDArray[np.integer], tokenizer: Tokenizer | None, by: Measure
) -> list[Suspect]:
    """Return the windows of a batch, the most suspicious first. A loss or gradient that is not finite comes first.

    Args:
        found: the losses and the shares of the batch.
        windows: the batch, `uint16[B, W]`.
        tokenizer: the tokenizer of the run.
        by: the number that the order follows.
    """
    excess = _excess(found)
    suspects = [
        Suspect(
            id=f"{_WINDOW}{number}",
            windows=[number],
            num_tokens=len(window) - 1,
            loss=float(found.losses[number].mean()),
            excess=float(excess[number].sum()),
            share=float(found.shares[number].sum()),
            norm=float(found.norms[number]),
            source=None,
            text="" if tokenizer is None else tokenizer.decode(window.tolist()),
        )
        for number, window in enumerate(windows)
    ]
    return _sorted(suspects, by)


def rank_documents(
    found: GradientShares,
    windows: NDArray[np.integer],
    ids: NDArray[np.int64],
    documents: Mapping[int, TokenDocument],
    tokenizer: Tokenizer | None,
    by: Measure,
) -> list[Suspect]:
    """Return the documents of a batch, the most suspicious first. A prediction counts for the document of its target.

    Args:
        found: the losses and the shares of the batch.
        windows: the batch, `uint16[B, W]`.
        ids: the id of the document of each token, `int64[B, W]`.
        documents: the documents, by their ids.
        tokenizer: the tokenizer of the run.
        by: the number that the order follows.
    """
    numbers, group = np.unique(ids[:, 1:], return_inverse=True)
    group = group.ravel()
    counts = np.bincount(group)
    losses = np.bincount(group, weights=found.losses.ravel()) / counts
    excess = np.bincount(group, weights=_excess(found).ravel())
    shares = np.bincount(group, weights=found.shares.ravel())
    suspects = []
    for number, count, loss, adds, share in zip(numbers.tolist(), counts.tolist(), losses, excess, shares, strict=True):
        place = documents[number]
        holding = np.flatnonzero((ids[:, 1:] == number).any(axis=1)).tolist()
        text = _decoded(tokenizer, windows[holding[0]][ids[holding[0]] == number])
        suspects.append(
            Suspect(
                id=f"{_DOCUMENT}{number}",
                windows=holding,
                num_tokens=count,
                loss=float(loss),
                excess=float(adds),
                share=float(share),
                norm=None,
                source=None if place.file is None else f"{place.file}:{place.row}",
                text=text,
            )
        )
    return _sorted(suspects, by)


def _excess(found: GradientShares) -> NDArray[np.float64]:
    """Return the part of each prediction in the mean loss of the batch, `float64[B, T]`."""
    losses = found.losses.astype(np.float64)
    finite = losses[np.isfinite(losses)]
    return (losses - (finite.mean() if finite.size else np.nan)) / losses.size


def _sorted(suspects: list[Suspect], by: Measure) -> list[Suspect]:
    def key(suspect: Suspect) -> tuple[bool, float]:
        value = suspect.share if by == "gradient" else suspect.excess
        is_finite = math.isfinite(value) and math.isfinite(suspect.loss)
        return is_finite, -value if is_finite else 0.0

    return sorted(suspects, key=key)


def _decoded(tokenizer: Tokenizer | None, tokens: NDArray[np.integer]) -> str:
    """Return the text of a document, without its end-of-text token."""
    if tokenizer is None:
        return ""
    return tokenizer.decode([token for token in tokens.tolist() if token != tokenizer.eot_token])


@dataclass(frozen=True, slots=True)
class Removal:
    """The windows to take out of the batches of a step and those that follow.

    Another window of the same step takes the place of each one: the next one that stays, or one before. The batch keeps
    its size, so that the step is the same program. The loss is then nearly the mean over the windows that stay.
    """

    windows: frozenset[int]
    """Rows of the first step."""

    documents: frozenset[int]
    """Documents, whose windows are taken out of all steps."""

    def stays(self, documents: NDArray[np.int64], *, is_first: bool) -> NDArray[np.bool_]:
        """Return which windows of a batch stay, `bool[B]`.

        Args:
            documents: the number of the document of each token, `int64[B, W]`.
            is_first: True for the first step.
        """
        stays = np.array([self.documents.isdisjoint(row) for row in documents.tolist()], np.bool_)
        if is_first:
            stays[[*self.windows]] = False
        return stays


def parse_removal(ids: Sequence[str], num_windows: int, documents: Iterable[int]) -> Removal:
    """Parse the ids of windows and documents.

    Args:
        ids: the ids.
        num_windows: the number of windows of the step.
        documents: the numbers of its documents.

    Raises:
        UsageError: an id is that of no window and of no document of the step.
    """
    documents = sorted(documents)
    known = {f"{_WINDOW}{row}" for row in range(num_windows)} | {f"{_DOCUMENT}{number}" for number in documents}
    numbers: dict[str, set[int]] = {_WINDOW: set(), _DOCUMENT: set()}
    for one in ids:
        parsed = _ID.fullmatch(one)
        if parsed is None or one not in known:
            raise UsageError(
                f"--without must be windows and documents of the step, {_WINDOW}0 to {_WINDOW}{num_windows - 1} and "
                f"such as {_DOCUMENT}{documents[0]}, got {short(one)}. Take the ids of the tables."
            )
        numbers[parsed["kind"]].add(int(parsed["number"]))
    return Removal(frozenset(numbers[_WINDOW]), frozenset(numbers[_DOCUMENT]))


def replace_windows(windows: NDArray[np.integer], stays: NDArray[np.bool_]) -> NDArray[np.integer]:
    """Return a batch in which windows that stay take the place of the others.

    >>> replace_windows(np.array([[1], [2], [3], [4]], np.uint16), np.array([False, True, True, False])).tolist()
    [[2], [2], [3], [2]]

    Args:
        windows: the batch, `uint16[B, W]`.
        stays: the windows that stay, `bool[B]`; at least one.
    """
    kept = np.flatnonzero(stays)
    places = np.arange(len(windows))
    next_kept = kept[np.searchsorted(kept, places) % len(kept)]
    return windows[np.where(stays, places, next_kept)]
