"""Process that trains a tokenizer, by the library tokenizers.

`python -m owt_data._prepare.tokenizer_worker` reads one line of JSON from standard input: the arguments of `_train`. It
prints lines of JSON: the progress, and at last `{"tokenizer": CONTENT}` or `{"error": SENTENCE}`. The end of standard
input, which the death of the parent causes, ends the process.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from owt_data._errors import DataError, show_name
from owt_data._sources.documents import Documents
from owt_data._sources.source import find_source

_END_OF_TEXT = "<|endoftext|>"
_LEAST_OCCURRENCES = 2
_REPORT_S = 0.2


def main() -> None:
    """Train as the line on standard input says."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        _answer({"tokenizer": _train(**request)})
    except DataError as error:
        _answer({"error": str(error)})


def _train(names: list[str], vocab_size: int, text_column: str, limit_rows: int | None) -> str:
    """Return the contents of `tokenizer.json`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=_LEAST_OCCURRENCES,
        # The order of the list is another one in each process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = Documents(find_source(names), text_column=text_column, limit_rows=limit_rows)
    reader = _Reader(documents)
    tokenizer.train_from_iterator(reader.texts(), trainer)
    if reader.error is not None:
        raise reader.error
    if not reader.num_bytes:
        raise DataError(f"{show_name(' '.join(names))} must hold text, got none. Name other text.")
    tokenizer.add_special_tokens([_END_OF_TEXT])
    return tokenizer.to_str(pretty=True)


class _Reader:
    """Reader of texts that reports the progress, and keeps an error, which the library would hide."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self.error: DataError | None = None
        self.num_bytes = 0
        """Bytes of text so far."""

    def texts(self) -> Iterator[str]:
        total, num_documents, last_s = self._documents.num_bytes(), 0, 0.0
        try:
            for chunk in self._documents.read():
                texts = chunk.texts.to_pylist()
                self.num_bytes += sum(len(text.encode()) for text in texts)
                num_documents += int(chunk.ends.sum())
                if time.monotonic() > last_s + _REPORT_S:
                    last_s = time.monotonic()
                    share = min(1.0, self.num_bytes / total) if total else None
                    _report("reading", share, num_documents, self.num_bytes)
                yield from texts
        except DataError as error:
            self.error = error
        _report("merging", None, num_documents, self.num_bytes)


def _report(stage: str, share: float | None, num_documents: int, num_bytes: int) -> None:
    _answer({"stage": stage, "fraction": share, "num_documents": num_documents, "num_bytes": num_bytes})


def _answer(answer: dict[str, Any]) -> None:
    """Print one line of JSON for the parent."""
    print(json.dumps(answer), flush=True)  # noqa: T201


def _end_with_input() -> None:
    """End the process when standard input ends, which it does when the parent dies."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
