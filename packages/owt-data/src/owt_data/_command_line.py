"""Commands: their names and options in the arguments of a process, errors of one sentence, and the help.

argparse is not used: its errors repeat values in full, and differ between versions of Python.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from owt_data._errors import DataError, check_choice, show, show_name

# A word that is no value. A value of this form is written after an equals sign.
_FLAG = re.compile(r"--[A-Za-z]")
_HELP = {"-h", "--help"}
_KINDS: dict[Any, str] = {int: "an integer", float: "a number", str: "a text"}
_PLACEHOLDERS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: ""}
_NARROWEST, _WIDEST = 20, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of a program."""

    run: Callable[..., int]
    """Takes the list of names and one object of each of `kinds`, and returns the exit code. Its docstring is the
    help."""

    names: str
    """The names to give, as in a usage line: `SOURCE... OUT`."""

    kinds: tuple[type, ...] = ()
    """Dataclasses. Their fields are the options, and the text below a field is its help. `metadata` may give an
    `alias`."""


def run_command(program: str, description: str, commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run the command that the arguments give, or print the help that they ask for.

    Returns:
        The exit code.

    Raises:
        DataError: there is no such command or option, a value has the wrong type, or names are missing.
    """
    if not arguments or arguments[0] in _HELP:
        if not arguments:
            raise DataError(f"The command must be one of {', '.join(commands)}, got none. See {program} --help.")
        _print_help(_overview(program, description, commands))
        return 0
    check_choice("The command", arguments[0], commands)
    command, usage = commands[arguments[0]], f"{program} {arguments[0]}"
    words = arguments[1:]
    if _HELP & {*words}:
        _print_help(_page(usage, command))
        return 0
    names, values = _read_words(usage, [option for kind in command.kinds for option in _options(kind)], words)
    least = len(command.names.split())
    if len(names) < least or (len(names) > least and "..." not in command.names):
        found = show_name(" ".join(names)) if names else "none"
        raise DataError(f"The names must be {command.names}, got {found}. Write: {usage} {command.names}")
    objects = [
        kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})
        for kind in command.kinds
    ]
    return command.run(names, *objects)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    name: str
    type: Any
    """int, float, str, bool or a Literal."""
    allows_none: bool
    default: Any
    flags: tuple[str, ...]

    def value(self, flag: str, text: str) -> Any:
        if self.allows_none and text in ("None", "none"):
            return None
        if get_origin(self.type) is Literal:
            check_choice(flag, text, get_args(self.type))
            return text
        try:
            return self.type(text)
        except ValueError:
            raise DataError(f"{flag} must be {_KINDS[self.type]}, got {show(text)}.") from None


def _options(kind: type) -> Iterator[_Option]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        members = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        flags = ("--" + field.name.replace("_", "-"), *([field.metadata["alias"]] if field.metadata else []))
        yield _Option(
            name=field.name,
            type=next(member for member in members if member is not types.NoneType),
            allows_none=len(members) > 1,
            default=field.default,
            flags=flags,
        )


def _read_words(usage: str, options: Sequence[_Option], words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the names, and the values of the options that are given."""
    by_flag = {flag: option for option in options for flag in option.flags}
    names: list[str] = []
    values: dict[str, Any] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("-"):
            names.append(word)
        elif flag not in by_flag:
            close = difflib.get_close_matches(flag, by_flag, n=1)
            remedy = f" Did you mean {close[0]}?" if close else ""
            raise DataError(f"The option must be one of {usage} --help, got {show(flag)}.{remedy}")
        elif by_flag[flag].type is bool:
            if equals:
                raise DataError(f"{flag} must be without a value, got {show(text)}. Write {flag}.")
            values[by_flag[flag].name] = True
        else:
            if not equals and (not rest or _FLAG.match(rest[0])):
                raise DataError(f"{flag} must have a value, got none. Write {flag} VALUE, or {flag}=VALUE.")
            values[by_flag[flag].name] = by_flag[flag].value(flag, text if equals else rest.popleft())
    return names, values


def _print_help(lines: Iterator[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _overview(program: str, description: str, commands: Mapping[str, Command]) -> Iterator[str]:
    yield from _wrap(f"usage: {program} COMMAND [OPTIONS]")
    yield ""
    yield from _wrap(description)
    yield "\ncommands"
    for name, command in commands.items():
        yield from _wrap(f"  {name} {command.names}", "      ")
        yield from _wrap(f"      {_paragraphs(command)[0]}", "      ")
    yield ""
    yield from _wrap(f"{program} COMMAND --help shows the options of a command.")


def _page(usage: str, command: Command) -> Iterator[str]:
    yield from _wrap(f"usage: {usage} {command.names}{' [OPTIONS]' if command.kinds else ''}", " " * 11)
    for paragraph in _paragraphs(command):
        yield ""
        # The lines of examples are indented.
        for line in paragraph.split("\n") if "\n  " in paragraph else [paragraph]:
            yield from _wrap(line, "      " if line.startswith(" ") else "")
    if command.kinds:
        yield "\noptions"
    for kind in command.kinds:
        docs = _field_docs(kind)
        for option in _options(kind):
            values = "|".join(get_args(option.type)) or _PLACEHOLDERS[option.type]
            yield from _wrap(f"  {', '.join(option.flags)} {values}".rstrip(), "    ")
            is_shown = option.default is not None and option.type is not bool
            default = f" (default: {option.default or repr('')})" if is_shown else ""
            yield from _wrap(f"      {docs[option.name]}{default}", "      ")


def _wrap(text: str, hang: str = "") -> list[str]:
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    return textwrap.wrap(text, width, subsequent_indent=hang, break_on_hyphens=False)


def _paragraphs(command: Command) -> list[str]:
    return (inspect.getdoc(command.run) or "").split("\n\n")


def _field_docs(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass. Python drops these texts, hence the source is read."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, below in pairwise(definition.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs
