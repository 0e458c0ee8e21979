"""Errors about data, and the checks that several modules share."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

LARGEST = (1 << 62) - 1
"""Largest integer that an option or a record may hold. Twice this number fits into 64 bits."""

MOST_PROCESSES = 1 << 16
"""Largest number of processes or concurrent tasks."""

# The part of a URI before the @: `key:secret`, where the secret may have a slash, or a name alone; and its options.
_USER = re.compile(r"(?<=://)(?:[^\s/?#@,]+|[^\s/?#@:,]*:(?!\d+/)[^\s@]*)@")
_SECRET_OPTION = re.compile(
    r"((?<=[?&])[^\s=&?#]*(?:key|secret|token|password|signature|credential)[^\s=&?#]*)=[^\s&,']+", re.I
)
_VALUE_CHARS, _NAME_CHARS, _REASON_CHARS = 80, 240, 300


class DataError(ValueError):
    """Error about data or options. The message names the constraint, the value and a remedy."""


class RejectedDocumentsError(DataError):
    """Error in the documents themselves: every shard that was made from them is useless.

    All other failures (network, cluster, disk, tokenizer files) are plain `DataError`s. After these, the same call
    resumes after the last finished shard.
    """


class UnreadableError(DataError):
    """Error about a file that is missing, cut short or cannot be read now. A later try may succeed."""


def show(value: object) -> str:
    """Return a value for an error: its `repr`, on one line, of at most about 80 characters."""
    try:
        return _shorten(" ".join(repr(value).split()), _VALUE_CHARS)
    except (ValueError, RecursionError):  # an integer of more than 4300 digits, or nested values
        return f"a very large {type(value).__name__}"
    except Exception:  # the value's own
        return f"one {type(value).__name__}, which has no text"


def show_name(name: object) -> str:
    """Return the name of a file or a source for an error, on one line. The middle of a long name is left out."""
    return _shorten(_escape(str(name)), _NAME_CHARS)


def one_line(text: object) -> str:
    """Return a message on one line of bounded length, without its final full stop."""
    words = (_shorten(_escape(word), _VALUE_CHARS) for word in str(text).split())
    return _shorten(" ".join(words).rstrip("."), _REASON_CHARS)


def _escape(text: str) -> str:
    """Replace characters that are not printable by their escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _shorten(text: str, most: int) -> str:
    """Hide the credentials of URIs, and leave out the middle of a text with more than `most` characters."""
    text = _SECRET_OPTION.sub(r"\1=***", _USER.sub("***@", text))
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def check_type(name: str, value: object, expected: Any, constraint: str, remedy: str = "") -> None:
    """Check the type of an argument.

    Args:
        name: the name of the value, for the error.
        value: the value.
        expected: as the second argument of `isinstance`.
        constraint: what the value must be.
        remedy: a sentence, or empty.

    Raises:
        DataError: the value has another type.
    """
    if not isinstance(value, expected):
        raise DataError(f"{name} must be {constraint}, got {show(value)}. {remedy}".rstrip())


def check_flag(name: str, value: bool) -> None:
    """Check that an argument is a boolean. A text such as "no" would count as true."""
    check_type(name, value, bool, "True or False")


def check_function(name: str, value: Callable[..., Any] | None) -> None:
    """Check that an argument is None or can be called."""
    check_type(name, value, Callable | None, "a function or None", "Give a function, or leave it out.")


def is_number(value: object) -> bool:
    """Return whether a value is a real number. True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_integer(name: str, value: int, *, least: int, most: int = LARGEST) -> int:
    """Check that a value is an integer within bounds, and return it. True and False are not.

    Args:
        name: the name of the value, for the error.
        value: the value.
        least: its lower bound.
        most: its upper bound.

    Returns:
        The value as Python's integer. Products and sums of numpy's small integers would overflow.

    Raises:
        DataError: the value has another type, or is out of bounds.
    """
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not least <= int(value) <= most:
        is_large = is_integer and int(value) > most
        bounds = f"of at least {least}" if most == LARGEST and not is_large else f"from {least} to {most}"
        raise DataError(f"{name} must be an integer {bounds}, got {show(value)}.")
    return int(value)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Check that a value is one of several.

    Raises:
        DataError: the value is another one.
    """
    if not isinstance(value, str) or value not in choices:
        raise DataError(f"{name} must be one of {', '.join(choices)}, got {show(value)}.")


def check_text(name: str, text: str, *, least: int = 0) -> None:
    """Check that a value is a text of at least some characters, and can be encoded as UTF-8.

    Raises:
        DataError: it has another type, is too short, or holds half a surrogate pair, as an argument of
            other bytes does.
    """
    try:
        is_text = isinstance(text, str) and len(text) >= least and text.encode() is not None
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        constraint = "UTF-8 text" if least == 0 else f"UTF-8 text of at least {least} character"
        raise DataError(f"{name} must be {constraint}, got {show(text)}.")


@contextmanager
def file_errors(
    constraint: str, name: object = "", remedy: str = "Correct that and run the same command again."
) -> Iterator[None]:
    """Raise the errors of an operating system or a storage as `DataError`s. Also works as a decorator.

    Args:
        constraint: the requirement on the file, such as `readable`.
        name: the file, for errors that do not name it.
        remedy: a sentence.

    Raises:
        DataError: a file cannot be used, or its name cannot be encoded.
    """
    try:
        yield
    except OSError as error:
        place = error.filename or name or "the file"
        if isinstance(error, FileExistsError):  # of `mkdir`
            raise UnreadableError(f"{show_name(place)} must be a folder, got something else. Move it away.") from error
        found = one_line(str(error.strerror or error).rpartition("Detail: ")[2])  # pyarrow repeats the name before it
        raise UnreadableError(f"{show_name(place)} must be {constraint}, got {found}. {remedy}") from error
    except UnicodeEncodeError as error:
        name, encoding = show_name(error.object), sys.getfilesystemencoding()
        found = "other bytes."
        if encoding != "utf-8":
            found = f"{encoding} of the locale. Set PYTHONUTF8=1, or LC_ALL."
        raise DataError(f"The name {name} must be UTF-8 text, got {found}") from error


def check_column(column: str, found: list[str], name: object) -> None:
    """Check that exactly one of the columns `found` in a file is the text column."""
    if found.count(column) != 1:
        constraint = f"must be exactly one of the columns {show(found)} of {show_name(name)}"
        raise RejectedDocumentsError(
            f"The text column {constraint}, got {show(column)}. Name another with --text-column."
        )


def column_type_error(column: str, found: str, name: object) -> RejectedDocumentsError:
    """Return the error for a text column that holds null or another type."""
    return RejectedDocumentsError(
        f"The column {show(column)} of {show_name(name)} must hold text in every row, got {found}. Name another column "
        "with --text-column, or correct the rows."
    )


def encoding_error(name: object, place: str) -> RejectedDocumentsError:
    """Return the error for text in another encoding."""
    return RejectedDocumentsError(
        f"{show_name(name)} must hold UTF-8 text, got other bytes {place}. Convert it, for instance with iconv."
    )


def surrogate_error(name: object, half: str, place: str) -> RejectedDocumentsError:
    """Return the error for an escape of JSON that is half a surrogate pair."""
    return RejectedDocumentsError(
        f"{show_name(name)} must hold whole characters, got half a surrogate pair, {ascii(half)[1:-1]}, in {place}. "
        "Correct the row, or remove it."
    )


def format_error(name: object, expected: str, reason: object) -> RejectedDocumentsError:
    """Return the error for a file that is damaged or has another format."""
    return RejectedDocumentsError(
        f"{show_name(name)} must hold {expected}, got another or a damaged file: {one_line(reason)}. Repair or remove "
        "the file."
    )
