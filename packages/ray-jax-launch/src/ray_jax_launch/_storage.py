"""Where a run is kept: a folder, or a place in object storage. Light to import, for command lines."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_jax_launch._errors import LaunchError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

StoragePath = Path | str
"""A folder, or a URI such as `s3://bucket/runs`."""


def join_path(place: StoragePath, *names: str) -> StoragePath:
    """A name below a place, of the same kind. The options of a URI, after `?`, stay at its end."""
    if not is_uri(place):
        return Path(place, *names)
    address, mark, options = str(place).partition("?")
    return "/".join((address.rstrip("/"), *names)) + mark + options


def is_uri(place: StoragePath) -> bool:
    """Whether this is object storage, and not a folder."""
    return isinstance(place, str) and "://" in place


def open_uri(uri: str, *, create: bool = False) -> "tuple[FileSystem, str]":
    """The filesystem that a URI names, and the path there, as Ray opens them.

    Args:
        uri: such as `s3://bucket/path`.
        create: make the folder, which also tells whether writing is allowed. A bucket is never made.

    Raises:
        LaunchError: no such filesystem is known, or it does not let us in.
    """
    from pyarrow.fs import FileSystem, FileType  # half a second: only where object storage is used

    try:
        filesystem, path = FileSystem.from_uri(uri)
        if create:
            filesystem.create_dir(path, recursive=True)
        found: Any = filesystem.get_file_info(path)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"expected a folder, s3://bucket/path or gs://bucket/path that can be reached, got {uri}: {error}"
        ) from error
    if found.type == FileType.File:
        raise LaunchError(f"expected a folder as storage, but {uri} is a file: name another")
    return filesystem, path
