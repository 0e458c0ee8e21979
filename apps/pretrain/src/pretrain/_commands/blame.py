"""The command `blame`: the windows and the documents of a step, by what they add to it."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from pretrain._audit.blamed_step import BlamedStep, Comparison, blame_step
from pretrain._audit.run_tokens import open_run_tokens
from pretrain._audit.suspects import Measure, Suspect
from pretrain._errors import UsageError, rejecting, short
from pretrain._formats import loss
from pretrain._run.find import find_run, names_a_checkpoint
from pretrain._run.spikes import FEWEST, THRESHOLD, largest_spike
from pretrain._run.step_losses import read_step_losses
from pretrain._screen.ending import as_typed, visible
from pretrain._screen.printing import print_line, waiting
from pretrain._surroundings.typed_command import application

_TEXT_WIDTH = 60
_BAR_WIDTH = 30
_UNKNOWN = "-"
_ORDERS: dict[Measure, str] = {
    "loss": "what they add to the mean loss",
    "gradient": "their share in the gradient",
}


def blame(  # noqa: PLR0913 - the options of the command
    run: str,
    *,
    step: int | None,
    spike: bool,
    top: int = 5,
    by: Measure = "loss",
    without: Sequence[str] = (),
    steps: int = 20,
    as_json: bool = False,
    console: Console,
) -> BlamedStep:
    """Rank the windows and the documents of a step, and print them. No file of the run is written.

    Args:
        run: the run's folder, URI or name.
        step: the step; None with `spike`.
        spike: take the step of the largest spike of the loss.
        top: the number of windows and of documents to print.
        by: the number that the order follows.
        without: ids of windows and documents, to compute the steps from this one on without them.
        steps: the number of these steps.
        as_json: print one line of JSON, with all windows and documents.
        console: the output.

    Raises:
        UsageError: the run or the step does not exist, the run has no spike, or see `blame_step`.
        DataError, LaunchError: see `blame_step`.
    """
    for name, value in (("top", top), ("steps", steps)):
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}.")
    if spike == (step is not None):
        raise UsageError(f"--step or --spike must be given, got {'both' if spike else 'none of the two'}.")
    if names_a_checkpoint(run):
        raise UsageError(f"RUN must be a run without a checkpoint, got {short(run)}. Give --step.")
    with rejecting():
        folder, description = find_run(run)
        losses = read_step_losses(folder.step_losses)
    chosen = _spike_step(losses, str(folder)) if step is None else step
    if not 1 <= chosen <= len(losses):
        raise UsageError(f"--step must be from 1 to {len(losses)}, the last step of {folder}, got {chosen}.")
    with waiting(Console(stderr=True, emoji=False), f"computing the steps up to {chosen} again"):
        tokens = open_run_tokens(folder, description)
        found = blame_step(tokens, chosen, losses, by=by, without=without, num_steps=steps)
    if as_json:
        console.file.write(json.dumps(_finite(dataclasses.asdict(found)), allow_nan=False) + "\n")
        return found
    command = f"{application()} blame {as_typed(folder)} --step {chosen}"
    for line in _lines(found, top, by, steps, command):
        print_line(console, line)
    return found


def _spike_step(losses: NDArray[np.float32], folder: str) -> int:
    spike = largest_spike(losses)
    if spike is None:
        raise UsageError(
            f"{folder} must have a spike of its loss for --spike, got none: no loss is {THRESHOLD:.0f} deviations "
            "above the median of the losses before it. Give --step."
        )
    return spike.step


def _finite(value: Any) -> Any:
    """Return a value with None in place of the numbers that are not finite, which JSON lacks."""
    match value:
        case dict():
            return {name: _finite(one) for name, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _lines(found: BlamedStep, top: int, by: Measure, num_steps: int, command: str) -> Iterator[str]:
    if math.isnan(found.loss):
        state = "was skipped, because its loss or gradient is not finite"
    else:
        if found.score is None:
            score = f" (no score in the first {FEWEST} steps)"
        else:
            score = f", {found.score:+.1f} deviations from the median before it"
        state = f"has the loss {loss(found.loss)}{score}"
    norm = f"; norm of its gradient {found.grad_norm:.4g}" if found.grad_norm else ""
    yield f"step {found.step} {state}{norm}"
    yield _origin(found)
    for name, suspects in (("windows", found.windows), ("documents", found.documents)):
        yield ""
        more = f" of {len(suspects)}" if len(suspects) > top else ""
        yield f"{min(top, len(suspects))}{more} {name}, by {_ORDERS[by]}"
        yield from _table(suspects[:top])
    yield ""
    if found.comparison is not None:
        yield from _comparison(found, found.comparison, num_steps)
    else:
        yield f"without the first document: {command} --without {found.documents[0].id}"


def _origin(found: BlamedStep) -> str:
    start = "the random parameters of the start" if found.checkpoint is None else f"checkpoint {found.checkpoint}"
    first = (found.checkpoint or 0) + 1
    if found.largest_difference is None:
        return f"computed from {start}"
    steps = f"step {first} has" if first == found.step - 1 else f"the steps {first} to {found.step - 1} have"
    if found.largest_difference == 0:
        return f"computed from {start}: {steps} the losses of the run, to the bit"
    if math.isinf(found.largest_difference):
        return f"computed from {start}: a step after it was skipped, which has a loss in the run"
    return f"computed from {start}: {steps} the losses of the run, up to {found.largest_difference:.1e}"


def _table(suspects: Sequence[Suspect]) -> Iterator[str]:
    width = max(2, *(len(suspect.id) for suspect in suspects))
    yield f"{'id':<{width}}  {'loss':>8}  {'adds':>8}  {'gradient':>8}  {'tokens':>6}  text"
    for suspect in suspects:
        share = f"{suspect.share:.1%}" if math.isfinite(suspect.share) else _UNKNOWN
        adds = f"{suspect.excess:+.4f}" if math.isfinite(suspect.excess) else _UNKNOWN
        numbers = f"{_loss(suspect.loss):>8}  {adds:>8}  {share:>8}  {suspect.num_tokens:>6}"
        yield f"{suspect.id:<{width}}  {numbers}  {_shortened(suspect.text)}"
        if suspect.source is not None:
            yield f"{'':<{width}}  {suspect.source}"


def _loss(value: float) -> str:
    return loss(value) if math.isfinite(value) else _UNKNOWN


def _shortened(text: str) -> str:
    """Return the beginning of a text in one line, with line breaks and control characters in a visible form."""
    line = Text(visible(text))
    line.truncate(_TEXT_WIDTH, overflow="ellipsis")
    return line.plain


def _comparison(found: BlamedStep, comparison: Comparison, num_steps: int) -> Iterator[str]:
    number = f"{comparison.num_windows} window{'' if comparison.num_windows == 1 else 's'}"
    yield f"without {', '.join(comparison.without)}: another window takes the place of {number}"
    finite = [value for value in (*comparison.losses, *comparison.losses_without) if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    width = len(str(found.step + len(comparison.losses) - 1))
    yield f"{'step':>{max(4, width)}}  {'loss':>8}  {'without':>8}  * loss, o without"
    for step, (one, other) in enumerate(zip(comparison.losses, comparison.losses_without, strict=True), found.step):
        yield f"{step:>{max(4, width)}}  {_loss(one):>8}  {_loss(other):>8}  {_bar(one, other, low, high)}".rstrip()
    if len(comparison.losses) < num_steps:
        yield f"the run ends at step {found.step + len(comparison.losses) - 1}"
    if comparison.score_without is not None:
        is_gone = comparison.score_without < THRESHOLD
        was_spike = found.score is None or found.score >= THRESHOLD
        verdict = "no spike" if is_gone else "still a spike"
        yield (
            f"without {'them' if len(comparison.without) > 1 else 'it'}, the loss of step {found.step} is "
            f"{comparison.score_without:+.1f} deviations from the median before it: {verdict}"
            f"{'' if was_spike or not is_gone else ', as with all windows'}"
        )


def _bar(loss_with: float, loss_without: float, low: float, high: float) -> str:
    """Return a line with the loss as `*`, and the loss without the windows as `o`."""
    places = [" "] * (_BAR_WIDTH + 1)
    for value, mark in ((loss_with, "*"), (loss_without, "o")):
        if math.isfinite(value):
            places[round(_BAR_WIDTH * (value - low) / max(high - low, 1e-12))] = mark
    return "".join(places)
