"""Names of files: paths on disk, or URIs in object storage such as `s3://bucket/folder/train.bin`."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow.fs import FileInfo, FileSystem, FileType, LocalFileSystem

from owt_data._errors import DataError, file_errors, one_line

BYTES_PER_TOKEN = 2
_SPLITS = ("train", "val")
_STREAM_BYTES = 16 << 20

# One slash is enough, because `Path` shortens two slashes to one.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_LOCAL_URI = re.compile(r"file:(//(localhost)?)?(?=/(?!/))")
_TYPES = {
    FileType.NotFound: "a name that does not exist",
    FileType.File: "a file",
    FileType.Directory: "a folder",
    FileType.Unknown: "a pipe, a device or a socket",
}

# By default, Google's client repeats a failed request for 15 minutes. The first request looks up a name. Without a
# network or credentials it always fails. Failures of later reads are likely to pass.
_LOOKUP_RETRY_S, _READ_RETRY_S = 5, 60


def is_uri(name: str) -> bool:
    """Return whether a name is the URI of a file in object storage."""
    return _URI.match(name) is not None and _LOCAL_URI.match(name) is None


def local_path(name: str) -> str:
    """Return a name as a path: `file:///folder` is `/folder`, and `~` is the home folder.

    Raises:
        DataError: the user does not exist.
    """
    local = _LOCAL_URI.match(name)
    if local is not None:
        name = unquote(name[local.end() :])
    path = os.path.expanduser(name)  # noqa: PTH111 - Path.expanduser raises a RuntimeError for an unknown user
    if path.startswith("~"):
        raise DataError(f"{name} must begin with ~ or the ~name of a user, got no such user. Write ./~ for a file.")
    return path


def normalize(name: str) -> str:
    """Return a name that does not depend on the working folder."""
    return name if is_uri(name) else os.fspath(Path(local_path(name)).absolute())


def join(folder: str, name: str) -> str:
    """Return the name of a file in a folder."""
    if not is_uri(folder):
        return os.path.join(folder, name)  # noqa: PTH118 - names here are strings
    path, mark, query = folder.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def base_name(name: str) -> str:
    """Return the last component of a name."""
    return (name.partition("?")[0] if is_uri(name) else name).rstrip("/").rpartition("/")[2]


def locate(name: str, *, retry_s: int = _READ_RETRY_S) -> tuple[FileSystem, str]:
    """Return the file system of a name, and its path there.

    Args:
        name: a path or a URI.
        retry_s: seconds during which a failed request to Google's storage is repeated.

    Raises:
        DataError: pyarrow cannot parse the URI.
    """
    if not is_uri(name):
        return LocalFileSystem(), name
    uri = name
    if name.startswith(("gs:", "gcs:")) and "retry_limit_seconds" not in name:
        uri += f"{'&' if '?' in name else '?'}retry_limit_seconds={retry_s}"
    try:
        filesystem, path = FileSystem.from_uri(uri)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"The name must be a path, s3://bucket/... or gs://bucket/..., got {name} ({one_line(error)}). Correct it."
        ) from error
    return filesystem, path


def file_info(name: str) -> FileInfo:
    """Return the type and size of a file or folder; the type is `NotFound` if the name does not exist.

    Raises:
        DataError: the storage cannot be reached.
    """
    filesystem, path = locate(name, retry_s=_LOOKUP_RETRY_S)
    with file_errors("readable", name):
        return filesystem.get_file_info(path)


def check_type(name: str, wanted: FileType, constraint: str) -> FileInfo:
    """Check that a name exists and is a file or a folder, and return its type and size.

    Raises:
        DataError: the name does not exist or has another type, or the storage cannot be reached.
    """
    found = file_info(name)
    if found.type is not wanted:
        remedy = "Correct the name." if found.type is not FileType.NotFound else suggest_name(name, "Correct the name.")
        raise DataError(f"{name} must be {constraint}, got {_TYPES[found.type]}. {remedy}")
    return found


def suggest_name(name: str, remedy: str) -> str:
    """Return the remedy for a name that does not exist: a file or folder of a similar name, or else the given remedy.

    Each missing component is compared with the files and folders in its place, with and without their suffix.
    """
    path = Path("." if is_uri(name) else local_path(name))
    place = next((parent for parent in path.parents if parent.is_dir()), path)
    with contextlib.suppress(OSError):  # the folder cannot be read
        for part in path.relative_to(place).parts:
            if not (place / part).exists():
                entries = [entry for entry in sorted(place.iterdir()) if not entry.name.startswith(".")]
                known = {entry.stem: entry for entry in entries} | {entry.name: entry for entry in entries}
                (part,) = difflib.get_close_matches(part, known, n=1) or ("",)
                if not part:
                    return remedy
                place = known[part]
            else:
                place /= part
        return f"Did you mean {place}?" if place != path else remedy
    return remedy


def read_blocks(name: str) -> Iterator[bytes]:
    """Yield the bytes of a file, in blocks of complete tokens.

    Raises:
        DataError: the file cannot be read.
    """
    filesystem, path = locate(name)
    with file_errors("readable", name), filesystem.open_input_stream(path) as stream:
        while block := stream.read(_STREAM_BYTES):
            yield block


def group_by_split(names: Sequence[str]) -> dict[str, list[str]]:
    """Group names by the split that they may give, as `train=...` and `val=...`.

    Returns:
        The names of `train` and of `val` if they give their split, else all names as `all`.

    Raises:
        DataError: there are no names, only some give their split, or all give the same split.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        split, equals, rest = name.partition("=")
        is_given = equals and split in _SPLITS
        groups.setdefault(split if is_given else "all", []).append(rest if is_given else name)
    if groups.keys() not in ({"all"}, set(_SPLITS)):
        raise DataError(
            f"The names must give both splits, train=... and val=..., or no split, got {list(names)}. Add them."
        )
    return {split: groups[split] for split in sorted(groups)}


class RemoteTokens:
    """Token file in object storage, read by slices. Each slice is one ranged read."""

    def __init__(self, uri: str) -> None:
        filesystem, path = locate(uri)
        self._uri = uri
        with file_errors("readable", uri):
            self._file = filesystem.open_input_file(path)

    def __getitem__(self, tokens: slice) -> NDArray[np.uint16]:
        num_bytes = BYTES_PER_TOKEN * (tokens.stop - tokens.start)
        with file_errors("readable", self._uri):
            data = self._file.read_at(num_bytes, BYTES_PER_TOKEN * tokens.start)
        return np.frombuffer(data, dtype="<u2")
