"""Checks of the numbers and types that a caller passes."""

import math
import operator
from collections.abc import Mapping
from typing import Any

from ray_jax_launch._errors import LaunchError, shown

MAX_COUNT = 10**6
"""More workers, devices or CPUs than any cluster has."""


def check_number(
    name: str, value: Any, *, at_least: float, at_most: float = math.inf, whole: bool = True, remedy: str = ""
) -> Any:
    """Return a caller's number as an int, or as a float if it need not be whole.

    Args:
        name: name of the number in the message.
        value: an int or NumPy integer. If the number need not be whole, a float is accepted too.
        at_least: smallest number that is accepted.
        at_most: largest number that is accepted, if there is one. An infinite number is not accepted.
        whole: True if the number must be whole.
        remedy: last sentence of the message, without the period. Empty if the constraint says it.

    Raises:
        LaunchError: the value is not a number, not finite, too small or too large.
    """
    try:
        number = operator.index(value) if whole else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool | str) or not at_least <= number < math.inf or number > at_most:
        kind = "whole number" if whole else "number"
        end = f" and at most {at_most}" if at_most < number < math.inf else ""
        raise LaunchError(f"{name} must be a {kind} of at least {at_least}{end}, got {shown(value)}.{_last(remedy)}")
    return number


def check_type(name: str, value: Any, kind: Any, constraint: str, remedy: str = "") -> None:
    """Check the type of what a caller passes.

    Args:
        name: name of the value in the message.
        value: of a caller.
        kind: the type, or the union of types, that is accepted.
        constraint: the type in words.
        remedy: last sentence of the message, without the period. Empty if the constraint says it.

    Raises:
        LaunchError: the value has another type.
    """
    if not isinstance(value, kind):
        raise LaunchError(f"{name} must be {constraint}, got {shown(value)}.{_last(remedy)}")


def _last(remedy: str) -> str:
    return f" {remedy}." if remedy else ""


def check_flag(name: str, value: Any) -> None:
    """Check that a value is a bool: a text such as "no" would count as true.

    Raises:
        LaunchError: it has another type.
    """
    check_type(name, value, bool, "True or False", "Choose one")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check that a value is one of several texts. Another value may have an `==` that gives no bool.

    Raises:
        LaunchError: it is another one.
    """
    if not isinstance(value, str) or value not in choices:
        raise LaunchError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}. Choose one.")


def check_resources_per_worker(resources: Any) -> None:
    """Check the Ray resources of a worker, or None.

    Raises:
        LaunchError: they are not amounts by name.
    """
    name, remedy = "resources_per_worker", 'Write them as in {"CPU": 2}'
    check_type(name, resources, Mapping | None, "a dict of amounts", remedy)
    for resource, amount in (resources or {}).items():
        check_type(f"each name in {name}", resource, str, "a text", remedy)
        check_number(f"{name}[{shown(resource)}]", amount, at_least=0, whole=False)
