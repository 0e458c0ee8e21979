"""Where documents come from: the built-in corpus, files of text, JSON lines or parquet, the Hugging Face hub."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileType

from owt_data._errors import DataError, file_errors
from owt_data._paths import check_type, is_uri, local_path

BUILTIN = "builtin"

# `load_dataset("openwebtext")` named a script, which datasets no longer runs; the parquet files are here.
_HUB_ALIASES = {"openwebtext": "Skylion007/openwebtext"}
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_SPLITS = ("train", "val")
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents that have been named but not yet read."""

    name: str
    """As the user wrote it."""

    kind: str
    """`builtin`, `text`, `json`, `parquet` or `hub`."""

    files: tuple[Path, ...] = ()
    """The files, in the order in which they are read; none for `hub`."""

    def digest(self, report: Callable[[float], None] | None = None) -> str:
        """SHA-256 of what the documents will be made of: file contents, or the hub's name.

        Args:
            report: called now and then with the share done.

        Raises:
            DataError: a file cannot be read.
        """
        digest = hashlib.sha256(f"{self.kind}:{self.name if self.kind == 'hub' else ''}".encode())
        total, done = self.num_bytes or 1, 0
        for path in self.files:
            contents = hashlib.sha256()
            with file_errors("readable", path), path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    contents.update(block)
                    done += len(block)
                    if report is not None:
                        report(done / total)
            digest.update(contents.digest())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int | None:
        """Size of all files; None for `hub`."""
        return sum(path.stat().st_size for path in self.files) if self.files else None

    @property
    def hub_address(self) -> tuple[str, str | None, str]:
        """Repository, configuration and split of a source on the hub."""
        repository, _, rest = self.name.partition(":")
        configuration, _, split = rest.partition(":")
        return _HUB_ALIASES.get(repository, repository), configuration or None, split or "train"


@file_errors("readable")
def find_source(names: str | Sequence[str]) -> Source:
    """Find what one or more names mean, without reading it.

    Args:
        names: `builtin` (this Python's standard library, one document per module), a `.txt` file (one
            document), a `.jsonl` or `.parquet` file (one document per row), a folder or a glob of such
            files, or a dataset on the Hugging Face hub as `NAME`, `NAME:CONFIGURATION` or
            `NAME:CONFIGURATION:SPLIT`. Several names must be files of one kind.

    Raises:
        DataError: nothing of that name can be read.
    """
    given = [names] if isinstance(names, str) else list(names)
    if not all(given) or not given:
        raise DataError(f"The sources must be names of files, folders or datasets, got {given}. Name one.")
    found = [_find_one(name) for name in given]
    if len(found) == 1:
        return found[0]
    kinds = {source.kind for source in found}
    if len(kinds) != 1 or kinds & {BUILTIN, "hub"}:
        raise DataError(
            f"Several sources must be files of one kind, .txt, .jsonl or .parquet, got {sorted(kinds)}. Prepare them "
            "one by one."
        )
    files = tuple(path for source in found for path in source.files)
    return Source(name=" ".join(given), kind=kinds.pop(), files=files)


def find_splits(names: str | Sequence[str]) -> dict[str, Source]:
    """Find sources whose names may say which split they are: `train=...` and `val=...`.

    Returns:
        `train` and `val` where the names say so, else the one entry `all`.

    Raises:
        DataError: nothing of a name can be read, or only some of the names say their split.
    """
    given = [names] if isinstance(names, str) else list(names)
    by_split: dict[str, list[str]] = {}
    for name in given:
        split, equals, rest = name.partition("=")
        by_split.setdefault(*((split, []) if equals and split in _SPLITS else ("all", []))).append(
            rest if equals and split in _SPLITS else name
        )
    if by_split.keys() not in ({"all"}, set(_SPLITS)):
        raise DataError(
            f"The sources must all name their split, train=... or val=..., or must not name one, got {given}. Name "
            "sources for both splits, or for neither."
        )
    return {split: find_source(by_split[split]) for split in sorted(by_split)}


def _find_one(name: str) -> Source:
    if is_uri(name):
        raise DataError(
            f"The source must be files of this machine or a dataset of the Hugging Face hub, got {name}. Copy the "
            "files here first."
        )
    if name == BUILTIN:
        return Source(name=name, kind=BUILTIN, files=_builtin_files())
    path = Path(local_path(name))
    outright = name.startswith((".", "/", "~", "file:/")) or name.endswith("/") or name.partition(":")[0].count("/") > 1
    if path.is_dir():
        if (path / "train.bin").exists():
            raise DataError(f"{name} must hold text to prepare, got a folder of token files. Use it as it is.")
        files = [file for file in sorted(path.iterdir()) if _suffix(file) in _KINDS]
    elif glob.has_magic(name) and not path.exists():
        files = [file for file in sorted(map(Path, glob.glob(os.fspath(path)))) if _suffix(file) in _KINDS]  # noqa: PTH207
    elif os.path.lexists(path) or _suffix(path) in {*_KINDS, ".bin"} or outright:
        files = [path]
    else:
        return Source(name=name, kind="hub")
    for file in files:
        check_type(os.fspath(file), FileType.File, "a file or a folder of files")
    kinds = {_KINDS.get(_suffix(file), f"{file.suffix or 'no suffix'} ({file})") for file in files}
    if len(kinds) != 1 or not kinds <= set(_KINDS.values()):
        raise DataError(
            f"{name} must be files of one of the kinds .txt, .jsonl and .parquet, got "
            f"{' and '.join(sorted(kinds)) or 'none of them'}. Name files of one kind."
        )
    return Source(name=name, kind=kinds.pop(), files=tuple(files))


def _suffix(path: Path) -> str:
    """The suffix that says the kind: JSON lines may be compressed."""
    return Path(path.stem).suffix if path.name.endswith((".jsonl.gz", ".json.gz")) else path.suffix


def _builtin_files() -> tuple[Path, ...]:
    """The standard library's modules, less its tests, which not every installation has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    return tuple(sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)))
