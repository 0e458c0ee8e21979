"""The folder of this application in the user's cache, which no other user may read or change."""

import os
import stat
from itertools import accumulate
from pathlib import Path

import platformdirs

from pretrain._errors import UsageError


def private_cache(application: str = "pretrain", *parts: str) -> Path:
    """Return a folder in the user's cache, which is `~/.cache` on Linux. It is made if it is missing.

    Compiled programs in it are run, and copies of runs and tokens are texts of the user.

    Args:
        application: the name of the folder.
        parts: the names of folders inside it, each in the one before.

    Raises:
        UsageError: the folder belongs to another user, or is a link that another user has made.
        OSError: the folder cannot be made.
    """
    folder = platformdirs.user_cache_path(application)
    for path in accumulate(parts, Path.joinpath, initial=folder):
        _make_private(path)
    return folder.joinpath(*parts)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for found in (folder.lstat(), folder.stat()):
        if found.st_uid != os.getuid():
            raise UsageError(
                f"{folder} must be a folder of this user, got one of user {found.st_uid}. Set XDG_CACHE_HOME to "
                "another."
            )
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
