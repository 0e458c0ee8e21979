"""The errors of this package that a caller can catch or raise."""


class LaunchError(ValueError):
    """What was asked for cannot be run. The message says what was expected, what came, and what to do.

    A loop may raise it too, for what only a worker can see. `launch` then raises it, and restarts nothing.
    """


class OutOfMemoryError(LaunchError):
    """What a loop computes does not fit in memory. A restart does not help, so `launch` does not try."""


class PermanentError(RuntimeError):
    """A failure of a loop that would happen again after a restart, such as a loss that is no longer finite.

    Raise it, or a subclass, in a loop: `launch` restarts nothing, and raises `TrainingFailed`.
    """


class DamagedCheckpointError(ValueError):
    """No checkpoint of a run can be restored: all of them are damaged."""


class DeletedCheckpointError(ValueError):
    """A checkpoint was deleted while it was read, because the run that writes it has a newer one."""


class MismatchedCheckpointError(LaunchError):
    """A checkpoint does not hold the arrays that it is to be restored into: another model has written it."""


class UnsavedCheckpointError(RuntimeError):
    """A checkpoint could not be written. The error that prevented it is the cause (`__cause__`)."""


class StorageFullError(UnsavedCheckpointError, LaunchError):
    """A checkpoint could not be written for want of room. A restart does not help, so `launch` does not try."""


class TrainingFailed(RuntimeError):
    """A worker failed more often than it may.

    Attributes:
        rank: the first worker that failed, or None where the launch itself did.
        details: that worker's traceback.
        log_folder: Ray's full logs, on each node.
    """

    def __init__(self, message: str, rank: int | None, details: str, log_folder: str) -> None:
        super().__init__(f"{message} (full logs: {log_folder})")
        self.rank = rank
        self.details = details
        self.log_folder = log_folder
