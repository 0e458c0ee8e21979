"""Copies of the files of runs in object storage, for commands that only read."""

import os
from pathlib import Path

from pyarrow.fs import FileInfo, FileSelector, FileSystem, LocalFileSystem, copy_files

from pretrain._run.files import replacing
from pretrain._run.folder import RunFolder, locate
from pretrain._run.log_parts import pull_log
from pretrain._surroundings.private_cache import private_cache
from ray_jax_launch import open_uri


def reader_copy(uri: str) -> RunFolder:
    """Return a run in object storage with a local copy of its own, without reading it.

    A command on the same machine that trains the run replaces the files of the copy that `locate` returns. Parts of the
    log stay in the copy, and are not downloaded again.
    """
    return RunFolder(private_cache() / "readers" / locate(uri).path.name, uri)


def pull_changed(folder: RunFolder) -> bool:
    """Download the texts of a run that have changed since the last call. Return whether any has.

    Args:
        folder: a run in object storage. Texts that the storage does not have are deleted from its local folder.

    Raises:
        LaunchError: the storage cannot be reached.
        OSError: a file cannot be read or written.
    """
    assert folder.uri is not None, "a folder needs no copy"
    filesystem, root = open_uri(folder.uri)
    infos = filesystem.get_file_info(FileSelector(root, allow_not_found=True))
    of_names = {info.base_name: info for info in infos if info.is_file}
    has_changed = pull_log(filesystem, root, folder.path)
    for path in (folder.config, folder.result, folder.val_losses):
        if path.name in of_names:
            has_changed |= _download(of_names[path.name], path, filesystem)
        elif path.exists():
            path.unlink()
            has_changed = True
    return has_changed


def _download(info: FileInfo, path: Path, filesystem: FileSystem) -> bool:
    """Download an object unless the file has its time and size. Return whether it was downloaded.

    The file gets the time of the object. Another reader sees the old file or the new one.
    """
    if path.exists() and (path.stat().st_mtime_ns, path.stat().st_size) == (info.mtime_ns, info.size):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        copy_files(info.path, str(partial), filesystem, LocalFileSystem())
        os.utime(partial, ns=(info.mtime_ns, info.mtime_ns))
    return True
