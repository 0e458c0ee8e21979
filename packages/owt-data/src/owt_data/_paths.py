"""Files on disk and in object storage, by one name: a path, or a URI such as `s3://bucket/folder/train.bin`."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow.fs import FileInfo, FileSystem, FileType, LocalFileSystem

from owt_data._errors import DataError, file_errors, one_line

BYTES_PER_TOKEN = 2
_STREAM_BYTES = 16 << 20

# Also what `Path` makes of a URI, with one slash less.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_LOCAL_URI = re.compile(r"file:(//(localhost)?)?(?=/(?!/))")
_TYPES = {
    FileType.NotFound: "a name that does not exist",
    FileType.File: "a file",
    FileType.Directory: "a folder",
    FileType.Unknown: "a pipe, a device or a socket",
}

# How long Google's client repeats a request, by default 15 minutes. Without a network or credentials the first one
# fails, which looks a name up. Once that has worked, a failure is likely to pass.
_LOOKUP_RETRY_S, _READ_RETRY_S = 5, 60


def is_uri(name: str) -> bool:
    """Whether a name is that of a file in object storage."""
    return _URI.match(name) is not None and _LOCAL_URI.match(name) is None


def local_path(name: str) -> str:
    """A name as a path: `file:///folder` means `/folder`, and `~` the user's folder.

    Raises:
        DataError: the user does not exist.
    """
    local = _LOCAL_URI.match(name)
    if local is not None:
        name = unquote(name[local.end() :])
    path = os.path.expanduser(name)  # noqa: PTH111 - Path's own raises a RuntimeError for an unknown user
    if path.startswith("~"):
        raise DataError(f"{name} must begin with ~ or the ~name of a user, got no such user. Write ./~ for a file.")
    return path


def normalize(name: str) -> str:
    """A name that means the same from any working folder."""
    return name if is_uri(name) else os.fspath(Path(local_path(name)).absolute())


def join(folder: str, name: str) -> str:
    """The name of a file in a folder."""
    if not is_uri(folder):
        return os.path.join(folder, name)  # noqa: PTH118 - names here are strings
    path, mark, query = folder.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def base_name(name: str) -> str:
    """The last component of a name."""
    return (name.partition("?")[0] if is_uri(name) else name).rstrip("/").rpartition("/")[2]


def locate(name: str, *, retry_s: int = _READ_RETRY_S) -> tuple[FileSystem, str]:
    """The file system that a name lies on, and its path there.

    Args:
        name: a path or a URI.
        retry_s: seconds for which a request to Google's storage is repeated.

    Raises:
        DataError: it is a URI that pyarrow cannot read.
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
    """Whether it is a file, a folder or not there, and its size.

    Raises:
        DataError: the storage is out of reach.
    """
    filesystem, path = locate(name, retry_s=_LOOKUP_RETRY_S)
    with file_errors("readable", name):
        return filesystem.get_file_info(path)


def check_type(name: str, wanted: FileType, constraint: str) -> FileInfo:
    """The size and type of a file or a folder that must be there.

    Raises:
        DataError: it is missing or something else, or the storage is out of reach.
    """
    found = file_info(name)
    if found.type is not wanted:
        raise DataError(f"{name} must be {constraint}, got {_TYPES[found.type]}. Correct the name.")
    return found


def read_blocks(name: str) -> Iterator[bytes]:
    """The bytes of a file, in blocks of complete tokens.

    Raises:
        DataError: it cannot be read.
    """
    filesystem, path = locate(name)
    with file_errors("readable", name), filesystem.open_input_stream(path) as stream:
        while block := stream.read(_STREAM_BYTES):
            yield block


class RemoteTokens:
    """A token file in object storage, as something to slice. Each slice is one ranged read."""

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
