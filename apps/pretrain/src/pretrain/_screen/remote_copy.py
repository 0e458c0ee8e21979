"""A copy of the small files of a run in object storage, for commands that only read."""

from pathlib import Path

from pyarrow.fs import FileSelector, LocalFileSystem, copy_files

from pretrain._run.folder import RunFolder
from ray_jax_launch import open_uri


def pull_changed(folder: RunFolder) -> bool:
    """Download the texts of a run that have changed since the last call. Return whether any has.

    A command that watches has a copy of its own: `RunFolder.pull` would change the copy of the command that trains.

    Args:
        folder: a run in object storage. The modification times in its local folder are those of the objects.

    Raises:
        LaunchError: the storage cannot be reached.
        OSError: a file cannot be read or written.
    """
    assert folder.uri is not None, "a folder needs no copy"
    filesystem, root = open_uri(folder.uri)
    wanted = {path.name: path for path in watched_files(folder)}
    has_changed = False
    folder.path.mkdir(parents=True, exist_ok=True)
    for info in filesystem.get_file_info(FileSelector(root, allow_not_found=True)):
        path = wanted.get(info.base_name)
        if path is None or not info.is_file:
            continue
        stamp = path.with_name(f".{path.name}.stamp")
        version = f"{info.mtime_ns} {info.size}"
        if not stamp.exists() or stamp.read_text() != version:
            copy_files(info.path, str(path), filesystem, LocalFileSystem())
            stamp.write_text(version)
            has_changed = True
    return has_changed


def watched_files(folder: RunFolder) -> list[Path]:
    """Return the paths of the files that tell how far a run is."""
    return [folder.config, folder.metrics, folder.starts, folder.phases, folder.samples, folder.result]
