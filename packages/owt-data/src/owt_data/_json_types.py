"""JSON to the dataclass that it was written from, with every field checked against its declared type."""

import functools
from typing import Any, TypeVar

T = TypeVar("T")


def parse_json(declared: type[T], text: str | bytes) -> T:
    """Parse JSON as a dataclass or another declared type.

    Raises:
        ValueError: the text is not JSON, or does not fit the type. The message names the field.
    """
    from pydantic import ValidationError  # takes 0.1 s, which `--help` must not wait for

    try:
        return _adapter(declared).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{field}: {reason}" if field else reason) from error


@functools.cache
def _adapter(declared: Any) -> Any:
    from pydantic import TypeAdapter  # see `parse_json`

    return TypeAdapter(declared)
