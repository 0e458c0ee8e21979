"""Checks of the storage of runs, of the cache and of temporary files: can they be written, how fast, how full?"""

import contextlib
import errno
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC
from pathlib import Path
from typing import Any

import platformdirs

from pretrain._doctor.finding import Finding, fail, ok, warn
from pretrain._formats import decimal_bytes, duration
from pretrain._surroundings.child import ChildError, call_in_child
from ray_jax_launch import StoragePath, as_storage_path, open_uri

_MIB = 2**20
_FOLDER_BYTES, _OBJECT_BYTES, _SMALL_BYTES = 32 * _MIB, 4 * _MIB, 4096
_WRITE_FOR_S = 2.0
_WITHIN_S, _SMALL_WITHIN_S = 40.0, 20.0
# A run of preset gpt2 keeps 5.97 GB of checkpoints: `plan`.
_ENOUGH_BYTES = 6e9
# A checkpoint of GPT-2 124M, 1.5 GB, takes more than a minute below this.
_SLOW_BYTES_PER_S = 20e6
# Ray 2.60 stops to write objects to a disk that is fuller than this: its `local_fs_capacity_threshold`.
_RAY_SHARE = 0.95
_FULL, _FREE = (errno.ENOSPC, errno.EDQUOT), "Free some space, or give another --storage-path."
# Objects have their times in whole seconds. S3 rejects requests of a clock that is wrong by more than 15 minutes.
_CLOCK_S, _REJECTED_CLOCK_S = 5.0, 900.0


class _Folder:
    """A folder. It is made, and deleted by `close` if it is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, blocks: Iterable[bytes]) -> None:
        with (self._folder / name).open("wb", buffering=0) as file:
            for block in blocks:
                file.write(block)
            os.fsync(file.fileno())
            if sys.platform == "linux":  # it is then read from the disk, and not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, name: str) -> int:
        with (self._folder / name).open("rb", buffering=0) as file:
            return sum(map(len, iter(lambda: file.read(_MIB), b"")))

    def names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()]

    def time_s(self, name: str) -> float:
        return (self._folder / name).stat().st_mtime

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # another command has begun to use it
            for path in self._made:
                path.rmdir()


class _Objects:
    """A folder of object storage. An empty one may stay: it could not be deleted without the objects of others."""

    def __init__(self, uri: str) -> None:
        self._files, self._path = open_uri(uri)

    def write(self, name: str, blocks: Iterable[bytes]) -> None:
        with self._files.open_output_stream(f"{self._path}/{name}") as file:
            for block in blocks:
                file.write(block)

    def read(self, name: str) -> int:
        with self._files.open_input_stream(f"{self._path}/{name}") as file:
            return len(file.readall())

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector  # half a second: only where object storage is used

        return [info.base_name for info in self._files.get_file_info(FileSelector(self._path))]

    def time_s(self, name: str) -> float:
        return self._files.get_file_info(f"{self._path}/{name}").mtime.astimezone(UTC).timestamp()

    def delete(self, name: str) -> None:
        self._files.delete_file(f"{self._path}/{name}")

    def close(self) -> None:
        """Do nothing."""


def try_out(place: str, num_bytes: int) -> dict[str, Any]:
    """Write a file, read it, list it and delete it; for a child process. Nothing stays, but on storage that fails.

    Args:
        place: a folder, which is made and deleted if it is missing, or a URI.
        num_bytes: size of the file; smaller if this takes more than two seconds.

    Returns:
        `error`, why a step failed, or an empty text; `is_full`, whether for want of space; `write_s`, `read_s` and
        `bytes` of the file; `clock_s`, the seconds by which the clock of the storage is fast.
    """
    step, block = "opened", os.urandom(min(num_bytes, _MIB))
    found: dict[str, Any] = {"error": "", "is_full": False}
    name, path = f".doctor-{secrets.token_hex(4)}", as_storage_path(place)
    try:
        storage = _Folder(path) if isinstance(path, Path) else _Objects(path)
        try:
            step, before_s, began_s = "written", time.time(), time.perf_counter()
            storage.write(name, _blocks(block, num_bytes, began_s + _WRITE_FOR_S))
            found["write_s"], after_s = time.perf_counter() - began_s, time.time()
            step, began_s = "read", time.perf_counter()
            found["bytes"] = storage.read(name)
            found["read_s"] = time.perf_counter() - began_s
            step, time_s = "listed", storage.time_s(name)
            found["clock_s"] = time_s - min(max(time_s, before_s), after_s)
            if name not in storage.names():
                raise OSError("the new file is missing")
            step = "deleted"
            storage.delete(name)
        finally:
            with contextlib.suppress(OSError):  # there is nothing, or the error above says more
                storage.delete(name)
            with contextlib.suppress(OSError):
                storage.close()
    except OSError as error:
        found |= {"error": f"cannot be {step}: {error.strerror or error}", "is_full": error.errno in _FULL}
    return found


def _blocks(block: bytes, num_bytes: int, until_s: float) -> Iterable[bytes]:
    for written in range(0, num_bytes, len(block)):
        if written and time.perf_counter() > until_s:
            return
        yield block


def check_storage(place: str) -> list[Finding]:
    """Check that runs can be kept in a folder or at a URI; its speed, its free space and its clock.

    Args:
        place: the folder or the URI of all runs.
    """
    name, path = "storage", as_storage_path(place)
    is_folder = isinstance(path, Path)
    disk = _disk(path) if is_folder else []
    try:
        found = call_in_child(try_out, place, _FOLDER_BYTES if is_folder else _OBJECT_BYTES, within_s=_WITHIN_S)
    except ChildError as error:
        return [fail(name, str(error), "Correct --storage-path, or what is named."), *disk]
    if found["error"]:
        remedy = "Give another --storage-path." if is_folder else "Check the rights of the key."
        failed = fail(name, f"{place} {found['error']}", _FREE if found["is_full"] else remedy)
        return [failed, *(disk if found["is_full"] else [])]
    speeds = {what: found["bytes"] / found[f"{what}_s"] for what in ("write", "read")}
    text = ", ".join(f"{what} {decimal_bytes(speed)}/s" for what, speed in speeds.items())
    what = f"{place} can be written, read, listed and deleted: {text}"
    slow = warn(
        name, what, f"Give a faster --storage-path: below {decimal_bytes(_SLOW_BYTES_PER_S)}/s, saves take long."
    )
    return [
        slow if is_folder and speeds["write"] < _SLOW_BYTES_PER_S else ok(name, what),
        *disk,
        _clock(found["clock_s"], is_folder=is_folder),
    ]


def _clock(fast_s: float, *, is_folder: bool) -> Finding:
    name = "clock"
    if abs(fast_s) < _CLOCK_S:
        return ok(name, "that of this machine and that of the storage agree")
    found = f"the storage's is {duration(abs(fast_s))} {'ahead of' if fast_s > 0 else 'behind'} this machine's"
    remedy = "Set the clock of this machine by NTP, such as `timedatectl set-ntp true`."
    is_rejected = not is_folder and abs(fast_s) > _REJECTED_CLOCK_S
    return (fail if is_rejected else warn)(name, found, remedy)


def _disk(path: StoragePath) -> list[Finding]:
    """Return the free space of a folder, or of the folder in which it will be made."""
    name, folder = "disk", Path(path).absolute()
    try:
        usage = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists()))
    except OSError as error:
        return [fail(name, f"{folder} cannot be used: {error.strerror}", "Give another --storage-path.")]
    if usage.free < _ENOUGH_BYTES:
        found = f"{decimal_bytes(usage.free)} free in {path}, and checkpoints of GPT-2 124M take up to 5.97 GB"
        return [warn(name, found, _FREE)]
    return [ok(name, f"{decimal_bytes(usage.free)} free in {path}")]


def check_cache() -> list[Finding]:
    """Check the folder of the user's caches: prepared tokens, and compiled programs."""
    folder = platformdirs.user_cache_path()
    return _small_files("cache", folder, "Set XDG_CACHE_HOME to a folder on another disk.", 0.0)


def check_temporary_files() -> list[Finding]:
    """Check the folder for temporary files, in which Ray keeps logs, sockets and objects."""
    name, remedy = "temporary", "Free some space, or set TMPDIR to a folder on another disk."
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return [fail(name, str(error.strerror), remedy)]
    return _small_files(name, folder, remedy, 1 - _RAY_SHARE)


def _small_files(name: str, folder: Path, remedy: str, least_share: float) -> list[Finding]:
    """Check that a folder can be written, and has some free space."""
    try:
        found = call_in_child(try_out, str(folder), _SMALL_BYTES, within_s=_SMALL_WITHIN_S)
    except ChildError as error:
        return [fail(name, f"{folder}: {error}", remedy)]
    if found["error"]:
        return [fail(name, f"{folder} {found['error']}", remedy)]
    usage = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists()))
    text = f"{decimal_bytes(usage.free)} free in {folder}"
    if usage.free < least_share * usage.total:
        return [warn(name, f"{text}: Ray stops to write objects to a disk that is {_RAY_SHARE:.0%} full", remedy)]
    if usage.free < 1e9:
        return [warn(name, text, remedy)]
    return [ok(name, text)]
