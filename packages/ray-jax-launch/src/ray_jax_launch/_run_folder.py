"""The folder of a run, made for a launch: workers find it by a marker file."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ray_jax_launch._errors import LaunchError
from ray_jax_launch._storage import StoragePath, join_path, open_uri

_MARKER = ".launch-"


class RunFolder(NamedTuple):
    """The folder of a run, or its URI."""

    path: StoragePath
    marker: Path | None
    """A file in the folder, which every worker must find there. None in object storage."""


@contextlib.contextmanager
def making_run_folder(storage_path: StoragePath, name: str) -> Iterator[RunFolder]:
    """Make the run's folder, with a marker file. A LaunchError of the block deletes both.

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
            for left in run_path.glob(f"{_MARKER}*"):  # left by a launch that was killed
                left.unlink(missing_ok=True)
            marker.touch()
        except OSError as error:
            raise LaunchError(
                f"storage_path must be a folder that can be written, got {run_path} ({error.strerror}). Choose another"
            ) from error
        yield RunFolder(run_path, marker)
    except LaunchError:
        for path, delete in ((marker, Path.unlink), *((path, Path.rmdir) for path in reversed(made))):
            with contextlib.suppress(OSError):  # it does not exist, or another process has written into it
                delete(path)
        raise
