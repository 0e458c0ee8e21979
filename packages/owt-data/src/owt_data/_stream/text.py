"""Text tokenized during training, as a Ray Dataset of blocks of one size."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal, get_args

import datasets
import numpy as np
import ray
import ray.data
from numpy.typing import NDArray

from owt_data._errors import (
    MOST_PROCESSES,
    DataError,
    check_choice,
    check_flag,
    check_function,
    check_integer,
    check_text,
    show,
)
from owt_data._options import DocumentsKind
from owt_data._paths import Names
from owt_data._sources.documents import Documents
from owt_data._sources.rows import StartsDocument, every_row, is_wikitext_title
from owt_data._sources.source import Source, find_source
from owt_data._stream.ray_reader import untyped
from owt_data._tokenizer_files import tokenizer_name
from owt_data._tokenizers import Tokenizer, encode_pieces, load_fast_tokenizer, load_tokenizer

TokenDtype = Literal["uint16", "uint32", "int32", "int64"]

_STARTS: dict[str, StartsDocument] = {"rows": every_row, "wikitext-titles": is_wikitext_title}
_ROWS_PER_READ = 256

# Small, for a first block soon.
_BLOCK_BYTES = 1 << 20

Rows = list[tuple[str, bool]]
"""Rows of text, each with True if it begins a document."""

Result = Callable[[], NDArray[np.integer]]
"""Function that waits for the tokens of rows."""


def stream_text(  # noqa: PLR0913 - the options of the blocks are independent
    source: Names | datasets.Dataset | datasets.IterableDataset,
    *,
    block_size: int,
    tokenizer: str = "gpt2",
    documents: DocumentsKind = "wikitext-titles",
    starts_document: StartsDocument | None = None,
    row_end: str = "",
    segment_ids: bool = False,
    start_block: int = 0,
    rank: int = 0,
    world_size: int = 1,
    text_column: str = "text",
    column: str = "tokens",
    dtype: TokenDtype = "uint16",
    batch_size: int = 256,
    num_cpus: int = 1,
    num_tasks: int = 1,
) -> ray.data.Dataset:
    r"""Stream rows of text as blocks of tokens, tokenized on demand, in order.

    Rows are tokenized one by one and joined. An end-of-text token precedes each row that begins a document. Tokens
    that do not fill a block begin the next block; only the tail of the last block is dropped. One Ray task reads the
    rows and joins their tokens in order. Hence the blocks are the same in every run, on every machine, and for any
    number of tokenizing tasks.

    Block `i` of rank `r` of `n` is block `start_block + r + i * n` of the text. The position of a block is known only
    after all tokens before it, so each rank tokenizes the complete text. For many workers, `prepare` takes less work.
    The numbers of blocks of two ranks may differ by one: ranks that compute together must agree on the last batch.

    Args:
        source: see `find_source`, or a loaded dataset. Each line of a `.txt` file is a row, including its line break;
            a line of blanks is the empty row, as in wikitext on the Hugging Face hub.
        block_size: tokens in a block.
        tokenizer: the tokenizer; see `load_tokenizer`.
        documents: the rows that begin a document, every row or the titles of wikitext.
        starts_document: predicate for rows that begin a document, in place of `documents`. Pickled for the task.
        row_end: text to append to each row, such as `"\n"`.
        segment_ids: whether to add the column `segment_ids`.
        start_block: first block of the text to yield. Earlier blocks are still read and tokenized.
        rank: index of this worker.
        world_size: number of workers.
        text_column: the column with the text.
        column: name of the column with the tokens.
        dtype: type of the tokens. It must hold all ids of the tokenizer.
        batch_size: rows of text that are tokenized at once.
        num_cpus: CPUs of the task that reads, and its number of tokenizing threads.
        num_tasks: number of Ray tasks of one CPU each that tokenize, on any node. 1: the task that reads also
            tokenizes.

    Returns:
        Rows of `tokens`, `dtype[block_size]`. With `segment_ids` also `segment_ids`, `int32[block_size]`, the index of
        the token's document in the block, from 0, for attention within documents.

    Raises:
        DataError: the source does not exist, or an argument is out of its range. Errors inside the source are raised
            by the task.
    """
    block_size = check_integer("block_size", block_size, least=1)
    start_block = check_integer("start_block", start_block, least=0)
    world_size = check_integer("world_size", world_size, least=1)
    rank = check_integer("rank", rank, least=0, most=world_size - 1)
    batch_size = check_integer("batch_size", batch_size, least=1)
    num_cpus = check_integer("num_cpus", num_cpus, least=1, most=MOST_PROCESSES)
    num_tasks = check_integer("num_tasks", num_tasks, least=1, most=MOST_PROCESSES)
    check_text("row_end", row_end)
    check_text("text_column", text_column, least=1)
    check_text("column", column, least=1)
    check_flag("segment_ids", segment_ids)
    check_function("starts_document", starts_document)
    check_choice("documents", documents, _STARTS)
    check_choice("dtype", dtype, get_args(TokenDtype))
    is_loaded = isinstance(source, datasets.Dataset | datasets.IterableDataset)
    found = source if is_loaded else find_source(source)
    starts = _STARTS[documents] if starts_document is None else starts_document
    tokenizer = tokenizer_name(tokenizer)
    num_ids = load_tokenizer(tokenizer).n_vocab  # raises the error of a failed download here, not in the task
    if num_ids > np.iinfo(dtype).max + 1:
        raise DataError(f"dtype must hold the {num_ids} ids of {show(tokenizer)}, got {dtype}. Choose uint32.")

    def produce(_: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        encoding = load_tokenizer(tokenizer)
        rows = _rows(found, text_column, starts, row_end)
        groups = iter(lambda: list(islice(rows, batch_size)), [])
        encode = _in_threads if num_tasks == 1 else _in_tasks
        pieces = encode(groups, tokenizer, num_cpus if num_tasks == 1 else num_tasks)
        skip = start_block + rank
        for blocks in _pack(pieces, block_size, max(1, _BLOCK_BYTES // (2 * block_size))):
            wanted = blocks[skip::world_size]
            # The distance from the end of these blocks to the next wanted block.
            skip += len(wanted) * world_size - len(blocks)
            if len(wanted):
                segments = {"segment_ids": _segments(wanted, encoding)} if segment_ids else {}
                yield {column: wanted.astype(dtype), **segments}

    dataset = ray.data.range(1, override_num_blocks=1).map_batches(untyped(produce), batch_size=None, num_cpus=num_cpus)
    dataset.context.target_max_block_size = _BLOCK_BYTES
    dataset.context.execution_options.preserve_order = True
    return dataset


def _rows(
    source: Source | datasets.Dataset | datasets.IterableDataset,
    text_column: str,
    starts_document: StartsDocument,
    row_end: str,
) -> Iterator[tuple[str, bool]]:
    """Yield the rows of a source, each with True if it begins a document."""
    if isinstance(source, Source):
        documents = Documents(source, text_column=text_column, starts_document=starts_document, row_end=row_end)
        for chunk in documents.read():
            yield from zip(chunk.texts.to_pylist(), chunk.starts.tolist(), strict=True)
    else:
        for batch in source.select_columns([text_column]).iter(_ROWS_PER_READ):
            yield from ((text + row_end, starts_document(text)) for text in dict(batch)[text_column])


def _encode(rows: Rows, tokenizer: str) -> NDArray[np.integer]:
    """Return the tokens of rows, with an end-of-text token before each row that begins a document."""
    return encode_pieces(((row, starts, False) for row, starts in rows), load_fast_tokenizer(tokenizer))


def _in_threads(groups: Iterator[Rows], tokenizer: str, num_threads: int) -> Iterator[NDArray[np.integer]]:
    """Tokenize groups of rows in threads of this process, and yield their tokens in order."""
    with ThreadPoolExecutor(num_threads) as threads:
        yield from _in_order((threads.submit(_encode, rows, tokenizer).result for rows in groups), 2 * num_threads)


def _in_tasks(groups: Iterator[Rows], tokenizer: str, num_tasks: int) -> Iterator[NDArray[np.integer]]:
    """Tokenize groups of rows in Ray tasks, and yield their tokens in order."""
    encode = ray.remote(num_cpus=1)(_encode)
    return _in_order((functools.partial(ray.get, encode.remote(rows, tokenizer)) for rows in groups), num_tasks)


def _in_order(results: Iterable[Result], max_pending: int) -> Iterator[NDArray[np.integer]]:
    """Yield results in order. To ask for a result starts its work; the number of pending results is bounded."""
    pending: deque[Result] = deque()
    for result in results:
        pending.append(result)
        if len(pending) >= max_pending:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


def _pack(pieces: Iterable[NDArray[np.integer]], block_size: int, rows_per_batch: int) -> Iterator[NDArray[np.integer]]:
    """Join pieces and cut them into `[rows, block_size]` of at least `rows_per_batch` rows; the last has fewer."""
    held: list[NDArray[np.integer]] = []
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


def _segments(blocks: NDArray[np.integer], encoding: Tokenizer) -> NDArray[np.int32]:
    """Return the index of each token's document in its block. An end-of-text token begins a document."""
    begun = np.cumsum(blocks == encoding.eot_token, axis=1, dtype=np.int32)
    return begun - begun[:, :1]
