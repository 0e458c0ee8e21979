"""Errors of this package that a caller can catch or raise."""


class LaunchError(ValueError):
    """An argument or the environment is not valid. The message names the constraint, the value and the remedy.

    A loop may raise it too, for an error that only a worker can see. `launch` then raises it and does not restart.
    """


class OutOfMemoryError(LaunchError):
    """The computation of a loop does not fit in memory. `launch` does not restart, which would not help."""


class PermanentError(RuntimeError):
    """A failure of a loop that a restart would repeat, such as a loss that is not finite.

    Raise it or a subclass in a loop. `launch` then does not restart, and raises `TrainingFailed`.
    """


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written. From a search for an undamaged checkpoint: all are damaged."""


class DeletedCheckpointError(ValueError):
    """A checkpoint was deleted while it was read, because the run has a newer checkpoint."""


class MismatchedCheckpointError(LaunchError):
    """A checkpoint does not hold the arrays that are to be restored: another model wrote it."""


class UnsavedCheckpointError(RuntimeError):
    """A checkpoint could not be written. `__cause__` is the error that prevented it."""


class StorageFullError(UnsavedCheckpointError, LaunchError):
    """A checkpoint could not be written to full storage. `launch` does not restart, which would not help."""


class TrainingFailed(RuntimeError):
    """A worker failed more often than `max_failures` allows.

    Attributes:
        rank: the first worker that failed, or None if the launch itself failed.
        details: traceback of this worker.
        log_folder: folder of Ray's full logs on each node; empty without Ray.
    """

    def __init__(self, message: str, rank: int | None, details: str, log_folder: str) -> None:
        super().__init__(f"{message} (full logs: {log_folder})" if log_folder else message)
        self.rank = rank
        self.details = details
        self.log_folder = log_folder
