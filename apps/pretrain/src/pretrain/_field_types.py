"""The types of a dataclass's fields: one check for values of the command line, of files and of Python."""

import dataclasses
import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from pretrain._errors import UsageError, shown
from pretrain._suggestions import did_you_mean

MAX_INTEGER = 2**53 - 1
"""The largest integer in files: integers up to here are exact in JSON."""

MAX_FLOAT = 1e39
"""The largest number in files. Metrics come from float32 arrays."""

_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldType:
    """The type of a field."""

    type: Any
    """Type of the value, or of each item of a tuple, without None: int, float, bool, str, or a Literal of texts."""

    is_tuple: bool
    """True if the field has any number of values."""

    allows_none: bool
    """True if None is a value."""

    word: str | None = None
    """The text that stands for a number, such as auto, if there is one."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values of a Literal."""
        return get_args(self.type)

    def constraint(self, limit: str = "") -> str:
        """Return the kind of value, for errors: `<name> must be <constraint>`."""
        if self.choices:
            kind = " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))
            kind = f"any of {kind}, or no value" if self.is_tuple else kind
        else:
            kind = ("texts" if self.is_tuple else _KINDS[self.type]) + limit
        words = [word for word in (self.word, "none" if self.allows_none else None) if word is not None]
        return " or ".join((", ".join((kind, *words[:-1])), *words[-1:]))

    def check(self, value: Any) -> None:
        """Check the type of a value, and whether it is one of the choices.

        Raises:
            ValueError: it is not. The message is the constraint.
        """
        if (value is None and self.allows_none) or (self.word is not None and value == self.word):
            return
        items: Any = value if self.is_tuple else (value,)
        accepted = str if self.choices else (int, float) if self.type is float else self.type
        if not isinstance(items, tuple):
            raise ValueError(self.constraint())
        for item in items:
            if not isinstance(item, accepted) or (isinstance(item, bool) and self.type is not bool):
                raise ValueError(self.constraint())
            if self.choices and item not in self.choices:
                raise ValueError(self.constraint())
            if isinstance(item, int) and abs(item) > MAX_INTEGER:
                raise ValueError(self.constraint(f" of at most {MAX_INTEGER}"))
            # Half of a surrogate pair has no UTF-8: a run could not write it to its files.
            if isinstance(item, str) and any("\ud800" <= one <= "\udfff" for one in item):
                raise ValueError(self.constraint(" in UTF-8"))


def field_type(kind: Any) -> FieldType:
    """Return the type of a field from its annotation, such as `int | None` or `int | Literal["auto"] | None`."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    one, *words = (member for member in members if member is not types.NoneType)
    is_tuple = get_origin(one) is tuple
    return FieldType(
        type=get_args(one)[0] if is_tuple else one,
        is_tuple=is_tuple,
        allows_none=types.NoneType in members,
        word=get_args(words[0])[0] if words else None,
    )


def check_fields(config: Any, section: str = "") -> None:
    """Check the type of every field of a dataclass, and of its fields that are dataclasses.

    Args:
        config: the dataclass.
        section: the beginning of the names in errors, with a dot.

    Raises:
        UsageError: a field has another type, or is none of its choices.
    """
    for name, kind in _fields(type(config)).items():
        value = getattr(config, name)
        if not isinstance(kind, FieldType):
            if not isinstance(value, kind):
                raise UsageError(f"{section}{name} must be a {kind.__name__}, got {shown(value)}.")
            check_fields(value, f"{section}{name}.")
            continue
        try:
            kind.check(value)
        except ValueError as error:
            known = did_you_mean(value, kind.choices)
            tuple_of = "a tuple of " if kind.is_tuple else ""
            raise UsageError(f"{section}{name} must be {tuple_of}{error}, got {shown(value)}.{known}") from None


@cache
def _fields(config: type) -> "dict[str, FieldType | type]":
    """Return the types of the fields; that of a section is its dataclass."""
    kinds: dict[str, Any] = get_type_hints(config)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        kind = kinds[field.name]
        found[field.name] = kind if dataclasses.is_dataclass(kind) else field_type(kind)
    return found
