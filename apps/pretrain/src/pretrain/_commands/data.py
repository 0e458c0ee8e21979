"""The command `data`: the text of any step of a run, and the steps that read a text or a document."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console

from owt_data import TokenDocument, share_bar
from pretrain._audit.document_reads import DocumentReads, Read, documents_with, reads_of_document
from pretrain._audit.run_tokens import RunTokens, open_run_tokens
from pretrain._audit.step_windows import StepWindow, read_document, step_windows
from pretrain._errors import UsageError, one_line, rejecting, short
from pretrain._run.find import find_run, names_a_checkpoint
from pretrain._screen.printing import print_line

_MOST_DOCUMENTS = 20
_MOST_RANGES = 8
_MOST_CHARS = 300


def show_data(
    run: str,
    *,
    step: int | None = None,
    find: str | None = None,
    document: int | None = None,
    full: bool = False,
    as_json: bool = False,
    console: Console,
) -> bool:
    """Print the windows of a step, the steps that read documents with a text, or a document and the steps that read it.

    Args:
        run: the run's folder, URI or name.
        step: the step.
        find: the text.
        document: the document.
        full: print all text and all documents.
        as_json: print one line of JSON.
        console: the output. The progress of a search goes to standard error.

    Returns:
        False if no document has the text.

    Raises:
        UsageError: the run does not exist, has no such step or document, or its token files hold other tokens.
        DataError: the tokens cannot be read.
    """
    given = [
        name for name, value in (("--step", step), ("--find", find), ("--document", document)) if value is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise UsageError(f"data must have one of --step N, --find TEXT and --document ID, got {found}.")
    if names_a_checkpoint(run):
        name, _, number = run.rpartition("@")
        remedy = f"Write {short(name)}, and --step {number}." if number.isdecimal() else f"Write {short(name)}."
        raise UsageError(f"RUN must be a run without a checkpoint, got {short(run)}. {remedy}")
    progress = Console(stderr=True, emoji=False)
    with rejecting():
        folder, description = find_run(run)
    with share_bar(progress, "finding the documents") as report:
        opened = open_run_tokens(folder, description, report=report)
    is_found = True
    if step is not None:
        windows = step_windows(opened, step)
        lines = [json.dumps(_step_json(opened, step, windows))] if as_json else _step_lines(opened, step, windows, full)
    elif document is not None:
        with share_bar(progress, "finding the steps") as report:
            reads = reads_of_document(opened, document, report=report)
        lines = [json.dumps(_document_json(opened, reads))] if as_json else _document_lines(opened, reads, full)
    else:
        assert find is not None
        most = None if full or as_json else _MOST_DOCUMENTS
        with share_bar(progress, "searching") as search, share_bar(progress, "finding the steps") as steps:
            count, reads = documents_with(opened, find, most=most, report_search=search, report_steps=steps)
        lines, is_found = _found(opened, find, count, reads, full, as_json), count > 0
    for line in lines:
        print_line(console, line)
    return is_found


def _found(
    run: RunTokens, text: str, count: int, found: Sequence[DocumentReads], full: bool, as_json: bool
) -> Iterator[str]:
    if as_json:
        yield json.dumps(
            _header(run) | {"find": text, "num_documents": count, "documents": [_reads_json(run, one) for one in found]}
        )
        return
    found_in = f"{count:,} document{'' if count == 1 else 's'}"
    yield f"{found_in} of {len(run.documents):,} ha{'s' if count == 1 else 've'} this text"
    for one in found:
        yield ""
        yield from _read_lines(run, one, full)
    if count > len(found):
        yield ""
        yield f"and {count - len(found):,} more: --full or --json shows all"


def _header(run: RunTokens) -> dict[str, Any]:
    return {"run": str(run.folder), "reached_step": run.reached_step, "last_step": run.last_step}


def _step_json(run: RunTokens, step: int, windows: Sequence[StepWindow]) -> dict[str, Any]:
    return _header(run) | {
        "step": step,
        "is_past": step <= run.reached_step,
        "windows": [
            {
                "window": window.number,
                "index": window.index,
                "epoch": window.epoch,
                "position": window.position,
                "length": len(window.tokens),
                "documents": [
                    dataclasses.asdict(part.document) | {"window_start": part.start, "window_stop": part.stop}
                    for part in window.documents
                ],
                "text": window.text,
            }
            for window in windows
        ],
    }


def _step_lines(run: RunTokens, step: int, windows: Sequence[StepWindow], full: bool) -> Iterator[str]:
    when = "past" if step <= run.reached_step else "to come"
    yield f"step {step:,} of {run.last_step:,}, {when}: {len(windows)} window{'' if len(windows) == 1 else 's'}"
    for window in windows:
        epoch = "" if window.epoch is None else f", epoch {window.epoch}"
        yield ""
        yield f"window w{window.number}: {len(window.tokens)} tokens from position {window.position:,}{epoch}"
        named = window.documents if full else window.documents[:_MOST_RANGES]
        for part in named:
            yield f"  tokens {part.start} to {part.stop - 1}: {_name(part.document)}"
        if len(named) < len(window.documents):
            yield f"  and {len(window.documents) - len(named)} more documents"
        yield from _text_lines(window.text, full)


def _document_json(run: RunTokens, found: DocumentReads) -> dict[str, Any]:
    return _header(run) | _reads_json(run, found) | {"text": read_document(run, found.document.id)[1]}


def _document_lines(run: RunTokens, found: DocumentReads, full: bool) -> Iterator[str]:
    yield from _read_lines(run, found, full)
    yield from _text_lines(read_document(run, found.document.id)[1], full)


def _reads_json(run: RunTokens, found: DocumentReads) -> dict[str, Any]:
    def listed(reads: Sequence[Read]) -> list[dict[str, Any]]:
        reached = run.reached_step
        return [
            {"step": read.step, "window": read.window, "epoch": read.epoch, "is_past": read.step <= reached}
            for read in reads
        ]

    matches = {"num_matches": found.num_matches, "match_position": found.match_position}
    of_match = matches | {"match_reads": listed(found.match_reads)} if found.num_matches is not None else {}
    return dataclasses.asdict(found.document) | of_match | {"reads": listed(found.reads)}


def _read_lines(run: RunTokens, found: DocumentReads, full: bool) -> Iterator[str]:
    matches = (
        "" if found.num_matches is None else f", {found.num_matches:,} time{'' if found.num_matches == 1 else 's'}"
    )
    document = found.document
    yield f"{_name(document)}{matches}"
    yield f"  tokens {document.start:,} to {document.stop - 1:,}: {_steps(run, found.reads, full)}"
    if found.match_position is not None:
        yield f"  the first time at {found.match_position:,}: {_steps(run, found.match_reads, full)}"


def _name(document: TokenDocument) -> str:
    """Return a document and its place."""
    if document.file is None or document.row is None:
        return f"document {document.id:,}: number {document.number} of {one_line(document.token_file)}, source unknown"
    return f"document {document.id:,}: row {document.row} of {one_line(document.file)}"


def _steps(run: RunTokens, reads: Sequence[Read], full: bool) -> str:
    """Return the steps at which tokens were read and will be read."""
    past = sorted({read.step for read in reads if read.step <= run.reached_step})
    future = sorted({read.step for read in reads if read.step > run.reached_step})
    texts = [
        f"{verb} at step{'' if len(steps) == 1 else 's'} {_ranges(steps, full)}"
        for verb, steps in (("read", past), ("to be read", future))
        if steps
    ]
    until = "the end of what is tokenized so far" if run.growing is not None else f"step {run.last_step:,}"
    return "; ".join(texts) or f"not read from step {run.first_step:,} to {until}"


def _ranges(steps: Sequence[int], full: bool) -> str:
    """Return ascending steps as text.

    >>> _ranges([1, 2, 3, 7, 9, 10], False)
    '1 to 3, 7, 9, 10'
    """
    texts: list[str] = []
    for _, group in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        found = [step for _, step in group]
        texts += [f"{found[0]:,} to {found[-1]:,}"] if len(found) > 2 else [f"{step:,}" for step in found]
    more = len(texts) - _MOST_RANGES
    return ", ".join(texts if full or more <= 0 else [*texts[:_MOST_RANGES], f"and {more:,} more"])


def _text_lines(text: str, full: bool) -> Iterator[str]:
    """Yield a text as it is, or its beginning and its end in one line."""
    if full:
        yield text
        return
    half = _MOST_CHARS // 2
    cut = text if len(text) <= _MOST_CHARS else f"{text[:half]} \N{HORIZONTAL ELLIPSIS} {text[-half:]}"
    yield f"  {json.dumps(cut, ensure_ascii=False)}"
