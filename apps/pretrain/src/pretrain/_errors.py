"""The errors of the application, and one sentence for each error that the user can correct."""

import contextlib
import errno
from collections.abc import Iterator

from ray_jax_launch import PermanentError

# Errors of a write to an open file. They name no file.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class UsageError(ValueError):
    """Input that cannot be used. The message gives the constraint, the value, and a remedy."""


class RunFailedError(RuntimeError):
    """A failure of a run that has begun, such as storage that is lost."""


class TrainingDivergedError(PermanentError, FloatingPointError):
    """The loss or the gradient is not finite. A restart from the checkpoint would give the same result."""


def rejection(error: Exception) -> str | None:
    """Return the sentence for an error that the user can correct, or None for any other error."""
    from owt_data import DataError
    from ray_jax_launch import DamagedCheckpointError, LaunchError

    if isinstance(error, DamagedCheckpointError | DataError | LaunchError | UsageError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} must be accessible, got {error.strerror}. Check it, or give another path."
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return f"the output must be writable, got {error.strerror}. Free some space, or write it elsewhere."
    if isinstance(error, OSError) and error.errno is None:  # pyarrow's errors of object storage have no number
        return f"the storage must be accessible, got {error}. Check its address, and the network."
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"the model and its batch must fit the memory, got {error or 'no memory'}. Lower the batch size."
    return None


@contextlib.contextmanager
def storage_failures() -> Iterator[None]:
    """Make an OSError of the block a failure of the run: its input was right when the run began.

    Raises:
        RunFailedError: a file or the object storage has become unavailable.
    """
    try:
        yield
    except OSError as error:
        raise RunFailedError(rejection(error) or str(error)) from error
