"""Tokenizing process: text in, a shard file out. Imports little, because a machine runs many of them.

`python -m owt_data._prepare.tokenize_worker TOKENIZER` reads shards as an Arrow stream from standard input and answers
each shard with one line of JSON. `multiprocessing` is not used, because its processes run the main module of their
parent again, which breaks a script without a `__main__` guard.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from owt_data._complete_files import write_file
from owt_data._errors import DataError, file_errors
from owt_data._tokenizers import Tokenizer, encode_pieces, load_fast_tokenizer


def encode_shard(batch: pa.RecordBatch, tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Tokenize pieces of text into a shard file. The file gets its name when it is complete.

    Args:
        batch: `text: large_string`, `starts: bool` and `ends: bool`; see `encode_pieces`.
        tokenizer: the encoding.
        path: the file to write, as raw little-endian tokens; see `width_for`.

    Returns:
        `num_tokens`, `num_documents` and `sha256` of the file.

    Raises:
        DataError: the file cannot be written.
    """
    starts, ends = batch["starts"].to_pylist(), batch["ends"].to_pylist()
    tokens = encode_pieces(zip(batch["text"].to_pylist(), starts, ends, strict=True), tokenizer)
    with file_errors("writable", path):
        write_file(path, tokens.data)
    return {
        "num_tokens": len(tokens),
        "num_documents": sum(starts) + sum(ends),
        "sha256": hashlib.sha256(tokens.data).hexdigest(),
    }


def main(name: str) -> None:
    """Encode the shards from standard input; end at the first error, with the error as the answer."""
    try:
        tokenizer = load_fast_tokenizer(name)
        for batch, metadata in _receive():
            _answer(encode_shard(batch, tokenizer, Path(metadata["path"].decode())))
    except DataError as error:
        _answer({"error": str(error)})


def _receive() -> Iterator[tuple[pa.RecordBatch, pa.KeyValueMetadata]]:
    """Yield the shards from standard input."""
    try:
        with pa.ipc.open_stream(sys.stdin.buffer) as shards:
            yield from shards.iter_batches_with_custom_metadata()
    except (pa.ArrowInvalid, OSError):
        # The parent died and cut the stream. Arrow raises either error, depending on the position of the cut.
        sys.exit(1)


def _answer(answer: dict[str, Any]) -> None:
    """Print one line of JSON for the parent."""
    try:
        print(json.dumps(answer), flush=True)  # noqa: T201
    except BrokenPipeError:
        # The parent died. At exit Python flushes the line again, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
