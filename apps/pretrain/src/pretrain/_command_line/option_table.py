"""The options of a command, read from the fields of its dataclass."""

import ast
import dataclasses
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Options of the section `prepare` that have a short name too, as in the command `owt-data prepare`.
_SHORT_NAMES = ("tokenizer", "split", "val_fraction", "split_seed", "text_column")
_NONE = ("None", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of a command."""

    name: str
    """Name of the field, after the name of its section: `train.max_steps`."""

    type: Any
    """Type of the value, without None: int, float, str, bool, a Literal, or a tuple of strings or literals."""

    allows_none: bool
    """True if None is a value."""

    default: Any
    """The default; `MISSING` if the option must be given."""

    doc: str
    """The description, in one line."""

    placeholder: str | None = None
    """The name in a usage line of a value that is given without a flag; None for an option with a flag."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The names on the command line. The first is the one to show."""
        section, _, last = self.name.rpartition(".")
        flag = "--" + self.name.replace("_", "-")
        return ("--" + last.replace("_", "-"), flag) if section == "prepare" and last in _SHORT_NAMES else (flag,)

    @property
    def off_flag(self) -> str | None:
        """The name that switches a boolean option off."""
        section, dot, last = self.name.replace("_", "-").rpartition(".")
        return f"--{section}{dot}no-{last}" if self.type is bool else None

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values of a Literal, or of the items of a tuple."""
        kind = get_args(self.type)[0] if self.is_tuple else self.type
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def is_tuple(self) -> bool:
        """True if the option has any number of values."""
        return get_origin(self.type) is tuple

    @property
    def constraint(self) -> str:
        """The kind of value, for errors: `<name> must be <constraint>`."""
        if self.choices:
            kind = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            kind = f"any of {kind}" if self.is_tuple else kind
        elif self.is_tuple:
            kind = "texts"
        else:
            kind = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[self.type]
        return f"{kind} or none" if self.allows_none else kind

    def from_text(self, texts: list[str]) -> Any:
        """Return the value that texts of the command line give.

        Raises:
            ValueError: the texts give no value of the option's type.
        """
        if self.is_tuple:
            return self._checked(tuple(texts))
        (text,) = texts
        if self.allows_none and text in _NONE:
            return None
        return self._checked(text) if self.choices else self.type(text)

    def from_file(self, value: Any) -> Any:
        """Return the value that a TOML or JSON value gives.

        Raises:
            ValueError: the value does not have the option's type.
        """
        if self.allows_none and (value is None or value in _NONE):
            return None
        if self.is_tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return self._checked(tuple(value))
        if self.choices and isinstance(value, str):
            return self._checked(value)
        if self.type is float and type(value) is int:
            return float(value)
        if type(value) is self.type:
            return value
        raise ValueError

    def _checked(self, value: Any) -> Any:
        if self.choices and not set(value if self.is_tuple else (value,)) <= set(self.choices):
            raise ValueError
        return value


@cache
def options_of(command: type, prefix: str = "") -> tuple[Option, ...]:
    """Return the options of a dataclass, those of its sections last. A section is a field that is a dataclass.

    Args:
        command: the dataclass. A field with `metadata={"placeholder": ...}` is given without a flag.
        prefix: name of the section, with a dot.
    """
    docs, kinds = dict(_field_docs(command)), get_type_hints(command)
    options: list[Option] = []
    sections: list[Option] = []
    for field in dataclasses.fields(command):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            sections += options_of(kind, f"{prefix}{field.name}.")
            continue
        members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        (one,) = (member for member in members if member is not types.NoneType)
        options.append(
            Option(
                name=prefix + field.name,
                type=one,
                allows_none=len(members) > 1,
                default=field.default,
                doc=docs[field.name].replace("None", "none"),  # as one types it
                placeholder=field.metadata.get("placeholder"),
            )
        )
    return (*options, *sections)


def value_of(config: object, option: Option) -> Any:
    """Return the value of an option in a dataclass."""
    for part in option.name.split("."):
        config = getattr(config, part)
    return config


def with_defaults(options: tuple[Option, ...], config: object) -> tuple[Option, ...]:
    """Return the options with the values of a dataclass as defaults."""
    return tuple(dataclasses.replace(option, default=value_of(config, option)) for option in options)


def _field_docs(command: type) -> Iterator[tuple[str, str]]:
    """Yield the text below each field, from base classes first. Python drops these texts, hence the source is read."""
    for base in reversed(command.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in pairwise(definition.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield name, " ".join(text.split())
