"""JSON as the dataclasses that it was written from, each field checked against its declared type."""

import dataclasses
import json
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse_json(declared: type[T], text: str | bytes) -> T:
    """Parse JSON as a type: a dataclass, a NamedTuple (as an array), a dictionary, a union, a literal or a plain one.

    Raises:
        ValueError: the text is no JSON, or holds something else. The message names the field.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return _convert(declared, value, "")


def _convert(declared: Any, value: Any, field: str) -> Any:
    origin, arguments = get_origin(declared), get_args(declared)
    if declared is Any or (origin is Literal and value in arguments) or type(value) is declared:
        return value
    if origin in (Union, types.UnionType):
        plain = [option for option in arguments if type(value) is option]
        return _convert((plain or arguments)[0], value, field)
    if origin is dict and isinstance(value, dict):
        keys, values = arguments
        return {_convert(keys, key, f"a key of {field}"): _convert(values, item, key) for key, item in value.items()}
    names = getattr(declared, "_fields", None)
    if names is not None and isinstance(value, list) and len(value) == len(names):
        value = dict(zip(names, value, strict=True))
    if isinstance(value, dict) and isinstance(declared, type) and (names or dataclasses.is_dataclass(declared)):
        hints = get_type_hints(declared)
        fields = {key: _convert(hints.get(key, Any), item, key) for key, item in value.items()}
        try:
            return declared(**fields)
        except TypeError as error:  # of the constructor: a field is missing, or unknown
            raise ValueError(str(error).partition("() ")[2]) from error
    raise ValueError(f"{field or 'it'} is {json.dumps(value)[:40]}")
