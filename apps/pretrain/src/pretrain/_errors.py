"""The errors of the application."""

from ray_jax_launch import PermanentError


class UsageError(ValueError):
    """Something asked for is not possible. The message says what was expected, what came, and what to do."""


class TrainingDivergedError(PermanentError, FloatingPointError):
    """The loss or the gradient is no longer finite. From the same checkpoint it would happen again."""
