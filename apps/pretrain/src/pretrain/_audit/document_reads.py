"""The steps of a run at which documents are read, past or to come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from owt_data import TokenDocument, find_text, find_windows
from pretrain._audit.run_tokens import RunTokens
from pretrain._audit.step_windows import check_document, epochs_of

Report = Callable[[float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A window of a run that reads tokens."""

    step: int
    """The step."""

    window: int
    """Number of the window in the global batch, from 0."""

    epoch: int | None
    """Pass over the windows: see `StepWindow.epoch`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentReads:
    """A document, and the windows of a run that read it."""

    document: TokenDocument
    """The document."""

    num_matches: int | None
    """Places of the text in the document; None if no text was searched for."""

    match_position: int | None
    """Position in the training tokens of the first place; None if no text was searched for."""

    reads: tuple[Read, ...]
    """The windows that read some of its tokens, in the order of steps."""

    match_reads: tuple[Read, ...]
    """The windows that read the first token of the first place."""


def reads_of_document(run: RunTokens, document: int, *, report: Report | None = None) -> DocumentReads:
    """Find the windows of a run that read a document.

    Raises:
        UsageError: there is no such document.
        DataError: the tokens cannot be read.
    """
    check_document(run, document)
    starts, stops = run.documents.ranges(np.array([document]))
    (reads,) = _reads(run, starts, stops, report)
    (described,) = run.documents.describe(np.array([document]))
    return DocumentReads(document=described, num_matches=None, match_position=None, reads=reads, match_reads=())


def documents_with(
    run: RunTokens,
    text: str,
    *,
    most: int | None = None,
    report_search: Report | None = None,
    report_steps: Report | None = None,
) -> tuple[int, list[DocumentReads]]:
    """Find the documents of a run that contain a text, and the windows that read them.

    Args:
        run: the run's tokens.
        text: the text, as it is in the decoded documents.
        most: number of documents to find the windows of, from the first on; None for all.
        report_search: called with the share of the tokens that is searched.
        report_steps: called with the share of the windows that is done.

    Returns:
        The number of documents with the text, and the first of them.

    Raises:
        DataError: the text is empty, or the tokens cannot be read.
    """
    found = find_text(run.documents, text, tokenizer=run.data.tokenizer, report=report_search)
    chosen = found if most is None else found[:most]
    ids = np.array([match.document for match in chosen], np.int64)
    starts, stops = run.documents.ranges(ids)
    places = np.array([match.position for match in chosen], np.int64)
    halves = [lambda share, half=half: report_steps((half + share) / 2) if report_steps else None for half in (0, 1)]
    reads, match_reads = _reads(run, starts, stops, halves[0]), _reads(run, places, places + 1, halves[1])
    return len(found), [
        DocumentReads(
            document=document,
            num_matches=match.num_matches,
            match_position=match.position,
            reads=of_document,
            match_reads=of_match,
        )
        for document, match, of_document, of_match in zip(
            run.documents.describe(ids), chosen, reads, match_reads, strict=True
        )
    ]


def _reads(
    run: RunTokens, starts: NDArray[np.int64], stops: NDArray[np.int64], report: Report | None
) -> Sequence[tuple[Read, ...]]:
    """Return the windows that read some tokens of each range of positions, in the order of steps."""
    ranges, indices = find_windows(
        run.data.train,
        starts,
        stops,
        seq_len=run.seq_len,
        order=run.order,
        seed=run.description.config.seed,
        stop_index=run.last_step * run.batch_size,
        report=report,
    )
    is_own = indices >= (run.first_step - 1) * run.batch_size
    ranges, indices = ranges[is_own], indices[is_own]
    reads: list[list[Read]] = [[] for _ in starts]
    for number, index, epoch in zip(ranges.tolist(), indices.tolist(), epochs_of(run, indices), strict=True):
        step, window = divmod(index, run.batch_size)
        reads[number].append(Read(step=step + 1, window=window, epoch=epoch))
    return [tuple(found) for found in reads]
