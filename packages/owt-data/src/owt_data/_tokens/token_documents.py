"""The documents of opened tokens: which document a token belongs to, and the row of a source it comes from."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from owt_data._digests import share_counter
from owt_data._errors import DataError, check_choice, check_function, check_type
from owt_data._paths import TOKEN_NAMES, base_name, is_uri
from owt_data._tokens.document_index import (
    DocumentEnds,
    FileDocuments,
    Place,
    ends_of_marks,
    find_marks,
    index_name,
    open_index,
    write_index,
)
from owt_data._tokens.growing_tokens import GrowingTokens
from owt_data._tokens.journal import read_journal, shard_folder, staging_path
from owt_data._tokens.layout import Layout
from owt_data._tokens.manifest import Manifest, read_manifest
from owt_data._tokens.open import TokenData, open_tokens
from owt_data._tokens.plan import read_plan
from owt_data._tokens.sequence import TokenMixture, TokenSequence, concatenate
from owt_data._tokens.summary import CONTINUING
from owt_data._tokens.window_order import as_int64

_log = logging.getLogger("owt_data")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDocument:
    """A document of tokens, and its place in the source."""

    id: int
    """Number of the document in the split, from 0, in the order of the tokens."""

    start: int
    """Position of its first token in the split."""

    stop: int
    """One past the position of its last token, which is the end-of-text token unless the split cuts the document."""

    token_file: str
    """The token file, or the folder while it is being prepared."""

    number: int
    """Number of the document in the token file, from 0."""

    file: str | None
    """The file of the source, or the name of a dataset, as it was given to `prepare`; the names of all files while the
    folder is being prepared; None if unknown."""

    row: int | None
    """Number of the document in `file`, from 0: its row, if each row is a document; None if unknown."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive tokens of a split that lie in one token file."""

    token_file: str
    position: int
    """First position, in the split."""
    id: int
    """First document, in the split."""
    start: int
    """First token, in the file."""
    number: int
    """First document, in the file."""
    num_tokens: int
    documents: FileDocuments


class TokenDocuments:
    """Documents of a split, by their ids: 0, 1 and so on in the order of the tokens.

    Positions count the tokens of the split. Those of a mixture count its sequences one after the other. A document that
    a split by position cuts is a document of both splits.
    """

    def __init__(self, tokens: TokenSequence, files: Sequence[tuple[str, int, int, FileDocuments]]) -> None:
        self.tokens = tokens
        """All tokens of the split, one after the other."""
        self._parts: list[_Part] = []
        position = count = 0
        for token_file, start, stop, documents in files:
            if start < stop:
                first, last = documents.ends.find(np.array([start, stop - 1])).tolist()
                self._parts.append(_Part(token_file, position, count, start, first, stop - start, documents))
                position, count = position + stop - start, count + last - first + 1
        self._num_documents = count

    def __len__(self) -> int:
        """Number of documents."""
        return self._num_documents

    def find(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of the documents that have the tokens at these positions, `int64[N]`.

        Args:
            positions: positions in the split, `int64[N]`.

        Raises:
            DataError: a position is out of range, or an index is damaged.
        """
        positions = _check("position", positions, len(self.tokens))
        ids = np.empty_like(positions)
        for part, here in self._by_part(positions, [part.position for part in self._parts]):
            numbers = part.documents.ends.find(positions[here] - part.position + part.start)
            ids[here] = numbers - part.number + part.id
        return ids

    def ranges(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first position of documents, and one past their last position, `int64[N]` each.

        Raises:
            DataError: an id is out of range, or an index is damaged.
        """
        ids = self._check_ids(ids)
        starts, stops = np.empty_like(ids), np.empty_like(ids)
        for part, here in self._by_part(ids, [part.id for part in self._parts]):
            numbers = ids[here] - part.id + part.number
            for out, before in ((starts, 1), (stops, 0)):
                ends = part.documents.ends.ends(numbers - before)
                out[here] = np.clip(ends - part.start, 0, part.num_tokens) + part.position
        return starts, stops

    def describe(self, ids: NDArray[np.int64]) -> list[TokenDocument]:
        """Return the ranges of documents and their places in the source.

        Raises:
            DataError: an id is out of range, or an index is damaged.
        """
        ids = self._check_ids(ids)
        starts, stops = self.ranges(ids)
        found: dict[int, TokenDocument] = {}
        for part, here in self._by_part(ids, [part.id for part in self._parts]):
            numbers = ids[here] - part.id + part.number
            places = part.documents.places(numbers)
            for index, number, (file, row) in zip(np.flatnonzero(here).tolist(), numbers.tolist(), places, strict=True):
                found[index] = TokenDocument(
                    id=int(ids[index]),
                    start=int(starts[index]),
                    stop=int(stops[index]),
                    token_file=part.token_file,
                    number=number,
                    file=file,
                    row=row,
                )
        return [found[index] for index in range(len(ids))]

    def read(self, document: int) -> NDArray[np.integer]:
        """Return the tokens of a document, with its end-of-text token, `uint16[N]` or `uint32[N]`.

        Raises:
            DataError: the id is out of range, or the tokens cannot be read.
        """
        starts, stops = self.ranges(np.array([document]))
        return self.tokens.read(int(starts[0]), int(stops[0]))

    def parts(self) -> list[tuple[int, int]]:
        """Return the first position, and one past the last, of the tokens of each file. No document is in two files."""
        return [(part.position, part.position + part.num_tokens) for part in self._parts]

    def _check_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return _check("document", ids, len(self))

    def _by_part(self, values: NDArray[np.int64], firsts: list[int]) -> Iterator[tuple[_Part, NDArray[np.bool_]]]:
        """Yield each part that some values lie in, with these values, given the first value of each part."""
        which = np.searchsorted(np.array(firsts), values, side="right") - 1
        for number in sorted(set(which.tolist())):
            yield self._parts[number], which == number


def _check(name: str, numbers: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Check and return numbers of tokens or documents, of which there are `count`."""
    numbers = as_int64(name, numbers, most=max(0, count - 1))
    if len(numbers) and not count:
        raise DataError(f"The tokens must have at least one document, got none for {name} {numbers[0]}.")
    return numbers


def open_documents(
    data: TokenData, split: Literal["train", "val"] = "train", *, report: Callable[[float], None] | None = None
) -> TokenDocuments:
    """Open the documents of a split.

    `prepare` writes an index beside each token file, `train.docs` beside `train.bin`. A token file without an index is
    read once to find its end-of-text tokens. Its index is written beside it, or kept in memory if the folder cannot be
    written; it does not tell the rows of the source.

    Args:
        data: opened tokens. Tokens that are being prepared have the documents that exist at the call.
        split: the split.
        report: called with the share done, if token files must be read.

    Raises:
        DataError: a file cannot be read.
    """
    check_type("data", data, TokenData, "the result of open_tokens", "Open the folder first.")
    check_choice("split", split, ("train", "val"))
    check_function("report", report)
    tokens = data.train if split == "train" else data.val
    if isinstance(tokens, GrowingTokens):
        existing = tokens.existing()
        if not tokens.is_complete:
            return _open_growing(tokens, existing, data.end_of_text)
        data = open_tokens(data.names, tokenizer=data.tokenizer)
        tokens = data.train if split == "train" else data.val
    if isinstance(tokens, TokenMixture):
        tokens = concatenate(tokens.sequences)
    assert isinstance(tokens, TokenSequence), "the tokens of open_tokens"
    indices = {span.path: open_index(span.path, data.file_digests[span.path]) for span in tokens.spans}
    sizes = {span.path: span.stop for span in tokens.spans if indices[span.path] is None}
    layouts = {span.path: span.layout for span in tokens.spans}
    advance = share_counter(sum(sizes.values()), report)
    documents = {
        path: index.documents
        if index is not None
        else _scan(path, layouts[path], data.file_digests[path], data.end_of_text, advance)
        for path, index in indices.items()
    }
    return TokenDocuments(tokens, [(span.path, span.start, span.stop, documents[span.path]) for span in tokens.spans])


def _scan(path: str, layout: Layout, sha256: str, end_of_text: int, advance: Callable[[int], None]) -> FileDocuments:
    """Find the documents of a token file, and write its index if the folder can be written."""
    manifest = _manifest_of(path, sha256)
    marks, num_tokens, found_sha256 = find_marks(path, layout, end_of_text, advance)
    ends = ends_of_marks(
        marks,
        num_tokens,
        # llm.c and modded-nanogpt write the token before each document.
        begins=layout.offset > 0 or (manifest is not None and manifest.options["documents"] == "wikitext-titles"),
        continues=manifest is not None and CONTINUING.get(manifest.split) == base_name(path),
    )
    if not is_uri(path) and found_sha256 == sha256:  # else the file has changed since it was opened
        try:
            write_index(Path(index_name(path)), ends, None, sha256=sha256)
        except OSError as error:
            _log.info("the index of %s is kept in memory: %s", path, error)
    chunk = DocumentEnds(np.array([num_tokens]), np.array([len(ends)]), lambda _: ends, num_tokens)
    return FileDocuments(chunk, lambda numbers: [(None, None)] * len(numbers))


def _manifest_of(path: str, sha256: str) -> Manifest | None:
    """Return the manifest of the folder that a token file was prepared into."""
    folder, name = path.rpartition("/")[0], base_name(path)
    manifest = read_manifest(folder) if folder and name in TOKEN_NAMES and not is_uri(path) else None
    return manifest if manifest is not None and manifest.files[name].sha256 == sha256 else None


def _open_growing(tokens: GrowingTokens, sequence: TokenSequence, end_of_text: int) -> TokenDocuments:
    """Open the documents of the shards that exist. A shard is read when one of its documents is asked for.

    Args:
        tokens: the tokens that are being prepared.
        sequence: those that exist.
        end_of_text: the token that ends a document, or begins it.
    """
    staging = staging_path(tokens.folder)
    plan = read_plan(staging)
    records = read_journal(shard_folder(staging, "all" if tokens.is_one_source else tokens.split))
    skipped = 1 if tokens.is_one_source and tokens.split == "train" else 0
    bounds = np.array([*accumulate(map(len, sequence.spans))], np.int64)
    counts = [record.num_documents for record in records[skipped : skipped + len(bounds)]]
    num_before = sum(record.num_documents for record in records[:skipped])
    first_title = -1
    if plan is not None and plan.options["documents"] == "wikitext-titles":
        begins = True
        if skipped and len(sequence) and int(sequence.read(0, 1)[0]) != end_of_text:
            num_before -= 1  # text before the first title continues the last document of the validation
        else:  # the first title ends no document
            first_title = next((chunk for chunk, count in enumerate(counts) if count), -1)
            counts = [count - (chunk == first_title) for chunk, count in enumerate(counts)]
    else:
        begins = False

    def load(chunk: int) -> NDArray[np.int64]:
        start = int(bounds[chunk - 1]) if chunk else 0
        marks = np.flatnonzero(sequence.read(start, int(bounds[chunk])) == end_of_text) + start
        return marks[int(chunk == first_title) :] if begins else marks + 1

    def places(numbers: NDArray[np.int64]) -> list[Place]:
        return [(None if plan is None else plan.source, number + num_before) for number in numbers.tolist()]

    documents = FileDocuments(DocumentEnds(bounds, np.array(counts, np.int64), load, len(sequence)), places)
    return TokenDocuments(sequence, [(str(tokens.folder), 0, len(sequence), documents)])
