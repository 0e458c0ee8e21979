"""Ray Train's list of the checkpoints that a run reported (`ray.train.report`), repaired before a start.

Ray 2.60 fails to start if the list is half-written, has the schema of another version, or names a checkpoint whose
folder is missing.
"""

import json
import logging
import re
from importlib.metadata import version
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, FileType

from ray_jax_launch._checkpoint.retry import retry
from ray_jax_launch._ray_internals.ray_train import SNAPSHOT_NAME, write_file

_NAME = "checkpoint_dir_name"

_logger = logging.getLogger("ray_jax_launch")


def repair_snapshot(filesystem: FileSystem, folder: str) -> None:
    """Make the list of a run readable: drop checkpoints that are missing.

    If it cannot be read, the run's folder is listed. A run without a list has no complete checkpoint, as Ray writes the
    list after each one.

    Args:
        filesystem: of the run.
        folder: of the run, in the filesystem.

    Raises:
        LaunchError: the list cannot be read or written.
    """
    path = f"{folder}/{SNAPSHOT_NAME}"
    retry(path, lambda: _repair(filesystem, folder, path))


def _repair(filesystem: FileSystem, folder: str, path: str) -> None:
    kind = filesystem.get_file_info(path).type
    if kind == FileType.NotFound:
        return
    text = ""
    if kind == FileType.File:  # a pipe would not end
        with filesystem.open_input_stream(path) as file:
            text = file.read().decode(errors="replace")
    try:
        state = json.loads(text)
        entries = [{"version": 0, "metrics": {}} | entry for entry in state["checkpoint_results"]]
        names = [entry[_NAME] for entry in entries]
        _rebuild(state, entries, set())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        state, names = {}, _find_names(filesystem, folder, text)
        entries = [{"version": 0, _NAME: name, "metrics": {}} for name in names]
        _logger.warning("%s is damaged; found the checkpoints %s", path, ", ".join(names) or "none")
    missing = {name for name in names if filesystem.get_file_info(f"{folder}/{name}").type == FileType.NotFound}
    if missing:
        _logger.warning("the checkpoints %s are missing in %s", ", ".join(sorted(missing)), folder)
    repaired = _rebuild(state, entries, missing)
    if repaired != state:
        write_file(filesystem, path, json.dumps(repaired))


def _find_names(filesystem: FileSystem, folder: str, text: str) -> list[str]:
    """Return the checkpoints that a damaged list still names, and those in the run's folder, oldest first."""
    listed = filesystem.get_file_info(FileSelector(folder))
    # Object storage has no times of folders. By default, Ray's names begin with the time.
    in_folder = {info.base_name: info.mtime_ns or 0 for info in listed if info.type == FileType.Directory}
    named = set(re.findall(rf'"{_NAME}": *"([^"]+)"', text))
    names = named | {name for name in in_folder if name.startswith("checkpoint_")}
    return sorted(names, key=lambda name: (in_folder.get(name, 0), name))


def _rebuild(state: dict[str, Any], entries: list[dict[str, Any]], missing: set[str]) -> dict[str, Any]:
    """Return the list without the missing checkpoints, with all fields of this version of Ray."""
    indices = state.get("checkpoint_report_indices")
    if not isinstance(indices, list) or len(indices) != len(entries):
        indices = list(range(len(entries)))
    kept = [(index, entry) for index, entry in zip(indices, entries, strict=True) if entry[_NAME] not in missing]
    next_index = state.get("current_report_index")
    if type(next_index) is not int:
        next_index = max(indices, default=-1) + 1
    latest = state.get("latest_checkpoint_result") or {}
    if latest.get(_NAME) not in {entry[_NAME] for _, entry in kept}:
        latest = max(kept, key=lambda pair: pair[0], default=(0, None))[1]
    pending = [
        (entry, spec)
        for entry, spec in zip(
            state.get("pending_training_results", []), state.get("pending_validation_specs", []), strict=False
        )
        if entry[_NAME] not in missing
    ]
    return {
        "ray_version": version("ray"),
        "checkpoint_results": [entry for _, entry in kept],
        "checkpoint_report_indices": [index for index, _ in kept],
        "latest_checkpoint_result": latest,
        "pending_training_results": [entry for entry, _ in pending],
        "pending_validation_specs": [spec for _, spec in pending],
        "current_report_index": next_index,
        **{
            key: state.get(key, [])
            for key in (
                "validated_checkpoint_dir_names",
                "timed_out_validation_checkpoint_dir_names",
                "failed_validation_checkpoint_dir_names",
            )
        },
    }
