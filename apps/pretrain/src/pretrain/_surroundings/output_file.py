"""The files that commands write for a user: a new or replaced file, or a pipe or device that gets the content."""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from pretrain._errors import UsageError, short

# Names of files that are open already. A replaced file would be another one.
_OPEN_FILES = ("/dev/std", "/dev/fd/", "/proc/")


def check_output(path: Path, *, name: str = "the output") -> None:
    """Check that a path can be written by `write_output`, as far as its type and its folder tell.

    Args:
        path: the file.
        name: the name of the path in the errors.

    Raises:
        UsageError: it is a folder, a disk or a socket, or its folder does not exist.
        OSError: it cannot be read.
    """
    if (mode := _mode(path)) is None:
        if not _target(path).parent.is_dir():
            raise UsageError(f"{name} must be a file in a folder that exists, got {short(str(path))}. Give another.")
    elif not (stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
        kind = "a folder" if stat.S_ISDIR(mode) else "a disk or a socket"
        raise UsageError(f"{name} must be a file, got {short(str(path))}, {kind}. Give another.")


def write_output(path: Path, content: bytes) -> None:
    """Write a file. Its readers see the old content or all of the new one, also after a failure.

    A symbolic link stays: the file that it names is written. A pipe or a device gets the content.

    Args:
        path: the file.
        content: its content.

    Raises:
        UsageError: see `check_output`.
        OSError: the file cannot be written. It then has its old content.
    """
    check_output(path)
    mode = _mode(path)
    if (mode is None or stat.S_ISREG(mode)) and not is_open_file(path):
        _replace(_target(path), content)
        return
    with open(_opened(path), "wb", buffering=0) as file:
        os.set_blocking(file.fileno(), True)
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]


def is_open_file(path: Path) -> bool:
    """Return whether a path names a file by its descriptor, as `/dev/stdout` does."""
    return os.fspath(path.absolute()).startswith(_OPEN_FILES)


def _opened(path: Path) -> int:
    """Return a descriptor of a pipe, a device or a file that is open already."""
    if is_open_file(path):
        for descriptor in (1, 2):
            # Its position is that of the stream, behind what was printed.
            with contextlib.suppress(OSError):  # the stream is closed
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return os.dup(descriptor)
    # A pipe without a reader is an error, and not a wait without an end.
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


def _replace(target: Path, content: bytes) -> None:
    if target.exists():
        os.close(os.open(target, os.O_WRONLY))  # raises the system's error if the file may not be written
    with _partial(target) as partial:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Return a name beside a file, and delete the file of this name if the block fails."""
    partial = target.with_name(f".{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of an earlier process of the same number
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Return the type of what a path names, through links; None if nothing has this name yet."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))
