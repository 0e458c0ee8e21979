"""The command `export`: a trained model in Hugging Face's format."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pretrain._commands.load import load_trained
from pretrain._errors import UsageError
from ray_jax_launch import as_storage_path

_FILES = ("*.json", "*.safetensors")


def export(run: str, out: str) -> int | None:
    """Write a run's newest checkpoint in Hugging Face's format.

    Args:
        run: the model, as for `load_trained`.
        out: a new or empty folder.

    Returns:
        The step of the checkpoint; None for a model that is not that of a run.

    Raises:
        UsageError: the run does not exist or has no checkpoint, or `out` is not a new or empty folder, or another
            command exports to it.
        OSError: `out` cannot be written.
    """
    if not out:
        raise UsageError("out must be a new or empty folder, got an empty text. Give a name.")
    folder = as_storage_path(out)
    if not isinstance(folder, Path):
        raise UsageError(f"out must be a folder, got {out}. Export to a folder, and copy the files.")
    _check_empty(folder)
    trained = load_trained(run)
    end_of_text = trained.tokenizer.eot_token
    with _new_folder(folder):
        trained.model.save_pretrained(folder, end_of_text=end_of_text)
    return trained.step


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"out must be a new or empty folder, got {folder}. Give another folder.")


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make and lock a folder. If the block fails, delete its files, so that the same command can be run again.

    The lock is on the folder itself. The system releases it when the process ends, even after a kill.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another command exports to {folder}. Wait for its end, or give another folder."
            ) from None
        _check_empty(folder)  # another command may have filled it since
        try:
            yield
        except BaseException:  # such as a full disk, or Ctrl-C
            _delete(folder, is_new=is_new)
            raise
    finally:
        os.close(descriptor)


def _delete(folder: Path, *, is_new: bool) -> None:
    """Delete the files of an export that failed."""
    with contextlib.suppress(OSError):
        for pattern in _FILES:
            for path in folder.glob(pattern):
                path.unlink()
        if is_new:
            folder.rmdir()
