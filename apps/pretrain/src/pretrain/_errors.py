"""The error for input that the application itself refuses."""


class UsageError(ValueError):
    """Something asked for is not possible. The message says what was expected, what came, and what to do."""
