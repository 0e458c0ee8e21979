"""A folder that gets its name when it is complete."""

import contextlib
import fcntl
import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pretrain._errors import UsageError
from pretrain._run.files import sync_file, sync_folder

_EDITABLE = "README.md"


def check_new(folder: Path, *, may_be_complete: bool = False) -> None:
    """Check that a folder can be made, before anything else is done.

    Args:
        folder: the folder.
        may_be_complete: accept a folder with files: `new_folder` compares them.

    Raises:
        UsageError: the name is not that of a new or empty folder, or no folder can take it.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or (any(folder.iterdir()) and not may_be_complete)):
        raise UsageError(f"out must be a new or empty folder, got {folder}. Give another folder.")
    if folder.is_dir() and (folder.is_mount() or folder.samefile(Path.cwd())):
        raise UsageError(
            f"out must be neither a mount point nor the working folder, got {folder}. Give a folder in it."
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside another one, and rename it to that one at the end of the block.

    Until then it is `.NAME.partial`. It is locked; the system releases the lock when the process ends, even after a
    kill, and the same command begins again. If the block fails, its files are deleted.

    If the folder has the same files already, except for a changed README.md, it is left as it is.

    Raises:
        UsageError: another command writes the folder, or it has other files.
        OSError: it cannot be written.
    """
    folder = Path(os.path.realpath(folder))
    partial = folder.parent / f".{folder.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial, folder):
        try:
            for path in partial.iterdir():  # of a command that was killed
                path.unlink()
            yield partial
            for path in partial.iterdir():
                sync_file(path)
            sync_folder(partial)
            if folder.exists() and any(folder.iterdir()):
                _check_same(partial, folder)
            else:
                os.replace(partial, folder)
                sync_folder(folder.parent)
        finally:  # also after a full disk, or Ctrl-C
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(partial: Path, folder: Path) -> Iterator[None]:
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(descriptor), partial.stat())  # not renamed since
        except (BlockingIOError, FileNotFoundError):
            is_same = False
        if not is_same:
            raise UsageError(f"Another command exports to {folder}. Wait for its end, or give another folder.")
        yield
    finally:
        os.close(descriptor)


def _check_same(partial: Path, folder: Path) -> None:
    names = {path.name for path in partial.iterdir()} - {_EDITABLE}
    equal, _, _ = filecmp.cmpfiles(partial, folder, names, shallow=False)
    if {path.name for path in folder.iterdir()} - {_EDITABLE} != names or names != {*equal}:
        raise UsageError(f"out must be a new or empty folder, or have this export, got {folder}. Give another folder.")
