"""Text tokenized while training, as a Ray Dataset of fixed blocks."""

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
"""Whether a row of text begins a document."""

_TITLE = re.compile(r" = [^=](?:.*[^=])? = \n?")
_ROWS_PER_TASK = 256

# Small, so that the first block arrives soon.
_BLOCK_BYTES = 1 << 20


def is_wikitext_title(row: str) -> bool:
    r"""Whether a row of wikitext is an article's title, ` = Title = `; headings within have more signs.

    >>> is_wikitext_title(" = Robert Boulter = \n"), is_wikitext_title(" = = Career = = \n")
    (True, False)
    """
    return _TITLE.fullmatch(row) is not None


def every_row(row: str) -> bool:
    """Every row is a document, as in JSON lines of whole articles."""
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
    """Tokenize rows of text while they are used, into blocks of one size, in order.

    Rows are tokenized one by one and joined; an end-of-text token comes before each row that begins a
    document. What a batch of rows leaves over begins the next block, so that only the tail of the last is
    dropped. One Ray task does it all, and so gives the same blocks each time, on every machine.

    Args:
        source: see `find_source`, or a dataset that was loaded. Of a `.txt` file, each line is a row, its
            line end included.
        block_size: tokens in a block.
        tokenizer: what to encode with.
        starts_document: which rows begin a document. Travels to the task.
        segment_ids: whether to say which tokens belong together.
        start_block: first block to yield; those before are read and tokenized all the same.
        text_column: the column with the text.
        num_cpus: cores that the task takes, and threads that tokenize in it.

    Returns:
        Rows `tokens: uint16[block_size]`; with `segment_ids` also `segment_ids: int32[block_size]`, the
        number of the token's document within the block, from 0: attention may be kept within equal ones.

    Raises:
        DataError: the source cannot be found, or a number makes no sense. What is wrong inside the source
            is raised by the task.
    """
    check_integer("block_size", block_size, least=1)
    check_integer("start_block", start_block, least=0)
    check_integer("num_cpus", num_cpus, least=1)
    found = find_source(source) if isinstance(source, str | list) else source
    load_tokenizer(tokenizer)  # so that a failing download is said now, not in a task

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
    """The rows, one by one."""
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
    """Tokens of the rows, in order, some hundred rows at a time, a bounded number ahead."""

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
    """Pieces joined and cut into `[rows, block_size]`, with at least `rows_per_batch` rows, but in the last."""
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
    """Per token, the number of its document within the block: it goes up at each end-of-text token."""
    begun = np.cumsum(blocks == encoding.eot_token, axis=1, dtype=np.int32)
    return begun - begun[:, :1]
