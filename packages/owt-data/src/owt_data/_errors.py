"""The one error that this package raises for bad input."""


class DataError(ValueError):
    """Something about the data is not as it must be. The message says what, and what to do."""


class InterruptedWorkError(DataError):
    """The work stopped, and what is done stays: the same call as before goes on from there."""
