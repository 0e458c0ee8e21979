"""The options of a command, read from the fields of its dataclass."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

from pretrain._field_types import FieldType, field_type

# Options of the section `prepare` that have a short name too, as in the command `owt-data prepare`.
_SHORT_NAMES = ("tokenizer", "split", "val_fraction", "split_seed", "text_column")
_NONE = ("None", "none")
# A field cannot be named `from`.
_STEPS = {"from_step": "--from", "to_step": "--to"}
_LETTERS = {"quiet": ("-q",), "verbose": ("-v",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option(FieldType):
    """An option of a command."""

    name: str
    """Name of the field, after the name of its section: `train.max_steps`."""

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
        if self.name == "from_checkpoint":
            return "--from", flag  # a field cannot be named `from`
        if self.name in _STEPS:
            return _STEPS[self.name], flag
        if section == "prepare" and last in _SHORT_NAMES:
            return ("--" + last.replace("_", "-"), flag)
        return (*_LETTERS.get(self.name, ()), flag)

    @property
    def off_flags(self) -> tuple[str, ...]:
        """The name that switches a boolean option off."""
        section, dot, last = self.name.replace("_", "-").rpartition(".")
        return (f"--{section}{dot}no-{last}",) if self.type is bool else ()

    def from_text(self, texts: list[str]) -> Any:
        """Return the value that texts of the command line give.

        Raises:
            ValueError: the texts give no value of the option's type. The message is the constraint.
        """
        if self.allows_none and len(texts) == 1 and texts[0] in _NONE:
            return None
        if texts == [self.word]:
            return self.word
        try:
            values = tuple(text if self.choices else self.type(text) for text in texts)
        except ValueError:
            raise ValueError(self.constraint()) from None
        value = values if self.is_tuple else values[0]
        self.check(value)
        return value

    def from_file(self, value: Any) -> Any:
        """Return the value that a TOML or JSON value gives.

        Raises:
            ValueError: the value does not have the option's type. The message is the constraint.
        """
        if self.allows_none and value in _NONE:
            return None
        if self.is_tuple and isinstance(value, list):
            value = tuple(value)
        self.check(value)
        return float(value) if self.type is float and isinstance(value, int) else value


@cache
def options_of(command: type, prefix: str = "") -> tuple[Option, ...]:
    """Return the options of a dataclass, in the order of its fields. A field that is a dataclass is a section.

    Args:
        command: the dataclass. A field with `metadata={"placeholder": ...}` is given without a flag.
        prefix: name of the section, with a dot.
    """
    docs, kinds = dict(_field_docs(command)), get_type_hints(command)
    options: list[Option] = []
    for field in dataclasses.fields(command):
        kind = kinds[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            options += options_of(kind, f"{prefix}{field.name}.")
            continue
        found = field_type(kind)
        options.append(
            Option(
                name=prefix + field.name,
                type=found.type,
                is_tuple=found.is_tuple,
                allows_none=found.allows_none,
                word=found.word,
                default=field.default,
                doc=docs[field.name].replace("None", "none"),  # as one types it
                placeholder=field.metadata.get("placeholder"),
            )
        )
    return tuple(options)


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
