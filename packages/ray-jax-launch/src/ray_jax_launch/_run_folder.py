"""The folder of a run, made for a launch: workers find it by a marker file."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._ray_internals import STORAGE_MARKER_NAME
from ray_jax_launch._storage import StoragePath, join_path, open_uri

_MARKER = ".launch-"
# A killed launch leaves its marker. A younger one may be that of a launch that still runs.
_LEFT_AFTER_S = 24 * 3600.0


class RunFolder(NamedTuple):
    """The folder of a run, or its URI."""

    path: StoragePath
    marker: Path | None
    """A file in the folder, which every worker must find there. None in object storage."""


@contextlib.contextmanager
def making_run_folder(storage_path: StoragePath, name: str) -> Iterator[RunFolder]:
    """Make the run's folder, with a marker file while the block runs.

    If the block raises, the folders that were made are deleted, unless there is something in them.

    Raises:
        LaunchError: the storage cannot be written or reached.
    """
    run_path = join_path(storage_path, name)
    if not isinstance(run_path, Path):
        open_uri(run_path, create=True)
        yield RunFolder(run_path, None)
        return
    run_path = run_path.absolute()
    marker = run_path / f"{_MARKER}{uuid.uuid4().hex}"
    made: list[Path] = []
    try:
        try:
            made += (path for path in (*reversed(run_path.parents), run_path) if not path.exists())
            run_path.mkdir(parents=True, exist_ok=True)
            for left in run_path.glob(f"{_MARKER}*"):
                with contextlib.suppress(FileNotFoundError):  # its launch has ended just now
                    if time.time() - left.stat().st_mtime > _LEFT_AFTER_S:
                        left.unlink()
            marker.touch()
        except OSError as error:
            raise LaunchError(
                f"storage_path must be a folder that can be written, got {run_path} ({error.strerror}). Choose another."
            ) from error
        yield RunFolder(run_path, marker)
    except BaseException:  # of any kind, also Ctrl-C: a launch that has not begun leaves nothing
        _delete_markers(marker)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # it does not exist, or there is something in it
                path.rmdir()
        raise
    _delete_markers(marker)


def _delete_markers(marker: Path) -> None:
    """Delete the marker of a launch. The last launch deletes Ray's too, which Ray leaves behind."""
    with contextlib.suppress(OSError):  # the folder could not be made, or can no longer be reached
        marker.unlink(missing_ok=True)
        if not any(marker.parent.glob(f"{_MARKER}*")):
            (marker.parent / STORAGE_MARKER_NAME).unlink(missing_ok=True)
