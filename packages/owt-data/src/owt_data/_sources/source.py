"""Names of sources: the built-in corpus, files of text, JSON lines or parquet, datasets of the Hugging Face hub."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileType

from owt_data._digests import State, computed_once, file_sha256, file_state, lasting_state, share_counter
from owt_data._errors import DataError, RejectedDocumentsError, check_function, file_errors, show, show_name
from owt_data._paths import (
    MANIFEST_NAME,
    Names,
    group_by_split,
    holds_tokens,
    is_uri,
    list_names,
    local_path,
    look_up_as,
)

BUILTIN = "builtin"
HUB = "hub"

# Short names of datasets: repository and configuration. `load_dataset("openwebtext")` named a script, which datasets no
# longer runs; the repository here has the parquet files. The configurations of FineWeb are those that llm.c takes for
# its GPT-2 of 124M (karpathy/llm.c, dev/data/fineweb.py). All have one split, `train`, and the column `text`.
_HUB_ALIASES = {
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents that are named but not read."""

    name: str
    """As the user wrote it."""

    kind: str
    """`builtin`, `text`, `json`, `parquet` or `hub`."""

    files: tuple[Path, ...] = ()
    """The files, in the order of reading; empty for `hub`."""

    def digest(self, report: Callable[[float], None] | None = None) -> str:
        """Return the SHA-256 of the file contents, or of the name for `hub`.

        Large files, and many small ones, are read once. The digest is kept in the user's cache folder until a file
        changes.

        Args:
            report: called with the share done, after each block.

        Raises:
            DataError: a file cannot be read.
        """
        check_function("report", report)
        num_bytes = self.num_bytes or 0
        advance = share_counter(num_bytes, report)

        def read() -> str:
            digest = hashlib.sha256(f"{self.kind}:{self.name if self.kind == HUB else ''}".encode())
            for path in self.files:
                digest.update(bytes.fromhex(file_sha256(path, advance)))
            return digest.hexdigest()

        name = f"{self.kind} files {_sha256_of(str(path.absolute()) for path in self.files)}"
        return computed_once(name, num_bytes, self._state, read, advance)

    def _state(self) -> State | None:
        """Return the state of all files, or None while a change could leave it as it is."""
        states = [lasting_state(path) for path in self.files]
        return None if None in states else {"files": _sha256_of(map(str, states))}

    @property
    def num_bytes(self) -> int | None:
        """Size of all files; None for `hub`."""
        return sum(file_state(path).size for path in self.files) if self.files else None

    @property
    def hub_address(self) -> tuple[str, str | None, str]:
        """Repository, configuration and split on the hub."""
        repository, _, rest = self.name.partition(":")
        configuration, _, split = rest.partition(":")
        repository, default = _HUB_ALIASES.get(repository, (repository, None))
        return repository, configuration or default, split or "train"


def _sha256_of(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts that hold no null character."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(os.fsencode(text) + b"\0")
    return digest.hexdigest()


class SourceStates:
    """The files of sources, to notice that one of them changes while it is read.

    Args:
        sources: the sources, before their digests are computed.

    Raises:
        DataError: a file cannot be read.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = {path: file_state(path) for source in sources for path in source.files}
        # A second change of these may leave no trace in their states.
        self._digests = {path: file_sha256(path) for path, state in self._before.items() if not state.is_settled}

    def check_unchanged(self) -> None:
        """Check that no file has changed.

        Raises:
            RejectedDocumentsError: a file has changed. Tokens of its text are useless.
            DataError: a file cannot be read any more.
        """
        for path, before in self._before.items():
            if file_state(path) != before or self._digests.get(path) not in (None, file_sha256(path)):
                raise RejectedDocumentsError(
                    f"{show_name(path)} has changed while it was read. Run the same command again once it is complete."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class HubLayout:
    """Order of the rows in a hub dataset. A `Cursor` is valid for one layout only."""

    offline: bool
    """True if the rows come from a copy on this machine (`HF_HUB_OFFLINE=1`)."""

    revision: str | None
    """Commit of the dataset."""

    num_shards: int
    """Number of the dataset's shards."""

    def __str__(self) -> str:
        """Format the layout for errors."""
        mode = "a copy with HF_HUB_OFFLINE=1" if self.offline else "a stream without HF_HUB_OFFLINE"
        return f"revision {self.revision} in {self.num_shards} shards as {mode}"


@file_errors("readable")
def find_source(names: Names) -> Source:
    """Find the source that one or more names refer to. Files are not read.

    Args:
        names: `builtin` (this Python's standard library, one document per module), a `.txt` file (one
            document), a `.jsonl` or `.parquet` file (one document per row), a folder or a glob of such
            files, or a dataset on the Hugging Face hub as `NAME`, `NAME:CONFIGURATION` or
            `NAME:CONFIGURATION:SPLIT`. `openwebtext`, `fineweb` and `fineweb-edu` are short names of datasets. Several
            names must be files of one kind.

    Raises:
        DataError: a name does not exist, or the names do not fit together.
    """
    given = list_names(names)
    found = [_find_files(name) for name in given]
    kinds = {kind for kinds, _ in found for kind in kinds}
    alone = {BUILTIN, HUB} if len(given) == 1 else set()
    name = " ".join(given)
    if not kinds:
        raise DataError(f"{show_name(name)} must name .txt, .jsonl or .parquet files, got no file.")
    if len(kinds) != 1 or not kinds <= {*_KINDS.values(), *alone}:
        got = " and ".join(sorted(kinds))
        raise DataError(
            f"{show_name(name)} must be files of one kind (.txt, .jsonl or .parquet), got {show_name(got)}. Name one "
            "kind."
        )
    return Source(name=name, kind=kinds.pop(), files=tuple(path for _, files in found for path in files))


def find_splits(names: Names) -> dict[str, Source]:
    """Find sources whose names may give their split, as `train=...` and `val=...`.

    Returns:
        `train` and `val` if the names give them, else the single entry `all`.

    Raises:
        DataError: as `find_source`, or only some of the names give their split.
    """
    return {split: find_source(group) for split, group in group_by_split(names).items()}


def source_digest(names: Names) -> str:
    """Return the digest of text by its names, `Manifest.source_sha256` of the tokens that `prepare` makes of it.

    A large file is read once: see `Source.digest`.

    Args:
        names: see `find_source`. Names that begin with `train=` and `val=` give the split.

    Raises:
        DataError: as `find_source`, or a file cannot be read.
    """
    return digest_of(find_splits(names))


def digest_of(splits: Mapping[str, Source], report: Callable[[float], None] | None = None) -> str:
    """Return the digest of one source, or of both splits together.

    Args:
        splits: the sources, as `find_splits` returns them.
        report: called with the share of a source that is done, after each block.
    """
    digests = {split: source.digest(report) for split, source in splits.items()}
    return digests["all"] if "all" in digests else hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _find_files(name: str) -> tuple[set[str], list[Path]]:
    """Return the kinds of the files that a name refers to, and the files."""
    if not name:
        raise DataError("The source must have a name, got an empty text. Name a file or a dataset.")
    name.encode()  # `file_errors` reports other bytes
    if is_uri(name):
        constraint = "files on this machine or a dataset of the Hugging Face hub"
        raise DataError(f"The source must be {constraint}, got {show(name)}. Copy files of object storage here first.")
    if name == BUILTIN:
        return {BUILTIN}, _builtin_files()
    path = Path(local_path(name))
    is_path = name.startswith((".", "/", "~", "file:/")) or name.endswith("/") or name.partition(":")[0].count("/") > 1
    if path.is_dir():
        if holds_tokens(path):
            raise DataError(
                f"{show_name(name)} must hold text to prepare, got a folder of token files. Use it as it is."
            )
        files = [file for file in sorted(path.iterdir()) if _suffix(file) in _KINDS and file.name != MANIFEST_NAME]
    elif glob.has_magic(name) and not path.exists():
        files = [file for file in sorted(map(Path, glob.glob(os.fspath(path)))) if _suffix(file) in _KINDS]  # noqa: PTH207
    elif os.path.lexists(path) or _suffix(path) in {*_KINDS, ".bin"} or is_path:
        files = [path]
    else:
        return {HUB}, []
    for file in files:
        look_up_as(os.fspath(file), FileType.File, "a file or a folder of files")
    return {_KINDS.get(_suffix(file), f"{file.suffix or 'no suffix'} ({file})") for file in files}, files


def _suffix(path: Path) -> str:
    """Return the suffix that gives the kind, without the `.gz` of compressed JSON lines."""
    return Path(path.stem).suffix if path.name.endswith((".jsonl.gz", ".json.gz")) else path.suffix


def _builtin_files() -> list[Path]:
    """Return the modules of the standard library, without its tests, which some installations lack."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = {*subfolders} - skipped
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)
