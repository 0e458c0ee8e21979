"""Token files from shard files: find the documents, split them, copy the tokens."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import DataError, show_name
from owt_data._prepare.cpus import num_usable_cpus
from owt_data._tokenizer_names import Width
from owt_data._tokens.journal import ShardRecord, checksum, shard_path
from owt_data._tokens.manifest import FileRecord
from owt_data._tokens.sequence import SequenceReader, TokenSequence
from owt_data._tokens.summary import Summary

# Most tokens in memory before they are written. Each chunk takes one pass over all shards, so small files have
# `_NUM_CHUNKS` chunks, and larger files have more.
_CHUNK_TOKENS = 1 << 26
_NUM_CHUNKS = 16

Ranges = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Starts and exclusive ends of token ranges, in the order of copying."""


def document_ends(
    folder: Path,
    records: list[ShardRecord],
    end_of_text: int,
    report: Callable[[int], None],
    *,
    begins: bool,
    width: Width = "<u2",
) -> NDArray[np.int64]:
    """Return the exclusive end of each document in the sequence of all shards, and verify the shards' checksums.

    Args:
        folder: the folder of the shard files.
        records: the records of the shards.
        end_of_text: the token that ends a document, or begins it.
        report: called with the number of tokens of each finished shard.
        begins: whether the token begins a document. Then the first document also has the tokens before it.
        width: type of a token in a shard file.

    Raises:
        DataError: a shard file changed after it was written.
    """

    def ends_in(index: int) -> NDArray[np.int64]:
        path = shard_path(folder, index)
        if checksum(path) != records[index].sha256:
            remedy = "Check the disk, and that all machines share the folder, and run the same command again."
            raise DataError(f"{show_name(path)} has changed after it was written. {remedy}")
        return np.flatnonzero(np.fromfile(path, dtype=width) == end_of_text) + 1

    ends = [np.empty(0, dtype=np.int64)]
    before = 0
    with ThreadPoolExecutor(num_usable_cpus()) as threads:
        for record, ends_here in zip(records, threads.map(ends_in, range(len(records))), strict=True):
            ends.append(ends_here + before)
            before += record.num_tokens
            report(record.num_tokens)
    marks = np.concatenate(ends)
    return np.append(marks[1:] - 1, before) if begins else marks


def split_documents(ends: NDArray[np.int64], fraction: float, seed: int) -> dict[str, Ranges]:
    """Split documents as `train_test_split(test_size=fraction, seed=seed, shuffle=True)` of `datasets` does."""
    num_val = math.ceil(fraction * len(ends))
    starts = np.concatenate([[0], ends[:-1]])
    order = np.random.default_rng(seed).permutation(len(ends))
    train, val = order[num_val:], order[:num_val]
    return {"train": (starts[train], ends[train]), "val": (starts[val], ends[val])}


def split_at(boundary: int, num_tokens: int) -> dict[str, Ranges]:
    """Split at a token: training before it, validation from it on."""
    return {
        "train": (np.array([0]), np.array([boundary])),
        "val": (np.array([boundary]), np.array([num_tokens])),
    }


def documents_in(ends: NDArray[np.int64], ranges: Ranges) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the documents of a file that is copied from ranges of tokens. A range may begin or end inside a document.

    Args:
        ends: exclusive end of each document in all tokens, ascending.
        ranges: the ranges.

    Returns:
        The exclusive end in the file, and the number in all tokens, of each document of the file.
    """
    starts, stops = ranges
    by_start = np.argsort(starts)  # a search for ascending values is many times faster than one in another order
    first, last = np.empty_like(starts), np.empty_like(starts)
    first[by_start] = np.searchsorted(ends, starts[by_start], side="right")
    last[by_start] = np.searchsorted(ends, stops[by_start], side="left")
    counts = np.where(stops > starts, last + 1 - first, 0)
    which = np.repeat(np.arange(len(starts)), counts)
    numbers = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
    begins = np.maximum(np.where(numbers > 0, ends[numbers - 1], 0), starts[which])
    return np.cumsum(np.minimum(ends[numbers], stops[which]) - begins), numbers


def copy_ranges(
    sequence: TokenSequence, ranges: Ranges, path: Path, summary: Summary, report: Callable[[int], None]
) -> FileRecord:
    """Copy ranges of a sequence to a file, and wait until the file is on disk.

    Args:
        sequence: the source of the tokens.
        ranges: the ranges.
        path: the file to write.
        summary: an empty summary, which gets the tokens.
        report: called with the number of tokens of each write.
    """
    reader = SequenceReader(sequence, max_open_files=2, in_order=True)
    chunk_tokens = min(_CHUNK_TOKENS, max(1, len(sequence) // _NUM_CHUNKS))
    buffer = np.empty(chunk_tokens, dtype=sequence.dtype)
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:
        for starts, stops in _chunks(ranges, chunk_tokens):
            offsets = np.concatenate([[0], np.cumsum(stops - starts)])
            tokens = buffer[: offsets[-1]]
            # In the order of the shards: each shard file is opened once and read from start to end.
            for number in np.argsort(starts, kind="stable").tolist():
                reader.copy(int(starts[number]), tokens[offsets[number] : offsets[number + 1]])
            written = thread.submit(file.write, tokens.data)
            summary.add(tokens)
            written.result()
            report(len(tokens))
        file.flush()
        os.fsync(file.fileno())
    return summary.record()


def _chunks(ranges: Ranges, chunk_tokens: int) -> Iterator[Ranges]:
    """Yield the ranges in groups of at most `chunk_tokens`. A longer range is cut into groups of its own."""
    starts, stops = ranges
    up_to = np.cumsum(stops - starts)
    begin = 0
    while begin < len(starts):
        before = up_to[begin - 1] if begin else 0
        end = int(np.searchsorted(up_to, before + chunk_tokens, side="right"))
        if end > begin:
            yield starts[begin:end], stops[begin:end]
        else:
            end = begin + 1
            for start in range(int(starts[begin]), int(stops[begin]), chunk_tokens):
                yield np.array([start]), np.array([min(start + chunk_tokens, int(stops[begin]))])
        begin = end
