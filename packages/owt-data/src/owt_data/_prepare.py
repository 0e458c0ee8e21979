"""Text to token files: `train.bin`, `val.bin` and the manifest that vouches for them."""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import datasets
import numpy as np
import tiktoken
from numpy.typing import NDArray

from owt_data._errors import DataError
from owt_data._manifest import MANIFEST_NAME, TRAIN_NAME, VAL_NAME, FileRecord, Manifest, read_manifest
from owt_data._options import PrepareOptions
from owt_data._sources import BUILTIN, Source, find_source, load_documents
from owt_data._tokenizers import encode, load_tokenizer, tokenizer_digest

# The built-in corpus is small: the reference's 0.0005 would leave a single module to validate on.
_BUILTIN_VAL_FRACTION = 0.05
_POSITION_VAL_FRACTION = 0.1
_DOCUMENTS_VAL_FRACTION = 0.0005

_DOCUMENTS_PER_TASK = 64

Progress = Callable[[int, int, int], None]
"""Called as `(documents done, documents in all, tokens written)`."""


def prepare(source_name: str, out: Path, options: PrepareOptions, *, progress: Progress | None = None) -> Manifest:
    """Write `train.bin`, `val.bin` and `manifest.json` for a source into the folder `out`.

    The token files are those of a plain loop over `datasets`' `train_test_split`, `encode_ordinary` and
    end-of-text, byte for byte. They are written beside `out`, in `.NAME.partial`, and appear there all
    at once when they are whole. A folder that already holds this very source and these options is left
    as it is.

    Args:
        source_name: see `find_source`.
        out: the folder; made if missing.
        options: tokenizer and split.
        progress: called now and then.

    Raises:
        DataError: the source is empty or unreadable, the folder holds something else or cannot be
            written, or another process is preparing into it.
    """
    source = find_source(source_name)
    digest = source.digest()
    out = out.absolute()
    existing = read_manifest(out)
    if existing is not None:
        if (existing.source_sha256, existing.options) == (digest, dataclasses.asdict(options)):
            return existing
        raise DataError(
            f"expected {out} to be empty or prepared from this source with these options, but it was prepared from "
            f"{existing.source} with {existing.options}: choose another folder"
        )
    try:
        if out.exists() and any(out.iterdir()):
            raise DataError(f"expected {out} to be empty or missing, but it holds other files: choose another folder")
        with _staging_folder(out) as staging:
            tokenizer = load_tokenizer(options.tokenizer)
            files = _write_token_files(source, staging, options, tokenizer, progress)
            manifest = Manifest(
                tokenizer=options.tokenizer,
                vocab_size=tokenizer.n_vocab,
                tokenizer_sha256=tokenizer_digest(tokenizer),
                dtype="<u2",
                files=files,
                source=source.name,
                source_sha256=digest,
                options=dataclasses.asdict(options),
                version=version("owt-data"),
            )
            (staging / MANIFEST_NAME).write_text(manifest.to_json())
            staging.rename(out)
    except OSError as error:
        raise DataError(f"the token files could not be written to {out}: {error.strerror or error}") from error
    return manifest


@contextlib.contextmanager
def _staging_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, held against a second prepare, and gone again if this one fails.

    The lock is on the folder itself and goes with the process, however that ends; what a killed process
    left in it is swept out.
    """
    staging = out.with_name(f".{out.name}.partial")
    staging.mkdir(parents=True, exist_ok=True)
    folder = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is preparing into {out}: wait for it to end") from error
        for leftover in staging.iterdir():
            leftover.unlink()
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, staging)
            yield staging
            undo.pop_all()
    finally:
        os.close(folder)


def _write_token_files(
    source: Source,
    staging: Path,
    options: PrepareOptions,
    tokenizer: tiktoken.Encoding,
    progress: Progress | None,
) -> dict[str, FileRecord]:
    documents = load_documents(source, text_column=options.text_column)
    total = len(documents)
    if total == 0:
        raise DataError(f"expected documents in {source.name}, found none")
    split = options.split if options.split != "auto" else ("position" if total == 1 else "documents")
    if split == "position":
        records = _write_by_position(staging, documents, options, tokenizer, progress)
    else:
        fraction = options.val_fraction or (
            _BUILTIN_VAL_FRACTION if source.kind == BUILTIN else _DOCUMENTS_VAL_FRACTION
        )
        if total < 2:
            raise DataError(f"expected two documents or more in {source.name} to split: use --split position")
        parts = documents.train_test_split(test_size=fraction, seed=options.split_seed, shuffle=True)
        records, done, written = {}, 0, 0
        for name, part in ((TRAIN_NAME, parts["train"]), (VAL_NAME, parts["test"])):
            with _TokenWriter(staging / name) as writer:
                for tokens in _encode_in_order(_texts(part), tokenizer):
                    writer.write(tokens, num_documents=1)
                    done, written = done + 1, written + len(tokens)
                    if progress is not None:
                        progress(done, total, written)
            records[name] = writer.record()
    return records


def _write_by_position(
    staging: Path,
    documents: datasets.Dataset,
    options: PrepareOptions,
    tokenizer: tiktoken.Encoding,
    progress: Progress | None,
) -> dict[str, FileRecord]:
    """Write everything to the training file, then move its end over to the validation file."""
    total = len(documents)
    train_path, val_path = staging / TRAIN_NAME, staging / VAL_NAME
    ends: list[int] = []
    num_tokens = 0
    with _TokenWriter(train_path) as writer:
        for tokens in _encode_in_order(_texts(documents), tokenizer):
            writer.write(tokens, num_documents=1)
            num_tokens += len(tokens)
            ends.append(num_tokens)
            if progress is not None:
                progress(len(ends), total, num_tokens)
    num_train = round(num_tokens * (1 - (options.val_fraction or _POSITION_VAL_FRACTION)))
    tokens = np.memmap(train_path, dtype="<u2", mode="r")
    num_train_documents = int(np.searchsorted(ends, num_train)) + 1
    num_val_documents = total - int(np.searchsorted(ends, num_train, side="right"))
    records = {}
    with _TokenWriter(val_path) as writer:
        for start in range(num_train, num_tokens, 1 << 20):
            writer.write(tokens[start : min(start + (1 << 20), num_tokens)], num_documents=0)
    records[VAL_NAME] = dataclasses.replace(writer.record(), num_documents=num_val_documents)
    del tokens
    os.truncate(train_path, 2 * num_train)
    with train_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    records[TRAIN_NAME] = FileRecord(num_tokens=num_train, num_documents=num_train_documents, sha256=digest)
    return {name: records[name] for name in (TRAIN_NAME, VAL_NAME)}


def _texts(documents: datasets.Dataset) -> Iterator[str]:
    for start in range(0, len(documents), _DOCUMENTS_PER_TASK):
        texts = documents[start : start + _DOCUMENTS_PER_TASK]["text"]
        if None in texts:
            raise DataError("expected text in every row, found a row without: remove the rows that are null")
        yield from texts


def _encode_in_order(texts: Iterable[str], tokenizer: tiktoken.Encoding) -> Iterator[NDArray[np.uint16]]:
    """Encode documents on every core, a bounded number ahead, and yield them in order."""
    num_threads = os.cpu_count() or 1
    pending: deque[Future[list[NDArray[np.uint16]]]] = deque()

    def encode_all(task: list[str]) -> list[NDArray[np.uint16]]:
        return [encode(tokenizer, text) for text in task]

    with ThreadPoolExecutor(num_threads) as threads:
        for task in _tasks(texts):
            pending.append(threads.submit(encode_all, task))
            if len(pending) > 2 * num_threads:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def _tasks(texts: Iterable[str]) -> Iterator[list[str]]:
    task: list[str] = []
    for text in texts:
        task.append(text)
        if len(task) == _DOCUMENTS_PER_TASK:
            yield task
            task = []
    if task:
        yield task


class _TokenWriter:
    """Appends tokens to a file and keeps its count and checksum. Durable once closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._num_tokens = 0
        self._num_documents = 0

    def __enter__(self) -> "_TokenWriter":
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, tokens: NDArray[np.uint16], *, num_documents: int) -> None:
        data = tokens.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._num_tokens += len(tokens)
        self._num_documents += num_documents

    def record(self) -> FileRecord:
        return FileRecord(
            num_tokens=self._num_tokens, num_documents=self._num_documents, sha256=self._digest.hexdigest()
        )
