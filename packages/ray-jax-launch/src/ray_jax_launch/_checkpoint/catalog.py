"""Which checkpoints there are, and whether their files are those that were written.

Imports no jax, so that drivers can ask without touching the devices.
"""

import logging
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ray_jax_launch._checkpoint.folder_store import FolderStore
from ray_jax_launch._checkpoint.object_store import ObjectStore
from ray_jax_launch._errors import DamagedCheckpointError
from ray_jax_launch._storage import StoragePath, as_storage_path

_logger = logging.getLogger("ray_jax_launch")


class CheckpointStore(Protocol):
    """Checkpoints by their numbers, in a folder or in object storage. Written by one process at a time."""

    def prepare(self) -> None:
        """Make the place ready for a run that writes: delete what a killed process left half written."""
        ...

    def steps(self) -> list[int]:
        """Numbers of the complete checkpoints, in no order."""
        ...

    def version(self, step: int) -> Hashable:
        """Something that stays equal as long as a checkpoint is there; None once it is deleted."""
        ...

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved as a checkpoint's metadata."""
        ...

    def score(self, step: int) -> float | None:
        """What the best checkpoints are chosen by."""
        ...

    def find_damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint; None if nothing is."""
        ...

    def quarantine(self, step: int) -> None:
        """Quarantine a checkpoint: list it no longer."""
        ...

    def delete(self, step: int) -> None:
        """Delete a checkpoint."""
        ...


def open_store(folder: StoragePath) -> CheckpointStore:
    """The checkpoints in a folder or below a URI."""
    place = as_storage_path(folder)
    return FolderStore(place) if isinstance(place, Path) else ObjectStore(place)


def latest_step(folder: StoragePath) -> int | None:
    """Number of the newest complete checkpoint in a folder or below a URI, or None where there is none.

    A checkpoint that is being written is not listed. Nothing is read: see `intact_step`.
    """
    return max(list_steps(folder), default=None)


def list_steps(folder: StoragePath) -> list[int]:
    """Numbers of all complete checkpoints in a folder or below a URI, in no order."""
    return open_store(folder).steps()


def newest_metadata(folder: StoragePath) -> dict[str, Any] | None:
    """The metadata of the newest checkpoint whose metadata can be read, or None where there is none.

    A checkpoint whose metadata are damaged, or that a running run deletes meanwhile, is passed over. The arrays are not
    read: see `intact_step`.

    Args:
        folder: where the checkpoints are; a URI is object storage.

    Raises:
        LaunchError: the storage cannot be read, also after several attempts.
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
    """Number of the newest checkpoint whose files have the sizes and checksums they were written with.

    Every file of the newest checkpoint is read; files of older ones only if the newest is damaged. A checkpoint that
    a running run deletes meanwhile is skipped. In a folder, a checkpoint without checksums, as versions before 0.3
    could leave them, counts as intact.

    Args:
        folder: where the checkpoints are; a URI is object storage.
        quarantine: quarantine damaged checkpoints: rename them, from 40 to 40.damaged, so that they are no longer
            listed and their numbers are free. (In object storage the object that lists it is renamed.) For one
            process, while none writes.

    Returns:
        The number, or None where there is no checkpoint at all. Each damaged one is logged as a warning.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
        LaunchError: the storage cannot be read, also after several attempts. Nothing was changed.
    """
    store = open_store(folder)
    damaged: dict[int, str] = {}
    step = None
    while left := sorted(set(store.steps()) - damaged.keys(), reverse=True):
        problem = store.find_damage(left[0])
        if problem is None:
            step = left[0]
            break
        if left[0] in store.steps():  # else the run that writes has deleted it
            damaged[left[0]] = problem
    if damaged and step is None:
        raise all_damaged(folder, damaged)
    for number, problem in damaged.items():
        _logger.warning(
            "checkpoint %s in %s is damaged (%s): going back to checkpoint %s", number, folder, problem, step
        )
        if quarantine:
            store.quarantine(number)
    return step


def all_damaged(folder: StoragePath, damaged: Mapping[int, str]) -> DamagedCheckpointError:
    """The error that says that every checkpoint is damaged, and how."""
    listed = "; ".join(f"{step}: {problem}" for step, problem in damaged.items())
    return DamagedCheckpointError(
        f"expected an undamaged checkpoint in {folder}, but all are damaged ({listed}): restore them from a copy, "
        "or start a new run in another folder"
    )
