"""Where documents come from: the built-in corpus, files of text, JSON lines or parquet, the Hugging Face hub."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from owt_data._errors import DataError

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
            try:
                with path.open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        contents.update(block)
                        done += len(block)
                        if report is not None:
                            report(done / total)
            except OSError as error:
                raise DataError(f"{path} could not be read: {error.strerror}: mend that or leave it out") from error
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
    if not given:
        raise DataError("expected the name of a source, got none")
    found = [_find_one(name) for name in given]
    if len(found) == 1:
        return found[0]
    kinds = {source.kind for source in found}
    if len(kinds) != 1 or kinds & {BUILTIN, "hub"}:
        raise DataError(
            f"expected several sources to be files of one kind, .txt, .jsonl or .parquet, got {sorted(kinds)}: "
            "prepare them one by one"
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
            f"expected every source to name its split, with train=... and val=... both there, or none to, got {given}"
        )
    return {split: find_source(by_split[split]) for split in sorted(by_split)}


def _find_one(name: str) -> Source:
    if not name:
        raise DataError("expected the name of a source, got an empty one")
    if "://" in name:
        raise DataError(
            f"The source must be files of this machine or a dataset of the Hugging Face hub, got {name}. Copy the "
            "files here first."
        )
    if name == BUILTIN:
        return Source(name=name, kind=BUILTIN, files=_builtin_files())
    path = Path(name).expanduser()
    if path.is_file():
        return Source(name=name, kind=_kind(path), files=(path,))
    if (path / "train.bin").exists():
        raise DataError(f"expected text to prepare in {name}, which holds token files already: give it as it is")
    if path.is_dir() or glob.has_magic(name):
        files = sorted(path.iterdir()) if path.is_dir() else sorted(map(Path, glob.glob(os.fspath(path))))  # noqa: PTH207
        files = [file for file in files if _suffix(file) in _KINDS and file.is_file()]
        kinds = {_kind(file) for file in files}
        if len(kinds) != 1:
            raise DataError(
                f"expected {name} to hold token files (train.bin, val.bin) or files of one of the kinds "
                f".txt, .jsonl and .parquet, found {' and '.join(sorted(kinds)) or 'none of them'}: name files of "
                "one kind"
            )
        return Source(name=name, kind=kinds.pop(), files=tuple(files))
    outright = name.startswith((".", "/", "~")) or name.endswith("/")
    if _suffix(path) in {*_KINDS, ".bin"} or outright or name.partition(":")[0].count("/") > 1:
        raise DataError(f"expected a file or folder, but {name} does not exist: check the path")
    return Source(name=name, kind="hub")


def _suffix(path: Path) -> str:
    """The suffix that says the kind: JSON lines may be compressed."""
    return Path(path.stem).suffix if path.name.endswith((".jsonl.gz", ".json.gz")) else path.suffix


def _kind(path: Path) -> str:
    if _suffix(path) not in _KINDS:
        raise DataError(f"expected a .txt, .jsonl or .parquet file, got {path}")
    return _KINDS[_suffix(path)]


def _builtin_files() -> tuple[Path, ...]:
    """The standard library's modules, less its tests, which not every installation has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    return tuple(sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)))
