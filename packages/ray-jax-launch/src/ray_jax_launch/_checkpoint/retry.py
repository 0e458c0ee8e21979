"""Repeated attempts at storage that fails and then works: NFS after a failover, a busy object store."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ray_jax_launch._errors import LaunchError

# Seconds between the attempts: about 15 s in all. pyarrow's S3 client repeats a request for 6 s before it fails.
DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
# The answer that there is no such file. It is an answer, and not a failure.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Errors that do not pass by themselves. pyarrow sets no number for what an object store answers.
_LASTING = frozenset(
    {
        errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE,
        errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
    }
)  # fmt: skip
_LASTING_ANSWERS = ("ACCESS_DENIED", "NO_SUCH_BUCKET")
# What S3 answers about an object that was deleted between the question for its size and that for its content.
_ABSENT_ANSWER = "NO_SUCH_KEY"

_logger = logging.getLogger("ray_jax_launch")
T = TypeVar("T")


def retry(what: str, action: Callable[[], T]) -> T:
    """Call a function until it succeeds, with growing delays after errors that may pass, such as EIO and HTTP 503.

    Args:
        what: the thing that the function reads or writes, for messages.
        action: the function. It can be called again after it failed.

    Raises:
        LaunchError: the storage failed, and went on failing.
        FileNotFoundError, NotADirectoryError, IsADirectoryError: the storage works, and there is no such file.
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
            delay_s = next(delays_s, None) if _may_pass(error) else None
            if delay_s is None:
                raise LaunchError(
                    f"{what} must be accessible, got {error}. Nothing was changed: check the storage, then start again"
                ) from error
            _logger.warning("%s cannot be accessed (%s): the next attempt is in %s s", what, error, delay_s)
        time.sleep(delay_s)


def _may_pass(error: OSError) -> bool:
    """Whether the same call can succeed later although nobody does anything."""
    return error.errno not in _LASTING and not any(answer in str(error) for answer in _LASTING_ANSWERS)
