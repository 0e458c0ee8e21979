"""SHA-256 of files and of lists of files. Those of much text are kept in the user's cache until a file changes."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import platformdirs

from owt_data._complete_files import write_file
from owt_data._errors import DataError, file_errors, show_name
from owt_data._json_types import parse_record, read_json
from owt_data._paths import open_regular

_FORMAT = 1
_BLOCK_BYTES = 4 << 20

# What is smaller is read each time: a cache would save less than a millisecond.
_REMEMBERED_BYTES = 1 << 20

# A file that has just been written can change again without another time of change, because clocks of file systems
# have steps of up to two seconds.
_SETTLED_S = 2


State = dict[str, int | str]
"""State of what was read. It differs once another read would give something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """State of a file, which differs once the file is written or replaced."""

    size: int
    """Size in bytes."""

    inode: int
    """Number of the file in its file system."""

    mtime_ns: int
    """Time of the last change of the contents, in nanoseconds since 1970."""

    ctime_ns: int
    """Time of the last change of the contents or of the attributes. No program can set it."""

    @property
    def is_settled(self) -> bool:
        """Return whether a later change will change the state."""
        return time.time_ns() - self.ctime_ns > _SETTLED_S * 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Contents of a file of the cache."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    format: int
    version: str
    path: str
    """The file, or another name of what was read."""
    state: State
    sha256: str


def file_state(path: str | os.PathLike[str]) -> FileState:
    """Return the state of a file.

    Raises:
        DataError: the file is missing.
    """
    with file_errors("readable", path):
        found = os.stat(path)  # noqa: PTH116 - names here are strings
    return FileState(size=found.st_size, inode=found.st_ino, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)


def lasting_state(path: str | os.PathLike[str]) -> State | None:
    """Return the state of a file, or None while a change could leave the state as it is.

    Raises:
        DataError: the file is missing.
    """
    state = file_state(path)
    return asdict(state) if state.is_settled else None


def known_sha256(path: str | os.PathLike[str]) -> str | None:
    """Return the SHA-256 of a file if the cache has it, without reading the file; else None."""
    name = os.path.abspath(path)  # noqa: PTH100 - names here are strings
    try:
        return _recall(name, asdict(file_state(name)))
    except DataError:  # missing
        return None


def file_sha256(path: str | os.PathLike[str], advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return the SHA-256 of a file. A large file is read once, until it changes.

    Args:
        path: the file.
        advance: called with the number of bytes of each block.

    Raises:
        DataError: the file cannot be read.
    """
    name = os.path.abspath(path)  # noqa: PTH100 - names here are strings

    def read() -> str:
        digest = hashlib.sha256()
        with file_errors("readable", path), open_regular(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                advance(len(block))
        return digest.hexdigest()

    return computed_once(name, file_state(path).size, lambda: lasting_state(path), read, advance)


def computed_once(
    name: str,
    num_bytes: int,
    state_of: Callable[[], State | None],
    compute: Callable[[], str],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Return the SHA-256 that a function computes, once for each state of what it reads.

    Args:
        name: what is read, and what else is checked. The cache keeps the digest of one state.
        num_bytes: the bytes that are read.
        state_of: returns the state, or None while a change could leave the state as it is.
        compute: reads, and returns the digest.
        advance: called with the number of bytes, if they need not be read.

    Raises:
        DataError: a file cannot be read.
    """
    state = state_of() if num_bytes >= _REMEMBERED_BYTES else None
    known = None if state is None else _recall(name, state)
    if known is not None:
        advance(num_bytes)
        return known
    sha256 = compute()
    if state is not None and state_of() == state:
        _store(name, state, sha256)
    return sha256


def check_sha256(
    path: str | os.PathLike[str], expected: str, advance: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Check the SHA-256 of a file.

    Raises:
        DataError: it is another one, or the file cannot be read.
    """
    found = file_sha256(path, advance)
    if found != expected:
        raise DataError(
            f"{show_name(path)} is damaged: its SHA-256 is {found}, and {expected} in its manifest. Restore it from a "
            "copy, or prepare the text again."
        )


def share_counter(total: int, report: Callable[[float], None] | None) -> Callable[[int], None]:
    """Return a function that takes numbers of finished bytes or tokens, and reports the share of `total` done."""
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        if report is not None:
            report(min(1.0, done / max(1, total)))

    return advance


def _recall(name: str, state: State) -> str | None:
    """Return the digest of what has a name, if the cache has that of this state; else None."""
    try:
        with open_regular(_entry_path(name), "rb") as file:
            entry = parse_record(_Entry, read_json(file), "", number=_FORMAT)
        return entry.sha256 if (entry.path, entry.state) == (name, state) else None
    except (OSError, ValueError):  # missing, of another version, or damaged
        return None


def _entry_path(name: str) -> Path:
    key = hashlib.sha256(os.fsencode(name)).hexdigest()
    return platformdirs.user_cache_path("owt-data") / "digests" / f"{key}.json"


def _store(name: str, state: State, sha256: str) -> None:
    """Write an entry of the cache. Without a cache, the digest is computed again next time."""
    entry = _Entry(format=_FORMAT, version=version("owt-data"), path=name, state=state, sha256=sha256)
    path = _entry_path(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, json.dumps(asdict(entry)))
        for leftover in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
