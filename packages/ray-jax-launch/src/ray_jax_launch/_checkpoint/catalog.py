"""List of checkpoints in a folder or in object storage, and verification of their files.

Does not import jax, so that a driver can use it without touching the devices.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray_jax_launch._checkpoint.folder_store import FolderStore
from ray_jax_launch._checkpoint.object_store import ObjectStore
from ray_jax_launch._checkpoint.retry import STORAGE_FULL
from ray_jax_launch._errors import (
    DamagedCheckpointError,
    DeletedCheckpointError,
    LaunchError,
    StorageFullError,
    UnsavedCheckpointError,
    in_a_line,
)
from ray_jax_launch._numbers import check_flag
from ray_jax_launch._storage import StoragePath, as_storage_path

_MAX_CAUSE = 300

_logger = logging.getLogger("ray_jax_launch")


CheckpointStore = FolderStore | ObjectStore
"""Numbered checkpoints in a folder or in object storage. One process at a time writes."""


def open_store(folder: StoragePath) -> CheckpointStore:
    """Return the checkpoints in a folder or below a URI."""
    path = as_storage_path(folder)
    return FolderStore(path) if isinstance(path, Path) else ObjectStore(path)


def latest_step(folder: StoragePath) -> int | None:
    """Return the number of the newest complete checkpoint in a folder or below a URI, or None.

    A checkpoint that is being written does not count. The files are not read; `intact_step` verifies them.
    """
    return max(checkpoint_steps(folder), default=None)


def checkpoint_steps(folder: StoragePath) -> list[int]:
    """Return the numbers of all complete checkpoints in a folder or below a URI, the newest last.

    The list is empty if there is no such folder. The files are not read; `intact_step` verifies them.

    Raises:
        LaunchError: the storage cannot be read.
    """
    return sorted(open_store(folder).steps())


def checkpoint_metadata(folder: StoragePath, step: int) -> dict[str, Any]:
    """Return the metadata of a checkpoint. The arrays are not read.

    Args:
        folder: folder of the checkpoints, or a URI of object storage.
        step: number of the checkpoint.

    Raises:
        DeletedCheckpointError: there is no checkpoint of this number, or a running run deletes it.
        DamagedCheckpointError: the metadata cannot be read.
        LaunchError: the storage cannot be read, or a newer version of this package wrote the checkpoint.
    """
    store = open_store(folder)
    try:
        return store.metadata(step)
    except DamagedCheckpointError as error:
        if step in store.steps():
            raise
        raise DeletedCheckpointError(f"there is no checkpoint {step} in {folder}. Read the newest one.") from error


def newest_metadata(folder: StoragePath) -> dict[str, Any] | None:
    """Return the metadata of the newest checkpoint whose metadata can be read, or None.

    A checkpoint is skipped if its metadata is damaged, or if a running run deletes it. The arrays are not read;
    `intact_step` verifies them.

    Args:
        folder: folder of the checkpoints, or a URI of object storage.

    Raises:
        LaunchError: the storage cannot be read after several attempts, or a newer version of this package wrote the
            newest checkpoint.
    """
    store = open_store(folder)
    unreadable: set[int] = set()
    while left := set(store.steps()) - unreadable:
        step = max(left)
        try:
            return store.metadata(step)
        except DamagedCheckpointError:
            unreadable.add(step)
    return None


def intact_step(folder: StoragePath, *, quarantine: bool = False) -> int | None:
    """Return the number of the newest checkpoint whose files have the sizes and checksums that were written.

    All files of the newest checkpoint are read. Older checkpoints are read only if newer ones are damaged. A checkpoint
    that a running run deletes is skipped. A checkpoint of a newer version of this package is no damage.

    Args:
        folder: folder of the checkpoints, or a URI of object storage.
        quarantine: rename damaged checkpoints, such as 40 to 40.damaged, so that they are no longer listed and their
            numbers are free. (In object storage, `40.json` is renamed.) Only for one process, while no
            process writes.

    Returns:
        The number, or None if there is no checkpoint. Each damaged checkpoint is logged as a warning.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
        LaunchError: the storage cannot be read after several attempts, or a newer version of this package wrote the
            newest checkpoint. Nothing was changed.
    """
    check_flag("quarantine", quarantine)
    return newest_intact(open_store(folder), folder, quarantine=quarantine)


def newest_intact(
    store: CheckpointStore,
    folder: StoragePath,
    *,
    quarantine: bool = False,
    find_damage: Callable[[int], str | None] | None = None,
    leader: Callable[[Callable[[], Any]], Any] = lambda compute: compute(),
) -> int | None:
    """Return what `intact_step` returns, from a store that is open.

    Args:
        store: the checkpoints.
        folder: their place, for messages.
        quarantine: see `intact_step`.
        find_damage: describes the damage of a checkpoint. Default: this process reads all of it.
        leader: runs a function that lists or changes the storage in the first process, and returns its result in all.
    """
    find_damage = store.find_damage if find_damage is None else find_damage
    damaged: dict[int, str] = {}
    while (step := leader(lambda: max({*store.steps()} - damaged.keys(), default=None))) is not None:
        problem = find_damage(step)
        if problem is None:
            break
        if leader(lambda step=step: step in store.steps()):  # else the run has deleted it
            damaged[step] = problem
    if damaged and step is None:
        raise all_damaged(folder, damaged)
    leader(partial(_report, store, folder, damaged, step, quarantine))
    return step


def _report(
    store: CheckpointStore, folder: StoragePath, damaged: Mapping[int, str], step: int | None, quarantine: bool
) -> None:
    for number, problem in damaged.items():
        _logger.warning(
            "checkpoint %s in %s is damaged (%s): going back to checkpoint %s", number, folder, problem, step
        )
        if quarantine:
            store.quarantine(number)


def all_damaged(folder: StoragePath, damaged: Mapping[int, str]) -> DamagedCheckpointError:
    """Return an error that describes the damage of each checkpoint."""
    listed = "; ".join(f"{step}: {problem}" for step, problem in damaged.items())
    return DamagedCheckpointError(
        f"all checkpoints in {folder} are damaged ({listed}). Restore them from a copy, or start a new run in another "
        "folder."
    )


def unsaved(folder: StoragePath, step: int, error: BaseException) -> UnsavedCheckpointError:
    """Return an error of one sentence for a save that failed, with the cause."""
    if isinstance(error, LaunchError) and isinstance(error.__cause__, OSError) and error.__cause__.filename:
        error = error.__cause__  # it names its file: one sentence in another would give two remedies
    # Errors of Orbax and tensorstore have the text of the system's errors, not the numbers.
    full = next((text for text in map(os.strerror, STORAGE_FULL) if text in str(error)), None)
    cause = in_a_line((full or str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."), _MAX_CAUSE)
    if full and not isinstance(folder, Path):  # object storage has no such error
        cause = f"{full} in {tempfile.gettempdir()}, where it is written before the upload"
    return (StorageFullError if full else UnsavedCheckpointError)(
        f"checkpoint {step} in {folder} could not be written: {cause}. The checkpoints before it are unchanged. "
        f"{'Free some space' if full else 'Check the storage'}, then start again."
    )
