"""Numbers that a caller gives."""

import math
import operator
from typing import Any

from ray_jax_launch._errors import LaunchError


def check_number(name: str, value: Any, *, at_least: float, whole: bool = True, remedy: str = "Change it") -> Any:
    """A number of a caller's as an int, or as a float where it need not be whole.

    Args:
        name: what the number is, for the message.
        value: an int, or what stands for one, such as NumPy's; where it need not be whole, a float too.
        at_least: the smallest number.
        whole: whether it must be a whole number.
        remedy: a sentence for the message, without its end.

    Raises:
        LaunchError: it is no such number, or it is not finite.
    """
    try:
        number = operator.index(value) if whole else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool | str) or not at_least <= number < math.inf:
        kind = "whole number" if whole else "number"
        raise LaunchError(f"{name} must be a {kind} of at least {at_least}, got {value!r}. {remedy}")
    return number
