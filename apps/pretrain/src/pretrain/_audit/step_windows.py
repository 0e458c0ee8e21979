"""The windows of a step of a run, with their documents and their text, without running anything."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from owt_data import TokenDocument, TokenMixture, load_tokenizer, window_positions
from pretrain._audit.run_tokens import RunTokens
from pretrain._errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDocument:
    """The part of a document that a window reads."""

    document: TokenDocument
    """The document, with its range of positions and its source."""

    start: int
    """First token in the window."""

    stop: int
    """One past the last token in the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """A window of the global batch of a step."""

    number: int
    """Number in the global batch, from 0. The id of the window is `w` and this number."""

    index: int
    """Index in the order of the run's windows, from 0."""

    epoch: int | None
    """Pass over the windows, from 1; in a mixture, over those of the window's own sequence. None for random windows."""

    position: int
    """Position of the first token in the training tokens."""

    tokens: NDArray[np.integer]
    """The tokens, `uint16[seq_len + 1]`."""

    documents: tuple[WindowDocument, ...]
    """The documents, in order."""

    text: str
    """The decoded tokens. A character that a border cuts is replaced."""


def step_windows(run: RunTokens, step: int) -> list[StepWindow]:
    """Return the windows of a step of a run, past or to come: those that its update of this number reads.

    Args:
        run: the run's tokens.
        step: the step, from `first_step` to `last_step` of the run.

    Raises:
        UsageError: the run has no such step, or the text of a stream is not tokenized so far.
        DataError: the tokens cannot be read.
    """
    check_step(run, step)
    indices = np.arange((step - 1) * run.batch_size, step * run.batch_size)
    positions = window_positions(
        run.data.train, indices, seq_len=run.seq_len, order=run.order, seed=run.description.config.seed
    )
    tokens = run.documents.tokens.read_windows(positions, run.seq_len)
    encoding = load_tokenizer(run.data.tokenizer)
    epochs = epochs_of(run, indices)
    first = run.documents.find(positions)
    last = run.documents.find(positions + run.seq_len)
    ids = np.unique(np.concatenate([np.arange(low, high + 1) for low, high in zip(first, last, strict=True)]))
    described = dict(zip(ids.tolist(), run.documents.describe(ids), strict=True))
    windows: list[StepWindow] = []
    for number, position in enumerate(positions.tolist()):
        parts = [described[one] for one in range(int(first[number]), int(last[number]) + 1)]
        windows.append(
            StepWindow(
                number=number,
                index=int(indices[number]),
                epoch=epochs[number],
                position=position,
                tokens=tokens[number],
                documents=tuple(
                    WindowDocument(
                        document=document,
                        start=max(0, document.start - position),
                        stop=min(run.seq_len + 1, document.stop - position),
                    )
                    for document in parts
                ),
                text=encoding.decode(tokens[number].tolist()),
            )
        )
    return windows


def check_step(run: RunTokens, step: int) -> None:
    """Check that a run has a step, and that the text of the step exists.

    Raises:
        UsageError: it has no such step, or the text of a stream is not tokenized so far.
    """
    if step < run.first_step and step >= 1 and run.description.origin is not None:
        raise UsageError(
            f"step must be at least {run.first_step}, the first of {run.folder}, got {step}. Give the run that it "
            f"starts from: {run.description.origin.place}."
        )
    if not run.first_step <= step <= run.last_step:
        raise UsageError(
            f"step must be from {run.first_step} to {run.last_step}, the steps of {run.folder}, got {step}."
        )
    if run.growing is not None:
        last = run.growing.num_windows(run.seq_len) // run.batch_size
        if step > last:
            raise UsageError(
                f"step must be at most {last}, the last whose text is tokenized so far, got {step}. Continue the "
                "training, or wait."
            )


def epochs_of(run: RunTokens, indices: NDArray[np.int64]) -> list[int | None]:
    """Return the pass over the windows, from 1, that windows belong to: see `StepWindow.epoch`."""
    train = run.data.train
    if run.order == "random":
        return [None] * len(indices)
    if run.growing is not None:
        return [1] * len(indices)
    if isinstance(train, TokenMixture):
        which, own = train.deal(indices, run.description.config.seed)
        counts = np.array([sequence.num_windows(run.seq_len) for sequence in train.sequences])
        return [*(own // counts[which] + 1).tolist()]
    return [*(indices // train.num_windows(run.seq_len) + 1).tolist()]


def read_document(run: RunTokens, document: int) -> tuple[TokenDocument, str]:
    """Return a document of the training tokens of a run, and its text without the end-of-text token.

    Raises:
        UsageError: there is no such document.
        DataError: the tokens cannot be read.
    """
    check_document(run, document)
    encoding = load_tokenizer(run.data.tokenizer)
    tokens = run.documents.read(document)
    return (
        run.documents.describe(np.array([document]))[0],
        encoding.decode(tokens[tokens != encoding.eot_token].tolist()),
    )


def check_document(run: RunTokens, document: int) -> None:
    """Check that the training tokens of a run have a document.

    Raises:
        UsageError: they do not.
    """
    last = len(run.documents) - 1
    if not 0 <= document <= last:
        raise UsageError(f"document must be from 0 to {last}, the documents of {run.folder}, got {document}.")
