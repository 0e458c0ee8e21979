"""JSON to the dataclass that it was written from, with every field checked against its declared type."""

import functools
import json
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

from owt_data._errors import LARGEST, DataError, show, show_name

T = TypeVar("T")

_MOST_BYTES = 256 << 20  # the names of two million sources
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def read_json(stream: Any) -> bytes:
    """Read an open file of JSON.

    Raises:
        ValueError: it is larger than any that this package writes.
    """
    data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data


def parse_json(declared: type[T], text: str | bytes) -> T:
    """Parse JSON as a dataclass or another declared type. Integers must be from 0 to `LARGEST`, and numbers finite.

    Raises:
        ValueError: the text is not JSON, or does not fit the type. The message names the field.
    """
    from pydantic import ValidationError  # takes 0.1 s, which `--help` must not wait for

    _load(text)
    try:
        return _adapter(declared).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UnknownFieldError):  # of `__post_init__`
            raise cause from error
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] in _UNKNOWN:
            raise UnknownFieldError(field) from error
        raise ValueError(f"{field}: {reason}" if field else reason) from error


class UnknownFieldError(ValueError):
    """Error about a field that a dataclass does not have. The message is the field."""


def parse_record(declared: type[T], text: str | bytes, name: object, *, number: int) -> T:
    """Parse the contents of a file, whose fields `format` and `version` name its format and its writer.

    Args:
        declared: the dataclass.
        text: the contents.
        name: the file, for errors.
        number: the number of the format that this version reads and writes.

    Raises:
        DataError: the file has another format, or a field that this version does not know.
        ValueError: as `parse_json`.
    """
    found = _load(text)
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    if not {"format", "version"} & found.keys():
        raise ValueError("it has neither a format number nor a version")
    writer = found.get("version")
    if type(found.get("format")) is not int or found["format"] != number:
        reject_format(
            name, number, f"format {show(found['format'])}" if "format" in found else "no format number", writer
        )
    try:
        return parse_json(declared, text)
    except UnknownFieldError as error:
        reject_format(name, number, f"the unknown field {show_name(error)}", writer)


def reject_format(name: object, number: int, found: str, writer: Any) -> NoReturn:
    """Raise the error for a file of another version.

    Args:
        name: the file.
        number: the number of the format that this version reads and writes.
        found: the format or the field that was found.
        writer: the version that wrote the file, if it is a text.

    Raises:
        DataError: always.
    """
    by = f"version {show_name(writer)}" if isinstance(writer, str) else "an unknown version"
    folder = str(name).rpartition("/")[0]
    raise DataError(
        f"{show_name(name)} must have format {number}, which owt-data {version('owt-data')} reads, got {found}, "
        f"written by {by} of owt-data. Use that version, or delete {show_name(folder)} and prepare the text again."
    )


def _load(text: str | bytes) -> Any:
    """Parse JSON without a declared type.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has a number out of range.
    """
    try:
        return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _integer(digits: str) -> int:
    if len(digits) > len(str(LARGEST)) or not 0 <= int(digits) <= LARGEST:
        raise ValueError(f"the number {show_name(digits)} must be from 0 to {LARGEST}")
    return int(digits)


def _finite(digits: str) -> float:
    if abs(float(digits)) > LARGEST:
        raise ValueError(f"the number {show_name(digits)} must be at most {LARGEST}")
    return float(digits)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name} must be finite")


@functools.cache
def _adapter(declared: Any) -> Any:
    from pydantic import TypeAdapter  # see `parse_json`

    return TypeAdapter(declared)
