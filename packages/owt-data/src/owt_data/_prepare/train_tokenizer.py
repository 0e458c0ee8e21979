"""Training of a byte-level BPE tokenizer, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from owt_data._complete_files import made_folder, write_file
from owt_data._errors import (
    MOST_PROCESSES,
    DataError,
    check_function,
    check_integer,
    check_text,
    file_errors,
    show_name,
)
from owt_data._paths import Names, is_uri, list_names, local_path, name_text
from owt_data._prepare.cpus import num_usable_cpus
from owt_data._prepare.progress import Progress, Report
from owt_data._sources.source import SourceStates, find_splits
from owt_data._tokenizer_files import TOKENIZER_FILE

LEAST_IDS, _MOST_IDS = 257, 1 << 20
"""The 256 bytes and end-of-text."""


def train_tokenizer(
    sources: Names,
    out: str | os.PathLike[str],
    *,
    vocab_size: int,
    text_column: str = "text",
    limit_rows: int | None = None,
    num_processes: int | None = None,
    progress: Report | None = None,
) -> Path:
    """Train a byte-level BPE tokenizer on text, and write its `tokenizer.json`.

    GPT-2's pattern splits the text into words, and a word has at least two occurrences for a merge. The ids are the 256
    bytes, the merges in their order, and at last `<|endoftext|>`. The same text gives the same file, for any number of
    threads and after any number of kills: the file gets its name when it is complete. An equal file is left unchanged.

    Args:
        sources: see `find_source`. With `train=` and `val=`, only the text of `train=` is read.
        out: the folder to write `tokenizer.json` into, made if missing; or the file itself, whose name ends in `.json`.
        vocab_size: number of ids. Text with too few different words gives fewer.
        text_column: column with the text, in JSON lines, parquet files and hub datasets.
        limit_rows: number of rows to read, by default all.
        num_processes: number of threads that count the words. Default: the usable CPUs.
        progress: called with the stages `reading` and `merging`. The share of the second one is not known.

    Returns:
        The path of the file, a name for `load_tokenizer`.

    Raises:
        DataError: the source is empty or unreadable or changes while it is read, or the file cannot be written or
            exists with other contents.
    """
    vocab_size = check_integer("vocab", vocab_size, least=LEAST_IDS, most=_MOST_IDS)
    if limit_rows is not None:
        limit_rows = check_integer("limit_rows", limit_rows, least=1)
    if num_processes is not None:
        num_processes = check_integer("num_processes", num_processes, least=1, most=MOST_PROCESSES)
    check_text("text_column", text_column, least=1)
    check_function("progress", progress)
    splits = find_splits(sources)
    source = splits.get("train") or splits["all"]
    path = _path_of(out)
    with file_errors("readable and writable", path):
        before = SourceStates([source])
        request = {
            "names": _names_of_split(list_names(sources), is_split="train" in splits),
            "vocab_size": vocab_size,
            "text_column": text_column,
            "limit_rows": limit_rows,
        }
        content = ""
        with _worker(request, num_processes or num_usable_cpus()) as answers:
            for answer in answers:
                if "error" in answer:
                    before.check_unchanged()  # a better reason for text that looks damaged
                    raise DataError(answer["error"])
                content = answer.pop("tokenizer", "")
                if answer and progress is not None:
                    progress(Progress(**answer))
        before.check_unchanged()
        _write(path, content.encode())
    return path


def _names_of_split(names: list[str], *, is_split: bool) -> list[str]:
    """Return the names of the text to train on, which are absolute or names of datasets as the caller gave them."""
    return [name.removeprefix("train=") for name in names if name.startswith("train=")] if is_split else names


@file_errors("readable and writable")
def _path_of(out: str | os.PathLike[str]) -> Path:
    name = name_text(out)
    if not name or is_uri(name):
        raise DataError(f"The output must be a local or mounted folder, got {show_name(name) or 'an empty text'}.")
    path = Path(os.path.realpath(local_path(name)))
    path = path if path.suffix == ".json" else path / TOKENIZER_FILE
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise DataError(f"{show_name(parent)} must be a folder, got something else. Choose another name.")
    if path.exists() and not path.is_file():
        raise DataError(f"{show_name(path)} must be a file, got something else. Choose another name.")
    folder = next(parent for parent in path.parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"{show_name(folder)} must be writable, got {error.strerror}. Choose another folder."
        ) from error
    return path


def _write(path: Path, content: bytes) -> None:
    """Write the file, unless it exists."""
    if path.exists():
        if path.read_bytes() != content:
            raise DataError(f"{show_name(path)} holds another tokenizer. Choose another folder, or delete it.")
        return
    with made_folder(path.parent):
        for leftover in path.parent.glob(f"{path.name}.*.tmp"):  # of a kill
            leftover.unlink(missing_ok=True)
        write_file(path, memoryview(content), durable=True)


@contextmanager
def _worker(request: dict[str, Any], num_threads: int) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the training process. Yields its answers; the process ends with the block.

    The library does not notice Ctrl-C while it merges, and reads the number of its threads once per process.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "owt_data._prepare.tokenizer_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # only the parent receives Ctrl-C
        env={**os.environ, "RAYON_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "true"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        yield _answers(process)
    finally:
        process.kill()
        process.communicate()


def _answers(process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    answer: dict[str, Any] = {}
    for line in process.stdout:
        answer = json.loads(line)
        is_last = "tokenizer" in answer
        yield answer
        if is_last:
            return
    if "error" not in answer:
        raise DataError(
            f"The process that trains the tokenizer has ended with exit code {process.wait()} (-9: out of memory). Run "
            "the same command again, after -9 with less text."
        )
