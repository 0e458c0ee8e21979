"""The one error that this package raises for bad input."""


class DataError(ValueError):
    """Something about the data is not as it must be. The message says what, and what to do."""


class InterruptedWorkError(DataError):
    """The work stopped for a reason that is not in the data: what is done stays, the same call goes on from there."""
