"""Errors about data, and the checks that several modules share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DataError(ValueError):
    """Error about data or options. The message names the constraint, the value and a remedy."""


class RejectedDocumentsError(DataError):
    """Error in the documents themselves: every shard that was made from them is useless.

    All other failures (network, cluster, disk, tokenizer files) are plain `DataError`s. After these, the same call
    resumes after the last finished shard.
    """


def check_integer(name: str, value: int, *, least: int, most: int | None = None) -> None:
    """Check that an integer is within bounds.

    Args:
        name: the name of the value, for the error.
        value: the value.
        least: its lower bound.
        most: its upper bound, or None.

    Raises:
        DataError: the value is out of bounds.
    """
    if value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise DataError(f"{name} must be an integer {bounds}, got {value}. Choose another number.")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Check that a value is one of several.

    Raises:
        DataError: the value is another one.
    """
    if value not in choices:
        raise DataError(f"{name} must be one of {', '.join(choices)}, got {value!r}. Choose one.")


def check_encodable(name: str, text: str) -> None:
    """Check that a text can be encoded as UTF-8.

    Raises:
        DataError: it holds half a surrogate pair, as an argument of other bytes does.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} must be UTF-8 text, got {text!r}. Change it.") from error


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
        raise DataError(f"{place} must be {constraint}, got {one_line(error.strerror or error)}. {remedy}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"The name {error.object} must be UTF-8 text, got other bytes. Change it.") from error


def one_line(text: object) -> str:
    """Return a message without line breaks and without its final full stop."""
    return " ".join(str(text).split()).rstrip(".")


def check_column(column: str, found: list[str], name: object) -> None:
    """Check that exactly one of the columns `found` in a file is the text column."""
    if found.count(column) != 1:
        constraint = f"must be exactly one of the columns {found} of {name}"
        raise RejectedDocumentsError(f"The text column {constraint}, got {column!r}. Name another with --text-column.")


def not_text(column: str, found: str, name: object) -> RejectedDocumentsError:
    """Return the error for a text column that holds null or another type."""
    return RejectedDocumentsError(
        f"The column {column!r} of {name} must hold text in every row, got {found}. Name another column with "
        "--text-column, or correct the rows."
    )


def not_utf8(name: object, place: str) -> RejectedDocumentsError:
    """Return the error for text in another encoding."""
    return RejectedDocumentsError(
        f"{name} must hold UTF-8 text, got other bytes {place}. Convert it, for instance with iconv."
    )


def not_format(name: object, expected: str, reason: object) -> RejectedDocumentsError:
    """Return the error for a file that is damaged or has another format."""
    return RejectedDocumentsError(
        f"{name} must hold {expected}, got another or a damaged file: {one_line(reason)}. Repair or remove the file."
    )
