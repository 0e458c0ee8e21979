"""The sentences for errors that a command's input or its surroundings cause."""

import errno

# What a write to a file that is open fails with. Such an error names no file.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def rejection(error: Exception) -> str | None:
    """The sentence for an error that the user can mend; None for any other."""
    from owt_data import DataError
    from pretrain._errors import UsageError
    from ray_jax_launch import DamagedCheckpointError, LaunchError

    if isinstance(error, DamagedCheckpointError | DataError | LaunchError | UsageError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} must be accessible, got {error.strerror}. Check it, or name another."
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return f"the output must be writable, got {error.strerror}. Free some space, or write it elsewhere."
    if isinstance(error, OSError) and error.errno is None:  # as pyarrow tells of object storage
        return f"the storage must be accessible, got {error}. Check its address, and the network."
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"the model and its batch must fit the memory, got {error or 'no memory'}. Ask for less at a time."
    return None
