"""Storage of runs: folders and URIs of object storage. Imports in milliseconds, for command lines."""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from ray_jax_launch._errors import LaunchError, in_a_line, shown
from ray_jax_launch._numbers import check_flag, check_type

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

StoragePath = Path | str
"""A folder, or a URI such as `s3://bucket/runs`."""

_GOOGLE, _PATIENCE = ("gs://", "gcs://"), "retry_limit_seconds"
# For these, pyarrow asks other packages, which raise errors of their own.
_NOT_OF_PYARROW = ("hf", "fsspec")
_ANSWER_WITHIN_S = 20.0
_MOST_BYTES = 255  # of the name of a folder
_SCHEME = r"[a-z][a-z0-9+.-]+:"
_URI = re.compile(rf"(?!file:){_SCHEME}//", re.IGNORECASE)
_FILE_URI = re.compile("file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)
# `Path("s3://bucket")` has lost a slash, and a file's URI has no relative path.
_LOST_URI = re.compile(f"{_SCHEME}/|file:", re.IGNORECASE)
# The part of a URI before the @: `key:secret`, where the secret may have a slash, or a name alone. `host:9000/` is not.
_USER = re.compile(rf"({_SCHEME})(/+)([^\s/?#@,]+|[^\s/?#@:,]*:(?!\d+/)[^\s@]*)@", re.IGNORECASE)
_OPTION = re.compile(r"([?&])([^\s=&?#]+)=(?!\*\*\*)([^\s&,]+)")
_SECRET_NAME = re.compile(r".*(?:key|secret|token|password|signature|credential)s?(?:[_-]?id)?|sig|sas", re.IGNORECASE)
_HIDDEN = "***"
# Where a name before the @ without a password is a credential. Elsewhere it is that of a container or a user.
_KEY_ALONE = ("s3:", "gs:", "gcs:", "http:", "https:", "hf:")
_ANONYMOUS = "anonymous"


def as_storage_path(place: StoragePath) -> StoragePath:
    """Parse a storage path that a user has written.

    Args:
        place: a folder, where `~` is the home folder, or a URI. `file:///a%20b` is the folder `/a b`. Any other URI
            is object storage.

    Returns:
        A `Path` for a folder, a string for object storage.

    Raises:
        LaunchError: the text is neither a folder nor a URI, or is a URI with credentials.

    >>> as_storage_path("file:///data/my%20runs"), as_storage_path("s3://bucket/runs")
    (PosixPath('/data/my runs'), 's3://bucket/runs')
    """
    check_no_credentials("a storage path", place)
    try:
        if is_uri(place):
            return str(place).encode().decode()
        if isinstance(place, str | Path):
            os.fsencode(place)  # a folder's name may have other bytes
    except UnicodeEncodeError as error:
        raise LaunchError(f"a storage path must be a text in UTF-8, got {shown(place)}. Name another.") from error
    # Like a shell, this leaves `~name` as it is where nobody has that name.
    text = os.path.expanduser(place) if isinstance(place, str | Path) else ""  # noqa: PTH111
    if match := _FILE_URI.fullmatch(text):
        text = unquote(match[1])
    if not text or "\0" in text or _LOST_URI.match(text):
        raise LaunchError(
            f"a storage path must be a folder, or the text of a URI, got {shown(place)}. Name a folder, "
            "file:///PATH, or a URI such as s3://bucket/runs."
        )
    return Path(text)


def check_no_credentials(name: str, place: object) -> None:
    """Check that no URI in a text has credentials: a run writes its URIs to files, trackers and the screen.

    Args:
        name: the name of the value in the message.
        place: a text, which may have several URIs in it. Anything else is accepted.

    Raises:
        LaunchError: a URI has a user with a password, a key, or an option that is one. The message does not repeat it.
    """
    text = str(place) if isinstance(place, str | Path) else ""
    hidden = without_credentials(text)
    if hidden != text:
        raise LaunchError(
            f"{name} must be without credentials, got {shown(hidden)}. Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or GOOGLE_APPLICATION_CREDENTIALS in the environment instead."
        )


def without_credentials(text: str) -> str:
    """Return a text with `***` in the place of the credentials of each URI in it.

    >>> without_credentials("s3://key:secret@bucket/runs?secret_key=secret&region=x")
    's3://***@bucket/runs?secret_key=***&region=x'
    """
    check_type("text", text, str, "a text")
    if ":/" not in text:
        return text
    return _OPTION.sub(_hide_option, _USER.sub(_hide_user, text))


def _hide_user(match: re.Match[str]) -> str:
    scheme, slashes, user = match.groups()
    is_name = ":" not in user and (user == _ANONYMOUS or scheme.lower() not in _KEY_ALONE)
    return match[0] if is_name else f"{scheme}{slashes}{_HIDDEN}@"


def _hide_option(match: re.Match[str]) -> str:
    mark, name, _ = match.groups()
    return f"{mark}{name}={_HIDDEN}" if _SECRET_NAME.fullmatch(unquote(name)) else match[0]


def check_run_name(name: str) -> None:
    """Check that a text can be the name of a run, which becomes the name of a folder and appears in URIs.

    Raises:
        LaunchError: the text cannot be a name.
    """
    if not isinstance(name, str) or not name.isprintable() or not name or name[0] in ". " or {*name} & {*"/?"}:
        raise LaunchError(
            f"name must be a printable text that begins with no dot or space and has no / and ? in it, got "
            f"{shown(name)}. Choose another."
        )
    if len(name.encode()) > _MOST_BYTES:
        raise LaunchError(f"name must have at most {_MOST_BYTES} bytes, got {shown(name)}. Choose another.")


def join_path(place: StoragePath, *names: str) -> StoragePath:
    """Append names to a storage path.

    In a URI, the names are percent-encoded, and the options after `?` stay at the end.
    """
    place = as_storage_path(place)
    if not all(isinstance(name, str) for name in names):
        raise LaunchError(f"names must be texts, got {shown(names)}.")
    if isinstance(place, Path):
        return place.joinpath(*names)
    address, question_mark, options = place.partition("?")
    return "/".join((address.rstrip("/"), *(quote(name, safe="/:+") for name in names))) + question_mark + options


def is_uri(place: StoragePath) -> bool:
    """Return whether a storage path is a URI of object storage."""
    return isinstance(place, str) and _URI.match(place) is not None


def open_uri(uri: str, *, create: bool = False) -> "tuple[FileSystem, str]":
    """Open the filesystem of a URI in the same way as Ray. Return it with the path in it.

    Args:
        uri: such as `s3://bucket/path`.
        create: make the folder, which also checks that writing is allowed. A bucket is never made.

    Raises:
        LaunchError: the URI has credentials, its scheme is unknown, it is that of a file, or the server does not answer
            within 20 s or denies access.
    """
    from pyarrow.fs import FileSystem, FileType  # half a second: only where object storage is used

    if not isinstance(uri, str):
        raise LaunchError(
            f"the storage must be the text of a URI, got {shown(uri)}. Name one, such as s3://bucket/runs."
        )
    check_flag("create", create)
    check_no_credentials("the storage", uri)
    with _reaching(uri):
        if (scheme := uri.partition(":")[0].lower()) in _NOT_OF_PYARROW:
            raise ValueError(f"{scheme} is no object storage")
        if _in_time(lambda: _file_info(uri)).type == FileType.File:
            raise NotADirectoryError("a file")
        filesystem, path = FileSystem.from_uri(uri)
    if create:
        make_folder(uri, filesystem, path)
    return filesystem, path


def make_folder(uri: str, filesystem: "FileSystem", path: str) -> None:
    """Make the folder of a URI that is open, which also checks that writing is allowed.

    Raises:
        LaunchError: the server does not answer, or denies access.
    """
    with _reaching(uri):
        filesystem.create_dir(path, recursive=True)


@contextlib.contextmanager
def _reaching(uri: str) -> Iterator[None]:
    """Turn errors of the block into a sentence about the URI."""
    from pyarrow import ArrowException  # see open_uri

    try:
        yield
    except (OSError, ValueError, ArrowException) as error:
        reason = in_a_line(str(error), 1000).rstrip(".") or f"no answer within {_ANSWER_WITHIN_S:.0f} s"
        raise LaunchError(
            "the storage must be a folder, s3://bucket/path or gs://bucket/path that can be reached, got "
            f"{in_a_line(uri, 300)}: {reason}. Check the address, the credentials and the network."
        ) from error


def _file_info(uri: str) -> Any:
    """Return pyarrow's description of the folder or file at a URI."""
    from pyarrow.fs import FileSystem  # see open_uri

    if uri.startswith(_GOOGLE) and _PATIENCE not in uri:
        # By default, Google's client repeats each request for 15 minutes.
        uri = f"{uri}{'&' if '?' in uri else '?'}{_PATIENCE}=5"
    filesystem, path = FileSystem.from_uri(uri)
    return filesystem.get_file_info(path)


def _in_time(action: Callable[[], Any]) -> Any:
    """Return the result of a function. It may take minutes if a server is silent, because clients repeat requests.

    Raises:
        TimeoutError: the function took too long. It continues in a thread that does not keep the process alive.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:  # of any kind: the caller gets it
            answer.set_exception(error)

    threading.Thread(target=run, name="open-storage", daemon=True).start()
    return answer.result(timeout=_ANSWER_WITHIN_S)


def make_durable_folder(folder: Path) -> None:
    """Make a folder and its missing parents. They are on the disk when this returns.

    Raises:
        OSError: a folder cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    with contextlib.suppress(OSError):  # some file systems cannot, but rename in order
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
