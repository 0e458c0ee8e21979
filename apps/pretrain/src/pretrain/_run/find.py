"""Runs by their names."""

from pathlib import Path

from pretrain._errors import UsageError, short
from pretrain._run.description import RunDescription, read_description
from pretrain._run.folder import RunFolder, locate
from pretrain._run.remote_copy import pull_changed, reader_copy
from pretrain._suggestions import nearest
from ray_jax_launch import is_uri

DEFAULT_STORAGE = Path("runs")
_MOST_NAMES = 8


def find_run(name: str) -> tuple[RunFolder, RunDescription]:
    """Find a run, and copy its texts from object storage if it is there.

    Args:
        name: the run's folder or URI, or its name in `runs`.

    Returns:
        The run's folder, and its description.

    Raises:
        UsageError: the run does not exist, or its description is damaged.
        OSError: the folder cannot be read.
    """
    if not name:
        folders = []
    elif is_uri(name):
        folders = [reader_copy(name)]
        pull_changed(folders[0])
    elif "/" in name:
        folders = [locate(name), locate(DEFAULT_STORAGE / name)]
    else:  # `export first first` writes a folder of the same name
        folders = [locate(DEFAULT_STORAGE / name), locate(name)]
    for folder in folders:
        if (description := read_description(folder)) is not None:
            return folder, description
    raise UsageError(
        f"run must be the folder or URI of a run, or its name in {DEFAULT_STORAGE}, got {short(name)}. {_remedy(name)}"
    )


def _remedy(name: str) -> str:
    """Return the names of the runs beside a path, or in the default storage, the newest first."""
    storage = DEFAULT_STORAGE
    if "/" in name and not is_uri(name) and (beside := locate(name).path.parent) != storage.absolute():
        storage = beside
    files = sorted(storage.glob("*/config.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [file.parent.name for file in files]
    if not names:
        return f"There are no runs in {storage.absolute()}: train one, or give a folder."
    wanted = Path(name).name
    known = wanted and (next((known for known in names if known.startswith(wanted)), None) or nearest(wanted, names))
    place = Path() if storage == DEFAULT_STORAGE else storage
    question = f"Did you mean {place / known}? " if known else ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{question}{storage} has {', '.join(names[:_MOST_NAMES])}{more}."
