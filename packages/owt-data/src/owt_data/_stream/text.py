"""Text tokenized during training, as a Ray Dataset of blocks of one size."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import ray.data
import tiktoken
from numpy.typing import NDArray

from owt_data._errors import check_integer, file_errors, not_utf8
from owt_data._options import TokenizerName
from owt_data._sources.documents import Documents
from owt_data._sources.names import BUILTIN, Source, find_source
from owt_data._stream.windows import untyped
from owt_data._tokenizers import load_tokenizer

StartsDocument = Callable[[str], bool]
"""Predicate: True for a row of text that begins a document."""

_TITLE = re.compile(r" = [^=](?:.*[^=])? = \n?")
_ROWS_PER_TASK = 256

# Small, for a first block soon.
_BLOCK_BYTES = 1 << 20


def is_wikitext_title(row: str) -> bool:
    r"""Return whether a row of wikitext is an article's title, ` = Title = `. Section headings have more signs.

    >>> is_wikitext_title(" = Robert Boulter = \n"), is_wikitext_title(" = = Career = = \n")
    (True, False)
    """
    return _TITLE.fullmatch(row) is not None


def every_row(row: str) -> bool:
    """Return True: each row is a document, as in JSON lines of articles."""
    return True


def stream_text(
    source: str | list[str] | datasets.Dataset | datasets.IterableDataset,
    *,
    block_size: int,
    tokenizer: TokenizerName = "gpt2",
    starts_document: StartsDocument = is_wikitext_title,
    segment_ids: bool = False,
    start_block: int = 0,
    text_column: str = "text",
    num_cpus: int = 1,
) -> ray.data.Dataset:
    """Stream rows of text as blocks of tokens, tokenized on demand, in order.

    Rows are tokenized one by one and joined. An end-of-text token precedes each row that begins a document. Tokens
    that do not fill a block begin the next block; only the tail of the last block is dropped. A single Ray task does
    the work, so the blocks are the same in every run on every machine.

    Args:
        source: see `find_source`, or a loaded dataset. Each line of a `.txt` file is a row, including its line end.
        block_size: tokens in a block.
        tokenizer: name of the tokenizer.
        starts_document: predicate for rows that begin a document. Pickled for the task.
        segment_ids: whether to add the column `segment_ids`.
        start_block: first block to yield. Earlier blocks are still read and tokenized.
        text_column: the column with the text.
        num_cpus: CPUs of the task, and its number of tokenizing threads.

    Returns:
        Rows `tokens: uint16[block_size]`. With `segment_ids` also `segment_ids: int32[block_size]`, the index of the
        token's document in the block, from 0, for attention within documents.

    Raises:
        DataError: the source does not exist, or a number is out of its range. Errors inside the source are raised by
            the task.
    """
    check_integer("block_size", block_size, least=1)
    check_integer("start_block", start_block, least=0)
    check_integer("num_cpus", num_cpus, least=1)
    found = find_source(source) if isinstance(source, str | list) else source
    load_tokenizer(tokenizer)  # raises the error of a failed download here, not in the task

    def produce(_: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        encoding = load_tokenizer(tokenizer)
        rows_per_batch = max(1, _BLOCK_BYTES // (2 * block_size))
        pieces = _encode(_rows(found, text_column), encoding, starts_document, num_cpus)
        skip = start_block
        for blocks in _pack(pieces, block_size, rows_per_batch):
            wanted = blocks[skip:]
            skip = max(0, skip - len(blocks))
            if len(wanted):
                yield {"tokens": wanted, **({"segment_ids": _segments(wanted, encoding)} if segment_ids else {})}

    dataset = ray.data.range(1, override_num_blocks=1).map_batches(untyped(produce), batch_size=None, num_cpus=num_cpus)
    dataset.context.target_max_block_size = _BLOCK_BYTES
    dataset.context.execution_options.preserve_order = True
    return dataset


def _rows(source: Source | datasets.Dataset | datasets.IterableDataset, text_column: str) -> Iterator[str]:
    """Yield the rows of a source."""
    if not isinstance(source, Source):
        for batch in source.select_columns([text_column]).iter(_ROWS_PER_TASK):
            yield from dict(batch)[text_column]
    elif source.kind in ("text", BUILTIN):
        errors = "replace" if source.kind == BUILTIN else "strict"
        for path in source.files:
            yield from _lines(path, errors)
    else:
        for chunk in Documents(source, text_column=text_column).read():
            yield from chunk.texts.to_pylist()


def _lines(path: Path, errors: str) -> Iterator[str]:
    with file_errors("readable", path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                raise not_utf8(path, f"in line {number}") from error


def _encode(
    rows: Iterator[str], encoding: tiktoken.Encoding, starts_document: StartsDocument, num_threads: int
) -> Iterator[NDArray[np.uint16]]:
    """Yield the tokens of the rows in order, in groups of rows. The number of pending groups is bounded."""

    def encode(task: list[str]) -> NDArray[np.uint16]:
        tokens: list[int] = []
        for row in task:
            if starts_document(row):
                tokens.append(encoding.eot_token)
            tokens += encoding.encode_ordinary(row)
        return np.array(tokens, dtype=np.uint16)

    pending: deque[Future[NDArray[np.uint16]]] = deque()
    with ThreadPoolExecutor(num_threads) as threads:
        while task := list(islice(rows, _ROWS_PER_TASK)):
            pending.append(threads.submit(encode, task))
            if len(pending) > 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _pack(pieces: Iterable[NDArray[np.uint16]], block_size: int, rows_per_batch: int) -> Iterator[NDArray[np.uint16]]:
    """Join pieces and cut them into `[rows, block_size]` of at least `rows_per_batch` rows; the last has fewer."""
    held: list[NDArray[np.uint16]] = []
    num_held = 0
    for piece in pieces:
        held.append(piece)
        num_held += len(piece)
        if num_held >= rows_per_batch * block_size:
            tokens = np.concatenate(held)
            whole = num_held // block_size * block_size
            yield tokens[:whole].reshape(-1, block_size)
            held, num_held = [tokens[whole:]], num_held - whole
    if num_held >= block_size:
        yield np.concatenate(held)[: num_held // block_size * block_size].reshape(-1, block_size)


def _segments(blocks: NDArray[np.uint16], encoding: tiktoken.Encoding) -> NDArray[np.int32]:
    """Return the index of each token's document in its block. An end-of-text token begins a document."""
    begun = np.cumsum(blocks == encoding.eot_token, axis=1, dtype=np.int32)
    return begun - begun[:, :1]
