"""Checks of numbers that a caller passes."""

import math
import operator
from typing import Any

from ray_jax_launch._errors import LaunchError, shown


def check_number(name: str, value: Any, *, at_least: float, whole: bool = True, remedy: str = "Change it") -> Any:
    """Return a caller's number as an int, or as a float if it need not be whole.

    Args:
        name: name of the number in the message.
        value: an int or NumPy integer. If the number need not be whole, a float is accepted too.
        at_least: smallest number that is accepted.
        whole: True if the number must be whole.
        remedy: last sentence of the message, without the period.

    Raises:
        LaunchError: the value is not a number, not finite, or too small.
    """
    try:
        number = operator.index(value) if whole else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool | str) or not at_least <= number < math.inf:
        kind = "whole number" if whole else "number"
        raise LaunchError(f"{name} must be a {kind} of at least {at_least}, got {shown(value)}. {remedy}.")
    return number
