"""Text to a part file: what the tokenizing processes run. Light to import, for there are many of them.

`python -m owt_data._prepare.tokenize_worker TOKENIZER` takes parts as an Arrow stream on its standard input and answers
each with a line of JSON. A process of its own kind, since those of `multiprocessing` begin by running
their parent's main module again, which a script without a guard does not survive.
"""

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tiktoken

from owt_data._errors import DataError
from owt_data._tokenizers import load_tokenizer


def encode_part(batch: pa.RecordBatch, tokenizer: tiktoken.Encoding, path: Path) -> dict[str, Any]:
    """Tokenize pieces of text into a part file, which appears under its name when it is whole.

    Args:
        batch: `text: large_string`, and `ends: bool`, whether a document ends with the piece and an
            end-of-text token follows.
        tokenizer: what to encode with. A special token's text inside a document is ordinary text.
        path: the file to write, as raw little-endian uint16.

    Returns:
        `num_tokens`, `num_documents` and `sha256` of the file; or `errno` and `reason` where it could not
        be written.
    """
    end_of_text = np.array([tokenizer.eot_token], dtype=np.uint32)
    pieces = []
    ends_of = batch["ends"].to_pylist()
    for text, ends in zip(batch["text"].to_pylist(), ends_of, strict=True):
        pieces.append(tokenizer.encode_to_numpy(text, allowed_special=set(), disallowed_special=()))
        if ends:
            pieces.append(end_of_text)
    tokens = np.concatenate(pieces).astype("<u2")
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(tokens.data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return {"errno": error.errno, "reason": error.strerror or str(error)}
    return {
        "num_tokens": len(tokens),
        "num_documents": sum(ends_of),
        "sha256": hashlib.sha256(tokens.data).hexdigest(),
    }


def main(name: str) -> None:
    """Encode parts from standard input until it ends; without the tokenizer, answer the first with the reason."""
    try:
        tokenizer = load_tokenizer(name)
    except DataError as error:
        _answer({"rejected": str(error)})
        return
    for batch, metadata in _receive():
        _answer(encode_part(batch, tokenizer, Path(metadata["path"].decode())))


def _receive() -> Iterator[tuple[pa.RecordBatch, pa.KeyValueMetadata]]:
    """Yield the parts from standard input."""
    try:
        with pa.ipc.open_stream(sys.stdin.buffer) as parts:
            yield from parts.iter_batches_with_custom_metadata()
    except (pa.ArrowInvalid, OSError):
        # The parent died and cut the stream: Arrow raises the one or the other, depending on where. Nobody is left
        # to tell. What fails while a part is encoded is not raised here.
        sys.exit(1)


def _answer(answer: dict[str, Any]) -> None:
    """Print a line of JSON for the parent."""
    try:
        print(json.dumps(answer), flush=True)  # noqa: T201
    except BrokenPipeError:
        # The parent died, so nobody is left to tell. At exit Python flushes the line again, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
