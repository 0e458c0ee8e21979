"""The wording that all errors of this package share."""

import numbers
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Upper limits on the characters of a value, and of a text that an error composes of several values.
_VALUE_CHARS, _TEXT_CHARS = 80, 400

INT32_MAX = 2**31 - 1

# Larger numbers would become infinite on a device.
FLOAT32_MAX = 3.4028234663852886e38


def one_line(text: Any, limit: int = _VALUE_CHARS) -> str:
    r"""Return a text for an error: without line breaks and control characters, its middle cut if it is too long.

    >>> one_line("one" + chr(10) + "two")
    'one\\ntwo'
    >>> len(one_line("x" * 5000))
    80
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
    tail = limit // 4
    return line if len(line) <= limit else f"{line[: limit - tail - 3]}...{line[-tail:]}"


def shown(value: Any) -> str:
    """Return the `repr` of a value for an error: on one line, at most 80 characters."""
    try:
        return one_line(repr(value))
    except RecursionError:
        return f"a very large {type(value).__name__}"
    except ValueError:  # Python writes no int of more than 4,300 digits
        is_int = isinstance(value, int)
        return "a number of more than 4,300 digits" if is_int else f"a very large {type(value).__name__}"
    except Exception:  # the value's own
        return f"one {type(value).__name__}, which has no text"


def value_error(name: str, constraint: str, got: Any, remedy: str = "") -> ValueError:
    """Return the error `<name> must <constraint>, got <got>. <remedy>`, on one line.

    Args:
        name: the name of the value. It may contain a path.
        constraint: what must hold.
        got: the value, or a text that describes it. A text shows values by `shown` or `one_line`.
        remedy: a sentence that tells what to do.
    """
    found = one_line(got, _TEXT_CHARS) if isinstance(got, str) else shown(got)
    return ValueError(f"{one_line(name, _TEXT_CHARS)} must {constraint}, got {found}. {remedy}".rstrip())


def state_error(sentence: str) -> ValueError:
    """Return an error about something that is not a value, such as a network that does not answer."""
    return ValueError(sentence)


def require(holds: bool, name: str, constraint: str, got: Any, remedy: str = "") -> None:
    """Raise `value_error` unless the constraint holds."""
    if not holds:
        raise value_error(name, constraint, got, remedy)


def kind(value: Any) -> str:
    """Return what a value is, for an error: the type and shape of an array, a short value, or the name of its type."""
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        masked = "masked " if type(value).__name__ == "MaskedArray" else ""
        return f"{masked}{value.dtype}{list(value.shape)}"
    is_short = value is None or isinstance(value, (str, bytes, numbers.Number))
    return shown(value) if is_short else f"an object of type {type(value).__name__}"


def check_type(name: str, value: Any, expected: Any, remedy: str = "") -> None:
    """Raise `value_error` unless a value has the type, or one of a union of types."""
    wanted = getattr(expected, "__name__", str(expected))
    require(isinstance(value, expected), name, f"be of type {wanted}", kind(value), remedy)


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated. An array without dimensions has `__iter__`, and cannot."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def is_one_of(value: Any, choices: tuple[str, ...]) -> bool:
    """Return whether a value is one of several texts. Another value may have an `==` that gives no bool."""
    return isinstance(value, str) and value in choices


# No path of Linux has more, with the zero byte at its end.
_MOST_PATH_BYTES = 4096


def check_path(name: str, path: Any) -> Path:
    """Return the path of a file or folder. Raise `value_error` if no file can have it."""
    check_type(name, path, str | os.PathLike)
    try:
        name_bytes = os.fsencode(path)
        is_path = b"\0" not in name_bytes and len(name_bytes) < _MOST_PATH_BYTES
    except (UnicodeEncodeError, TypeError):  # half of a surrogate pair; a path object without a text
        is_path = False
    require(is_path, name, "be a name that a file can have", shown(path))
    return Path(os.fsdecode(path))


def plain(value: Any) -> Any:
    """Return a number as an int or a float: small integers of numpy overflow, and jax takes no fractions."""
    if _is_a(numbers.Integral, value):
        return int(value)
    try:
        return float(value) if _is_a(numbers.Real, value) else value
    except OverflowError:  # beyond the range of a float: the check of its range rejects it
        return value


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float32 can hold: neither infinite nor NaN, and no bool."""
    return _is_a(numbers.Real, value) and abs(value) <= FLOAT32_MAX


def is_whole(value: Any, least: int, most: int | None = None) -> bool:
    """Return whether a value is a whole number from `least` to `most`, of an integer type but not a bool."""
    return _is_a(numbers.Integral, value) and least <= value and (most is None or value <= most)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
