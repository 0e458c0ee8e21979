"""Where documents come from: the built-in corpus, files of text, JSON lines or parquet, the Hugging Face hub."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx

from owt_data._errors import DataError

BUILTIN = "builtin"

# `load_dataset("openwebtext")` named a script, which datasets no longer runs; the parquet files are here.
_HUB_ALIASES = {"openwebtext": "Skylion007/openwebtext"}
_HUB_TIMEOUT_S = 10
_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents that have been named but not yet read."""

    name: str
    """As the user wrote it."""

    kind: str
    """`builtin`, `text`, `json`, `parquet` or `hub`."""

    files: tuple[Path, ...] = ()
    """The files, in the order in which they are read; none for `hub`."""

    def digest(self) -> str:
        """SHA-256 of what the documents will be made of: file contents, or the hub's name."""
        digest = hashlib.sha256(f"{self.kind}:{self.name if self.kind == 'hub' else ''}".encode())
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def find_source(name: str) -> Source:
    """Find what a name means, without reading it.

    Args:
        name: `builtin` (this Python's standard library, one document per module), a `.txt` file (one
            document), a `.jsonl` or `.parquet` file (one document per row), a folder of such files of
            one kind, or the name of a dataset on the Hugging Face hub.

    Raises:
        DataError: nothing of that name can be read.
    """
    if name == BUILTIN:
        return Source(name=name, kind=BUILTIN, files=_builtin_files())
    path = Path(name).expanduser()
    if path.is_file():
        return Source(name=name, kind=_loader(path), files=(path,))
    if path.is_dir():
        files = tuple(sorted(file for file in path.iterdir() if file.suffix in _LOADERS))
        kinds = {_loader(file) for file in files}
        if len(kinds) != 1:
            raise DataError(
                f"expected {name} to hold token files (train.bin, val.bin) or files of one of the kinds "
                f".txt, .jsonl and .parquet, found {sorted(kinds) or 'none of them'}"
            )
        return Source(name=name, kind=kinds.pop(), files=files)
    if path.suffix in {*_LOADERS, ".bin"} or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"expected a file or folder, but {name} does not exist: check the path")
    return Source(name=name, kind="hub")


def load_documents(source: Source, *, text_column: str = "text") -> datasets.Dataset:
    """The source's documents, in order: a dataset with the one column `text`.

    Raises:
        DataError: a file is unreadable, the text column is missing, or the hub is out of reach.
    """
    if source.kind == "hub":
        documents = _load_hub(source.name)
    elif source.kind in (BUILTIN, "text"):
        return datasets.Dataset.from_dict({"text": [_read_text(path, source.kind) for path in source.files]})
    else:
        documents = _load_files(source)
    if text_column not in documents.column_names:
        raise DataError(
            f"expected a text column {text_column!r} in {source.name}, found {documents.column_names}: "
            "name the right one with --text-column"
        )
    documents = documents.select_columns([text_column])
    dtype = getattr(documents.features[text_column], "dtype", "no text")
    if dtype not in ("string", "large_string"):
        raise DataError(f"expected text in the column {text_column!r} of {source.name}, found {dtype}: name another")
    return documents if text_column == "text" else documents.rename_column(text_column, "text")


def _loader(path: Path) -> str:
    if path.suffix not in _LOADERS:
        raise DataError(f"expected a .txt, .jsonl or .parquet file, got {path}")
    return _LOADERS[path.suffix]


def _builtin_files() -> tuple[Path, ...]:
    """The standard library's modules, less its tests, which not every installation has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    return tuple(sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)))


def _read_text(path: Path, kind: str) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace" if kind == BUILTIN else "strict")
    except UnicodeDecodeError as error:
        raise DataError(
            f"expected UTF-8 text in {path}, found another byte at {error.start}: convert it, for instance with iconv"
        ) from error


def _load_files(source: Source) -> datasets.Dataset:
    data_files = [os.fspath(path) for path in source.files if path.stat().st_size]
    if not data_files:
        raise DataError(f"expected documents in {source.name}, which is empty: name a file that holds some")
    try:
        return datasets.load_dataset(source.kind, data_files=data_files, split="train")
    except (DatasetGenerationError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"expected {source.kind} rows in {source.name}, but {error.__cause__ or error}") from error


def _load_hub(name: str) -> datasets.Dataset:
    repository = _HUB_ALIASES.get(name, name)
    try:
        if not HF_HUB_OFFLINE:
            # One question first: load_dataset repeats its own for half a minute where there is no network.
            HfApi().dataset_info(repository, timeout=_HUB_TIMEOUT_S)
        return datasets.load_dataset(repository, split="train")
    except (DatasetNotFoundError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise DataError(
            f"{name!r} is no file here, and as a dataset of the Hugging Face hub it could not be loaded "
            f"({type(error).__name__}): check the name and the network, or set HF_HUB_OFFLINE=1 to use a copy "
            "downloaded before"
        ) from error
