"""Search for a text in the decoded documents of token files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from owt_data._digests import share_counter
from owt_data._errors import DataError, check_function, check_text, check_type, show
from owt_data._tokenizers import load_tokenizer
from owt_data._tokens.token_documents import TokenDocuments

_CHUNK_TOKENS = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class TextMatches:
    """The places of a text in one document."""

    document: int
    """Id of the document."""

    num_matches: int
    """Number of places. They may overlap."""

    position: int
    """Position in the split of the token that has the first byte of the text at the first place."""


def find_text(
    documents: TokenDocuments, text: str, *, tokenizer: str, report: Callable[[float], None] | None = None
) -> list[TextMatches]:
    """Find the documents that contain a text, by its bytes in the decoded documents.

    All tokens are read, a chunk at a time. The tokens of the text itself would not do: they depend on what precedes it.

    Args:
        documents: the documents.
        text: the text, without a null character.
        tokenizer: name of the tokenizer of the tokens.
        report: called with the share done.

    Returns:
        The documents with their places, in the order of the tokens.

    Raises:
        DataError: the text is empty or has a null character, or the tokens cannot be read.
    """
    check_type("documents", documents, TokenDocuments, "the result of open_documents", "Open them first.")
    check_text("text", text, least=1)
    check_function("report", report)
    if "\0" in text:
        raise DataError(f"text must be without null characters, got {show(text)}.")
    found: dict[int, tuple[int, int]] = {}
    for places in _find_places(documents, text.encode(), tokenizer, report):
        ids, firsts, counts = np.unique(documents.find(places), return_index=True, return_counts=True)
        for document, position, count in zip(ids.tolist(), places[firsts].tolist(), counts.tolist(), strict=True):
            first, before = found.get(document, (position, 0))
            found[document] = first, before + count
    return [
        TextMatches(document=document, num_matches=count, position=position)
        for document, (position, count) in found.items()
    ]


def _find_places(
    documents: TokenDocuments, wanted: bytes, tokenizer: str, report: Callable[[float], None] | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of the tokens that begin a match, for each chunk with matches."""
    encoding = load_tokenizer(tokenizer)
    pieces = [encoding.decode_single_token_bytes(number) for number in range(encoding.n_vocab)]
    pieces[encoding.eot_token] = b"\0"  # no text has it, so no match goes beyond the end of a document
    content_of_pieces = np.frombuffer(b"".join(pieces), np.uint8)
    num_bytes = np.array([*map(len, pieces)])
    first_bytes = np.cumsum(num_bytes) - num_bytes
    advance = share_counter(len(documents.tokens), report)
    for first, last in documents.parts():
        for begin in range(first, last, _CHUNK_TOKENS):
            end = min(begin + _CHUNK_TOKENS, last)
            # A token has at least one byte. A match that ends in this chunk begins at most this many tokens before it.
            start = max(first, begin - len(wanted))
            tokens = documents.tokens.read(start, end)
            lengths = num_bytes[tokens]
            stops = np.cumsum(lengths)
            # As `decode_bytes` of tiktoken, and twice as fast.
            content = content_of_pieces[
                np.arange(stops[-1]) + np.repeat(first_bytes[tokens] - stops + lengths, lengths)
            ].tobytes()
            num_before = int(stops[begin - start - 1]) if begin > start else 0
            # The chunk before has the others.
            found = [place for place in _occurrences(content, wanted) if place + len(wanted) > num_before]
            advance(end - begin)
            if found:
                yield np.searchsorted(stops, np.array(found, np.int64), side="right") + start


def _occurrences(content: bytes, wanted: bytes) -> Iterator[int]:
    place = content.find(wanted)
    while place >= 0:
        yield place
        place = content.find(wanted, place + 1)
