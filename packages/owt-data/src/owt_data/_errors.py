"""The errors that this package raises for bad input, and the checks that raise them."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral


class DataError(ValueError):
    """Something about the data is not as it must be. The message says what, and what to do."""


class RejectedDocumentsError(DataError):
    """The documents themselves are at fault, and what was made of them is of no use.

    Whatever else goes wrong (the network, a cluster, a disk, files of a tokenizer) is a plain `DataError`, and the
    same call again goes on from the last finished shard.
    """


def check_integer(name: str, value: int, *, least: int, most: int | None = None) -> None:
    """Check a number.

    Args:
        name: what the number is, for the error.
        value: the number.
        least: its smallest value.
        most: its largest value, if it has one.

    Raises:
        DataError: the number is smaller or larger, or no integer.
    """
    if not isinstance(value, Integral) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise DataError(f"{name} must be an integer {bounds}, got {value}. Choose another number.")


@contextmanager
def file_errors(
    constraint: str, name: object = "", remedy: str = "Mend that and run the same command again."
) -> Iterator[None]:
    """Raise what the operating system or a storage refuses as a `DataError`. Serves as a decorator, too.

    Args:
        constraint: what the file must be, such as `readable`.
        name: the file, where the system does not name one.
        remedy: what to do, a sentence.

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
    """A message without line breaks and without its full stop."""
    return " ".join(str(text).split()).rstrip(".")


def not_utf8(name: object, place: str) -> RejectedDocumentsError:
    """The error of text in another encoding."""
    return RejectedDocumentsError(
        f"{name} must hold UTF-8 text, got other bytes {place}. Convert it, for instance with iconv."
    )


def missing_column(column: str, found: list[str], name: object) -> RejectedDocumentsError:
    """The error of a file without the text column, or with several."""
    return RejectedDocumentsError(
        f"The text column must be exactly one of the columns {found} of {name}, got {column!r}. Name another with "
        "--text-column."
    )


def missing_text(column: str, place: str, name: object) -> RejectedDocumentsError:
    """The error of a row that is null."""
    return RejectedDocumentsError(
        f"The column {column!r} of {name} must hold text in every row, got none in {place}. Remove the rows "
        "without text."
    )


def wrong_type(column: str, found: str, name: object) -> RejectedDocumentsError:
    """The error of a text column that holds something else."""
    return RejectedDocumentsError(
        f"The column {column!r} of {name} must hold text in every row, got {found}. Name another column with "
        "--text-column, or make it text."
    )
