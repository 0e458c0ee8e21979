"""JSON as the dataclasses that it was written from, each field checked against its declared type."""

import functools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def parse_json(declared: type[T], text: str | bytes) -> T:
    """Parse JSON as a dataclass, or as a type of the fields of one.

    Raises:
        ValueError: the text is no JSON, or holds something else. The message names the field.
    """
    from pydantic import ValidationError  # a tenth of a second, which `--help` does without

    try:
        return _adapter(declared).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{field}: {reason}" if field else reason) from error


@functools.cache
def _adapter(declared: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(declared)
