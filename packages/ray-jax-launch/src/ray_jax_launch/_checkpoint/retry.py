"""Retries for storage that fails and then works, such as NFS after a failover or a busy object store."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ray_jax_launch._errors import LaunchError, in_a_line

# Seconds between the attempts, about 15 s in total. pyarrow's S3 client repeats a request for 6 s before it fails.
DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
# The file does not exist. This is an answer, not a failure.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# A full disk, and a full quota.
STORAGE_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors that are not temporary. pyarrow sets no number for the answers of an object store.
_PERMANENT = frozenset(
    {
        *STORAGE_FULL, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENAMETOOLONG,
        errno.ELOOP, errno.EINVAL, errno.EFBIG,
    }
)  # fmt: skip
_PERMANENT_ANSWERS = ("ACCESS_DENIED", "NO_SUCH_BUCKET")
# The answer of S3 if an object is deleted between the requests for its size and for its content.
_ABSENT_ANSWER = "NO_SUCH_KEY"

_MOST_CHARACTERS = 240
_logger = logging.getLogger("ray_jax_launch")
T = TypeVar("T")


def retry(what: str, action: Callable[[], T]) -> T:
    """Call a function until it succeeds, with growing delays after temporary errors such as EIO and HTTP 503.

    Args:
        what: name, in messages, of the file that the function reads or writes.
        action: a function that can be called again after it failed.

    Raises:
        LaunchError: all attempts failed, or the error is not temporary.
        FileNotFoundError, NotADirectoryError, IsADirectoryError: the storage works, and the file does not exist.
    """
    delays_s = iter(DELAYS_S)
    while True:
        try:
            return action()
        except ABSENT:
            raise
        except OSError as error:
            if _ABSENT_ANSWER in str(error):
                raise FileNotFoundError(str(error)) from error
            delay_s = next(delays_s, None) if _is_temporary(error) else None
            if delay_s is None:
                raise LaunchError(
                    f"{in_a_line(what, _MOST_CHARACTERS)} cannot be accessed: {error}. Nothing was changed. Check the "
                    "storage, then start again."
                ) from error
            _logger.warning("%s cannot be accessed (%s): the next attempt is in %s s", what, error, delay_s)
        time.sleep(delay_s)


def _is_temporary(error: OSError) -> bool:
    return error.errno not in _PERMANENT and not any(answer in str(error) for answer in _PERMANENT_ANSWERS)
