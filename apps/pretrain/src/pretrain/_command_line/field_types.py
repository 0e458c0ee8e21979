"""The types of a dataclass's fields: one check for values of the command line, of files and of Python."""

import dataclasses
import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pretrain._errors import UsageError, shown
from pretrain._run.files import MAX_INTEGER
from pretrain._suggestions import did_you_mean

_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldType:
    """The type of a field."""

    type: Any
    """Type of the value, without None: int, float, str, bool, a Literal, or a tuple of strings or literals."""

    allows_none: bool
    """True if None is a value."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values of a Literal, or of the items of a tuple."""
        kind = get_args(self.type)[0] if self.is_tuple else self.type
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def is_tuple(self) -> bool:
        """True if the field has any number of values."""
        return get_origin(self.type) is tuple

    @property
    def constraint(self) -> str:
        """The kind of value, for errors: `<name> must be <constraint>`."""
        return self._constraint()

    def check(self, value: Any) -> None:
        """Check the type of a value, and whether it is one of the choices.

        Raises:
            ValueError: it is not. The message is the constraint.
        """
        if value is None and self.allows_none:
            return
        if self.choices or self.is_tuple:
            items: Any = value if self.is_tuple else (value,)
            if not isinstance(items, tuple) or not all(isinstance(item, str) for item in items):
                raise ValueError(self.constraint)
            if self.choices and not set(items) <= set(self.choices):
                raise ValueError(self.constraint)
            self._check_text(*items)
            return
        accepted = (int, float) if self.type is float else self.type
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            raise ValueError(self.constraint)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(self._constraint(f" of at most {MAX_INTEGER}"))
        self._check_text(value)

    def _check_text(self, *values: Any) -> None:
        """Check that a run can write texts to its files. Half of a surrogate pair has no UTF-8.

        Raises:
            ValueError: it cannot. The message is the constraint.
        """
        if any("\ud800" <= one <= "\udfff" for value in values if isinstance(value, str) for one in value):
            raise ValueError(self._constraint(" in UTF-8"))

    def _constraint(self, limit: str = "") -> str:
        if self.choices:
            kind = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            kind = f"any of {kind}" if self.is_tuple else kind
        else:
            kind = ("texts" if self.is_tuple else _KINDS[self.type]) + limit
        return f"{kind} or none" if self.allows_none else kind


def field_type(kind: Any) -> FieldType:
    """Return the type of a field from its annotation, such as `int | None`."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    (one,) = (member for member in members if member is not types.NoneType)
    return FieldType(type=one, allows_none=len(members) > 1)


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
                raise UsageError(f"{section}{name} must be a {kind.__name__}, got {shown(value)}. Change it.")
            check_fields(value, f"{section}{name}.")
            continue
        try:
            kind.check(value)
        except ValueError as error:
            known = did_you_mean(value, kind.choices, "Change it.")
            tuple_of = "a tuple of " if kind.is_tuple else ""
            raise UsageError(f"{section}{name} must be {tuple_of}{error}, got {shown(value)}. {known}") from None


@cache
def _fields(config: type) -> "dict[str, FieldType | type]":
    """Return the types of the fields; that of a section is its dataclass."""
    kinds: dict[str, Any] = get_type_hints(config)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        kind = kinds[field.name]
        found[field.name] = kind if dataclasses.is_dataclass(kind) else field_type(kind)
    return found
