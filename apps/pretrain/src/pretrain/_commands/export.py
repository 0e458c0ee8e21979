"""The command `export`: a trained model in Hugging Face's format."""

import contextlib
from pathlib import Path

from pretrain._commands.load import load_trained
from pretrain._errors import UsageError
from ray_jax_launch import as_storage_path

_FILES = ("*.json", "*.safetensors")


def export(run: str, out: str) -> int:
    """Write a run's newest checkpoint in Hugging Face's format.

    Args:
        run: the run's folder, URI or name.
        out: a new or empty folder.

    Returns:
        The step of the checkpoint.

    Raises:
        UsageError: the run does not exist or has no checkpoint, or `out` is not a new or empty folder.
        OSError: `out` cannot be written.
    """
    folder = as_storage_path(out)
    if not isinstance(folder, Path):
        raise UsageError(f"out must be a folder, got {out}. Export to a folder, and copy the files.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"out must be a new or empty folder, got {out}. Give another folder.")
    is_new = not folder.exists()
    trained = load_trained(run)
    end_of_text = trained.tokenizer.eot_token
    try:
        trained.model.save_pretrained(folder, end_of_text=end_of_text)
    except BaseException:  # such as a full disk, or Ctrl-C
        _delete(folder, is_new=is_new)
        raise
    return trained.step


def _delete(folder: Path, *, is_new: bool) -> None:
    """Delete the files of an export that failed, so that the same command can be run again."""
    with contextlib.suppress(OSError):
        for pattern in _FILES:
            for path in folder.glob(pattern):
                path.unlink()
        if is_new:
            folder.rmdir()
