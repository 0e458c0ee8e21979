"""Names of files: paths on disk, or URIs in object storage such as `s3://bucket/folder/train.bin`."""

import contextlib
import difflib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any
from urllib.parse import unquote

import pyarrow
from numpy import integer
from numpy.typing import NDArray
from pyarrow import NativeFile
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem

from owt_data._errors import DataError, UnreadableError, file_errors, one_line, show, show_name

TRAIN_NAME, VAL_NAME, MANIFEST_NAME = "train.bin", "val.bin", "manifest.json"
TOKEN_NAMES = (TRAIN_NAME, VAL_NAME)
_SPLITS = ("train", "val")
# Names of shards of llm.c and modded-nanogpt.
_SHARD = re.compile(r".+_(?P<split>train|val)(_\d+)?\.bin")
_STREAM_BYTES = 16 << 20

# One slash is enough, because `Path` shortens two slashes to one.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# The part of a URI before the @, unless it is `anonymous`, and options that are keys. A secret may have a slash.
_CREDENTIALS = re.compile(
    r"(?<=:/)/*(?!anonymous@)(?:[^\s/?#@:,]*:(?!\d+/)[^\s@]*|[^\s/?#@,]+)@"
    r"|[?&][^\s=&?#]*(?:key|secret|token|password|signature|credential)[^\s=&?#]*=",
    re.IGNORECASE,
)
_LOCAL_URI = re.compile(r"file:(//(localhost)?)?(?=/(?!/))", re.IGNORECASE)
_TYPES = {
    FileType.NotFound: "a name that does not exist",
    FileType.File: "a file",
    FileType.Directory: "a folder",
    FileType.Unknown: "a pipe, a device or a socket",
}

# For these, pyarrow asks other packages, which raise errors of their own.
_NOT_OF_PYARROW = ("hf:", "fsspec:")
# By default, Google's client repeats a failed request for 15 minutes. The first request looks up a name. Without a
# network or credentials it always fails. Failures of later reads are likely to pass.
_LOOKUP_RETRY_S, _READ_RETRY_S = 5, 60


Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One name, or several."""


def name_text(name: str | os.PathLike[str]) -> str:
    """Return a name or a path as text.

    Raises:
        DataError: it is neither, holds a null character, or is the URI of a file of another machine.
    """
    text = name.__fspath__() if isinstance(name, os.PathLike) else name  # `os.fspath` raises for other results
    if not isinstance(text, str) or "\0" in text:
        raise DataError(f"A name must be a text without null characters, or a path, got {show(name)}.")
    if is_uri(text) and text.lower().startswith("file:"):
        raise DataError(
            f"The URI of a file must be file:///PATH, got {show_name(text)}. Write this, or the path alone."
        )
    return text


def list_names(names: Names) -> list[str]:
    """Return one or more names as a list of texts.

    Raises:
        DataError: as `name_text`.
    """
    if isinstance(names, str | bytes | os.PathLike) or not isinstance(names, Sequence):
        return [name_text(names)]
    return [name_text(name) for name in names]


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
        raise DataError(
            f"{show_name(name)} must begin with ~ or the ~name of a user, got no such user. Write ./~ for a file."
        )
    if not os.path.isabs(path):  # noqa: PTH117 - names here are strings
        check_working_folder()
    return path


def check_working_folder() -> None:
    """Check that the working folder, to which relative names belong, has not been deleted.

    Raises:
        DataError: it has.
    """
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd is this call
    except FileNotFoundError as error:
        raise DataError("The working folder has been deleted. Change to another folder, such as `cd ~`.") from error


def normalize(name: str | os.PathLike[str]) -> str:
    """Return a name as text that does not depend on the working folder.

    Raises:
        DataError: the name is empty, or as `name_text` and `local_path`.
    """
    name = name_text(name)
    if not name:
        raise DataError("The name must be a path or a URI, got an empty text. Name a file or a folder.")
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


def connect(name: str, *, retry_s: int = _READ_RETRY_S) -> tuple[FileSystem, str]:
    """Return the file system of a name, and its path there. A URI without a region looks up that of its bucket.

    Args:
        name: a path or a URI.
        retry_s: seconds during which a failed request to Google's storage is repeated.

    Raises:
        DataError: the URI has credentials, or pyarrow cannot parse it.
    """
    if not is_uri(name):
        return LocalFileSystem(), name
    if _CREDENTIALS.search(name):
        raise DataError(
            f"A name must be without credentials, got them in a URI of {name.partition(':')[0]}. Set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS in the environment instead."
        )
    uri = name
    if name.startswith(("gs:", "gcs:")) and "retry_limit_seconds" not in name:
        uri += f"{'&' if '?' in name else '?'}retry_limit_seconds={retry_s}"
    try:
        if name.lower().startswith(_NOT_OF_PYARROW):
            raise OSError("no object storage")
        filesystem, path = FileSystem.from_uri(uri)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"The name must be a path, s3://bucket/... or gs://bucket/..., got {show_name(name)} ({one_line(error)})."
        ) from error
    if not path:
        constraint = "a path, s3://bucket/... or gs://bucket/..."
        raise DataError(f"The name must be {constraint}, got {show_name(name)} without a bucket.")
    return filesystem, path


def look_up(name: str) -> FileInfo:
    """Look up the type and size of a file or folder. The type is `NotFound` if the name does not exist.

    Goes to the network for a file in object storage.

    Raises:
        DataError: the storage cannot be reached.
    """
    filesystem, path = connect(name, retry_s=_LOOKUP_RETRY_S)
    with file_errors("readable", name):
        return filesystem.get_file_info(path)


def look_up_as(
    name: str,
    wanted: FileType,
    constraint: str,
    remedy: str = "",
    *,
    suggest: bool = True,
    is_possible: Callable[[str], bool] | None = None,
) -> FileInfo:
    """Look up a name, check that it is a file or a folder, and return its type and size.

    Args:
        name: a path or a URI.
        wanted: the type.
        constraint: what the name must be.
        remedy: a sentence, or empty.
        suggest: name a file of a similar name instead, if there is one. False is for a name that no user has given.
        is_possible: whether a file that exists may be named. Default: each may.

    Raises:
        DataError: the name does not exist or has another type, or the storage cannot be reached.
    """
    found = look_up(name)
    if found.type is not wanted:
        if suggest and found.type is FileType.NotFound:
            remedy = suggest_name(name, remedy, is_possible)
        raise DataError(f"{show_name(name)} must be {constraint}, got {type_name(found)}. {remedy}".rstrip())
    return found


def type_name(info: FileInfo) -> str:
    """Return what a name refers to, for errors."""
    is_link = info.type is FileType.NotFound and os.path.islink(info.path)  # noqa: PTH114 - names here are strings
    return "a link to a missing file or to itself" if is_link else _TYPES[info.type]


def suggest_one(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of some names, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def suggest_name(name: str, remedy: str, is_possible: Callable[[str], bool] | None = None) -> str:
    """Return the remedy for a name that does not exist: a file or folder of a similar name, or else the given remedy.

    Each missing component is compared with the files and folders in its place, without suffixes: equal ones would make
    `val.bin` similar to `train.bin`.
    """
    path = Path("." if is_uri(name) else local_path(name))
    place = next((parent for parent in path.parents if parent.is_dir()), path)
    with contextlib.suppress(OSError):  # the folder cannot be read
        for part in path.relative_to(place).parts:
            if not (place / part).exists():
                entries = [entry for entry in sorted(place.iterdir()) if not entry.name.startswith(".")]
                suffix = Path(part).suffix
                known = {entry.stem: entry for entry in sorted(entries, key=lambda entry: entry.suffix == suffix)}
                similar = suggest_one(Path(part).stem, known)
                if similar is None:
                    return remedy
                place = known[similar]
            else:
                place /= part
        is_better = place != path and (is_possible is None or is_possible(str(place)))
        return f"Did you mean {show_name(place)}?" if is_better else remedy
    return remedy


def holds_tokens(folder: Path) -> bool:
    """Return whether a folder has token files, both or one that is left, or shards. It then has no text to prepare."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names.isdisjoint(TOKEN_NAMES) or bool(shards_by_split(names))


def shards_by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that are those of shards of tokens, such as `fineweb_train_000001.bin`, sorted, by split."""
    found = ((match["split"], name) for name in sorted(names) if (match := _SHARD.fullmatch(name)))
    groups: dict[str, list[str]] = {}
    for split, name in found:
        groups.setdefault(split, []).append(name)
    return groups


def split_of(name: str) -> str | None:
    """Return the split that the name of a token file gives, `train` or `val`; None if it gives none."""
    file = base_name(name)
    match = _SHARD.fullmatch(file)
    return file.removesuffix(".bin") if file in TOKEN_NAMES else match and match["split"]


def list_folder(name: str) -> list[str]:
    """Return the names of the files in a folder on disk or in object storage.

    Raises:
        DataError: the folder cannot be read.
    """
    filesystem, path = connect(name, retry_s=_LOOKUP_RETRY_S)
    with file_errors("readable", name):
        return [found.base_name for found in filesystem.get_file_info(FileSelector(path)) if found.is_file]


def read_head(name: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file; all of it if it has fewer.

    Raises:
        DataError: the file cannot be read.
    """
    filesystem, path = connect(name)
    with file_errors("readable", name), filesystem.open_input_file(path) as file:
        return file.read(num_bytes)


def read_file(name: str) -> bytes:
    """Return the contents of a small file.

    Raises:
        DataError: the file cannot be read.
    """
    return b"".join(read_blocks(name))


def read_blocks(name: str, offset: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file, in blocks of complete tokens.

    Args:
        name: the file.
        offset: bytes before the first token, which are left out.

    Raises:
        DataError: the file cannot be read.
    """
    filesystem, path = connect(name)
    with file_errors("readable", name), filesystem.open_input_stream(path) as stream:
        stream.read(offset)
        while block := stream.read(_STREAM_BYTES):
            yield block


def remote_state(uri: str) -> dict[str, int | str] | None:
    """Return the size and the tag of the contents (`ETag`) of a file in object storage; None if it has no such tag.

    Goes to the network.

    Raises:
        DataError: the file cannot be read.
    """
    filesystem, path = connect(uri)
    with file_errors("readable", uri), filesystem.open_input_stream(path) as stream:
        found = {name.lower(): value.decode() for name, value in (stream.metadata() or {}).items()}
    return {"size": found.get("content-length", ""), "etag": found["etag"]} if "etag" in found else None


def group_by_split(names: Names) -> dict[str, list[str]]:
    """Group names by the split that they may give, as `train=...` and `val=...`.

    Returns:
        The names of `train` and of `val` if they give their split, else all names as `all`.

    Raises:
        DataError: there are no names, only some give their split, or all give the same split.
    """
    groups: dict[str, list[str]] = {}
    given = list_names(names)
    for name in given:
        split, equals, rest = name.partition("=")
        is_given = equals and split in _SPLITS
        groups.setdefault(split if is_given else "all", []).append(rest if is_given else name)
    if groups.keys() not in ({"all"}, set(_SPLITS)):
        raise DataError(f"The names must give both splits, train=... and val=..., or no split, got {show(given)}.")
    return {split: groups[split] for split in sorted(groups)}


class LocalTokens:
    """Token file on disk, read by ranges.

    The file is not mapped into memory: a read behind the end of a mapped file that was cut short kills the process.
    """

    def __init__(self, path: str, *, in_order: bool) -> None:
        self._path = path
        with file_errors("readable", path):
            self._handle = open_handle(path, os.O_RDONLY)
        if not in_order and sys.platform == "linux":  # macOS has no such call
            # Else the system reads ahead megabytes of unneeded tokens for every window.
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def copy(self, place: int, out: NDArray[integer]) -> bool:
        """Copy the tokens from the byte `place` on into `out`. Return False if the file ends before."""
        rest = out.data.cast("B")
        with file_errors("readable", self._path):
            while rest:
                if hasattr(os, "preadv"):  # missing on older macOS
                    num_bytes = os.preadv(self._handle, [rest], place)
                else:
                    block = os.pread(self._handle, min(len(rest), _STREAM_BYTES), place)
                    num_bytes = len(block)
                    rest[:num_bytes] = block
                if not num_bytes:
                    return False
                place, rest = place + num_bytes, rest[num_bytes:]
        return True


class RemoteTokens:
    """Token file in object storage. Each range is one request. Safe to use from several threads."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._path = connect(uri)
        # One for each thread that reads, because a file has a position. To open one is a request.
        self._idle: SimpleQueue[NativeFile] = SimpleQueue()

    def copy(self, place: int, out: NDArray[integer]) -> bool:
        """Copy the tokens from the byte `place` on into `out`. Return False if the file ends before."""
        stop = place + out.nbytes
        unread = (1 << 8 * out.itemsize) - 1
        out[-1] = unread
        try:
            with file_errors("readable", self._uri):
                file = self._take()
                file.seek(place)
                num_bytes = file.readinto(out.data.cast("B"))
        except UnreadableError:
            if look_up_as(self._uri, FileType.File, "a token file", suggest=False).size < stop:
                return False
            raise
        self._idle.put(file)
        # pyarrow does not notice that S3 has sent less, of a file that was replaced by a shorter one after it was
        # opened. The storage may have sent a part of the last token.
        is_read = int(out[-1]) < (unread ^ unread >> 8) or (look_up(self._uri).size or 0) >= stop
        return num_bytes == out.nbytes and is_read

    def _take(self) -> NativeFile:
        try:
            return self._idle.get_nowait()
        except Empty:
            return self._filesystem.open_input_file(self._path)


def open_handle(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, as `open`'s `opener` does. A pipe without a writer does not block.

    Raises:
        DataError: the name is that of a pipe, a device, a socket or a folder.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        found = _TYPES[FileType.Directory if stat.S_ISDIR(mode) else FileType.Unknown]
        raise DataError(f"{show_name(path)} must be a regular file, got {found}. Rename or remove it.")
    return handle


def open_regular(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """Open a regular file as `open` does; see `open_handle`."""
    return open(path, mode, opener=open_handle, **options)
