"""Files on disk and in object storage, by one name: a path, or a URI such as `s3://bucket/folder/train.bin`."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow.fs import FileSystem, FileType, LocalFileSystem

from owt_data._errors import DataError

BYTES_PER_TOKEN = 2
_STREAM_BYTES = 16 << 20


def is_uri(name: str) -> bool:
    """Whether a name is that of a file in object storage."""
    return "://" in name


def normalize(name: str) -> str:
    """A name that means the same from any working folder."""
    return name if is_uri(name) else os.fspath(Path(name).expanduser().absolute())


def join(folder: str, name: str) -> str:
    """The name of a file in a folder."""
    if not is_uri(folder):
        return os.path.join(folder, name)  # noqa: PTH118 - names here are strings
    parts = urlsplit(folder)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()


def base_name(name: str) -> str:
    """The last component of a name."""
    return (urlsplit(name).path if is_uri(name) else name).rstrip("/").rpartition("/")[2]


def locate(name: str) -> tuple[FileSystem, str]:
    """The file system that a name lies on, and its path there.

    Raises:
        DataError: it is a URI that pyarrow cannot read.
    """
    if not is_uri(name):
        return LocalFileSystem(), name
    try:
        return FileSystem.from_uri(name)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"expected a path, s3://... or gs://..., got {name}: {error}") from error


def file_type(name: str) -> FileType:
    """Whether it is a file, a folder or not there.

    Raises:
        DataError: the storage is out of reach.
    """
    filesystem, path = locate(name)
    try:
        return filesystem.get_file_info(path).type
    except OSError as error:
        raise DataError(f"{name} could not be looked up: {error}") from error


def file_size(name: str) -> int:
    """Bytes of a file that is known to exist."""
    filesystem, path = locate(name)
    return filesystem.get_file_info(path).size


def read_blocks(name: str, *, multiple: int = BYTES_PER_TOKEN) -> Iterator[bytes]:
    """The bytes of a file, in blocks whose lengths (but the last) are multiples of `multiple`.

    Raises:
        DataError: it cannot be read.
    """
    filesystem, path = locate(name)
    try:
        with filesystem.open_input_stream(path) as stream:
            while block := stream.read(_STREAM_BYTES // multiple * multiple):
                yield block
    except OSError as error:
        raise DataError(f"{name} could not be read: {error}") from error


def sha256(name: str) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    for block in read_blocks(name):
        digest.update(block)
    return digest.hexdigest()


class RemoteTokens:
    """A token file in object storage, as something to slice. Each slice is one ranged read."""

    def __init__(self, uri: str) -> None:
        filesystem, path = locate(uri)
        self._uri = uri
        self._file = filesystem.open_input_file(path)

    def __getitem__(self, tokens: slice) -> NDArray[np.uint16]:
        num_bytes = BYTES_PER_TOKEN * (tokens.stop - tokens.start)
        try:
            data = self._file.read_at(num_bytes, BYTES_PER_TOKEN * tokens.start)
        except OSError as error:
            raise DataError(f"{self._uri} could not be read: {error}") from error
        return np.frombuffer(data, dtype="<u2")
