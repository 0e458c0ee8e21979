"""The errors of the application."""

from ray_jax_launch import PermanentError


class UsageError(ValueError):
    """Input that cannot be used. The message gives the constraint, the value, and a remedy."""


class RunFailedError(RuntimeError):
    """A failure of a run that has begun, such as storage that is lost."""


class TrainingDivergedError(PermanentError, FloatingPointError):
    """The loss or the gradient is not finite. A restart from the checkpoint would give the same result."""
