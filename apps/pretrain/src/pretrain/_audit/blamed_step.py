"""A step of a run with its windows and documents, and the steps from there on without some of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import gradient_shares
from pretrain._audit.rerun import Rerun
from pretrain._audit.run_tokens import RunTokens
from pretrain._audit.step_windows import StepWindow, step_windows
from pretrain._audit.suspects import (
    Measure,
    Removal,
    Suspect,
    parse_removal,
    rank_documents,
    rank_windows,
    replace_windows,
)
from pretrain._errors import UsageError
from pretrain._run.spikes import spike_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The steps from a blamed one on, with all windows and without some."""

    without: tuple[str, ...]
    """The windows and documents that are left out."""

    num_windows: int
    """The number of windows that others replace, in all steps."""

    losses: list[float]
    """The loss of each step, with all windows; NaN for a skipped step."""

    losses_without: list[float]
    """The same without them."""

    score_without: float | None
    """The score of the first of these losses: see `pretrain._run.spikes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlamedStep:
    """A step of a run, and what its windows and documents add to it."""

    step: int
    """The step."""

    loss: float
    """Its loss in the run; NaN if it was skipped."""

    score: float | None
    """The score of the loss: see `pretrain._run.spikes`. None where there is none."""

    checkpoint: int | None
    """The checkpoint from which the steps before were computed again; None for the random parameters of the start."""

    largest_difference: float | None
    """The largest difference of a loss from that of the run, in the steps that were computed again, in nats.
    Infinite if one of them was skipped that has a loss in the run. None if there are no such steps, or the run lacks
    the loss of one: it is lost, or the run skipped it."""

    grad_norm: float
    """The norm of the gradient, without dropout."""

    windows: list[Suspect]
    """The windows, the most suspicious first."""

    documents: list[Suspect]
    """The documents, the most suspicious first."""

    comparison: Comparison | None
    """The steps from this one on without some windows, if that was asked for."""


def blame_step(
    tokens: RunTokens,
    step: int,
    losses: NDArray[np.float32],
    *,
    by: Measure,
    without: Sequence[str] = (),
    num_steps: int = 1,
) -> BlamedStep:
    """Compute the steps before a step again, and rank the windows and documents of the step.

    The losses and gradients are those of the parameters before the step, without dropout.

    Args:
        tokens: the run's tokens. Nothing is written into its folder.
        step: the step, from 1.
        losses: the losses of the steps of the run.
        by: the number that the order follows.
        without: ids of windows and documents, for a comparison.
        num_steps: the number of steps of the comparison.

    Raises:
        UsageError: see `Rerun`; or `without` names no windows and documents of the step, or all windows of a step.
        DataError, LaunchError: see `Rerun`.
    """
    parts = step_windows(tokens, step)
    documents = {part.document.id: part.document for window in parts for part in window.documents}
    removal = parse_removal(without, len(parts), documents)
    rerun = Rerun(tokens, step - 1)
    begin, found = rerun.step, []
    while rerun.step < step - 1:
        found.append(rerun.compute(next(rerun.batches)))
    setup, windows = rerun.setup, next(rerun.batches)
    masks = setup.config.train.mask_documents
    shares = gradient_shares(
        setup.config.model,
        rerun.state.params,
        windows,
        mesh=setup.mesh,
        end_of_text=setup.data.end_of_text if masks else None,
    )
    ranked_windows = rank_windows(shares, windows, setup.tokenizer, by)
    ranked_documents = rank_documents(shares, windows, _document_ids(parts), documents, setup.tokenizer, by)
    comparison = None
    if without:
        comparison = _compare(rerun, tokens, windows, without, removal, losses, num_steps)
    return BlamedStep(
        step=step,
        loss=float(losses[step - 1]),
        score=_score(losses[:step]),
        checkpoint=rerun.checkpoint,
        largest_difference=_largest_difference(losses[begin : step - 1], found),
        grad_norm=shares.norm,
        windows=ranked_windows,
        documents=ranked_documents,
        comparison=comparison,
    )


def _compare(
    rerun: Rerun,
    tokens: RunTokens,
    windows: NDArray[np.integer],
    ids: Sequence[str],
    removal: Removal,
    recorded: NDArray[np.float32],
    num_steps: int,
) -> Comparison:
    """Compute a step and those after it with all windows, and again without some."""
    setup, first = rerun.setup, rerun.step + 1
    num_steps = min(num_steps, setup.config.train.max_steps - rerun.step)
    batches = [windows, *(next(rerun.batches) for _ in range(num_steps - 1))]
    reduced, num_windows = [], 0
    for number, batch in enumerate(batches):
        stays = removal.stays(_document_ids(step_windows(tokens, first + number)), is_first=number == 0)
        if not stays.any():
            raise UsageError(
                f"--without must leave a window of each step, got all {len(stays)} windows of step {first + number}."
            )
        num_windows += int((~stays).sum())
        reduced.append(replace_windows(batch, stays))
    before = jax.device_get(rerun.state)  # a step may take the memory of its state
    losses = [rerun.compute(batch) for batch in batches]
    rerun.state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), before, setup.like)
    without = [rerun.compute(batch) for batch in reduced]
    return Comparison(
        without=tuple(ids),
        num_windows=num_windows,
        losses=losses,
        losses_without=without,
        score_without=_score([*recorded[: first - 1].tolist(), without[0]]),
    )


def _document_ids(windows: Sequence[StepWindow]) -> NDArray[np.int64]:
    """Return the document of each token of the windows of a step, `int64[B, seq_len + 1]`."""
    ids = np.empty((len(windows), len(windows[0].tokens)), np.int64)
    for window in windows:
        for part in window.documents:
            ids[window.number, part.start : part.stop] = part.document.id
    return ids


def _score(losses: Any) -> float | None:
    """Return the score of the last loss, or None if it has none."""
    recent = np.asarray(losses, np.float64)
    score = spike_scores(recent.tolist(), first=len(recent) - 1)[0]
    return float(score) if np.isfinite(score) else None


def _largest_difference(recorded: NDArray[np.float32], found: Sequence[float]) -> float | None:
    """Return the largest difference between losses. A step that was skipped in both does not differ."""
    now, skipped = np.asarray(found, np.float64), np.isnan(found)
    if (skipped & ~np.isnan(recorded)).any():
        return np.inf
    if not found or (np.isnan(recorded) & ~skipped).any():
        return None
    return float(np.abs(recorded - now).max(initial=0.0, where=~skipped))
