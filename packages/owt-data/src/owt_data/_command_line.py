"""Commands: their names and options in the arguments of a process, errors of one sentence, and the help.

No library for command lines reads them. argparse, and tyro 1.0.17, reject `--row-end -x`; tyro draws its errors in a
frame, and has its hook for errors in a private module. cyclopts 5.5.2 reads `--row-end -x` only if the option then
takes a following `--split` as its value too, and rejects an option that is given twice.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import shlex
import shutil
import sys
import textwrap
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from owt_data._errors import DataError, show_name

# A word that is no value. A value of this form is written after an equals sign.
_FLAG = re.compile(r"--[A-Za-z]")
_HELP = {"-h", "--help"}
_KINDS: dict[Any, str] = {int: "an integer", float: "a number", str: "a text"}
_VALUES: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
_NARROWEST, _WIDEST = 20, 100
_UNBROKEN = "\N{NO-BREAK SPACE}"

_Paragraph = tuple[str, int]
"""A text of the help, and the indentation of its lines below the first one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of a program."""

    run: Callable[..., int]
    """Takes the list of names and one object of each of `kinds`, and returns the exit code. Its docstring is the
    help."""

    names: Mapping[str, str]
    """The names to give, as in a usage line, and their help. A name with `...` stands for one or more."""

    kinds: tuple[type, ...] = ()
    """Dataclasses. Their fields are the options, and the text below a field is its help. `metadata` may give an
    `alias`."""

    examples: tuple[str, ...]
    """Command lines, for the help."""


def run_command(program: str, description: str, commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run the command that the arguments give, or print the help or the version that they ask for.

    Returns:
        The exit code.

    Raises:
        DataError: there is no such command or option, a value has the wrong type, or names are missing.
    """
    there_are = f"there are {', '.join(commands)}"
    if not arguments:
        raise DataError(f"COMMAND must be given, got nothing; {there_are}.")
    name, *words = arguments
    if "--version" in arguments:
        sys.stdout.write(f"{program} {version(program)}\n")
    elif name in _HELP:
        _print_help(_overview(program, description, commands))
    elif name not in commands:
        known = _similar(name, commands)
        raise DataError(f"no command {_shown(name)}; {there_are}" + (f"; did you mean {known}?" if known else "."))
    elif _HELP & {*words}:
        _print_help(_page(program, name, commands[name]))
    else:
        command = commands[name]
        names, values = _read_words(program, name, command, words)
        objects = [
            kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})
            for kind in command.kinds
        ]
        return command.run(names, *objects)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    name: str
    type: Any
    """int, float, str, bool or a Literal."""
    allows_none: bool
    default: Any
    doc: str
    flags: tuple[str, ...]
    off_flags: tuple[str, ...]

    def value(self, flag: str, text: str) -> Any:
        if self.allows_none and text in ("None", "none"):
            return None
        choices = get_args(self.type)
        try:
            return choices[choices.index(text)] if choices else self.type(text)
        except ValueError:
            kind = f"{', '.join(choices[:-1])} or {choices[-1]}" if choices else _KINDS[self.type]
            kind += " or none" if self.allows_none else ""
            known = _similar(text, choices)
            remedy = f" Did you mean {known}?" if known else ""
            raise DataError(f"{flag} must be {kind}, got {_shown(text)}.{remedy}") from None


def _options(command: Command) -> Iterator[_Option]:
    for kind in command.kinds:
        hints, docs = get_type_hints(kind), _field_docs(kind)
        for field in dataclasses.fields(kind):
            hint, dashed = hints[field.name], field.name.replace("_", "-")
            members = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            yield _Option(
                name=field.name,
                type=next(member for member in members if member is not types.NoneType),
                allows_none=len(members) > 1,
                default=field.default,
                doc=docs[field.name],
                flags=(f"--{dashed}", *([field.metadata["alias"]] if field.metadata else [])),
                off_flags=(f"--no-{dashed}",) if hint is bool else (),
            )


def _read_words(program: str, name: str, command: Command, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the names, and the values of the options that are given. The last value of an option counts."""
    by_flag = {flag: option for option in _options(command) for flag in (*option.flags, *option.off_flags)}
    names: list[str] = []
    values: dict[str, Any] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("-"):
            names.append(word)
            continue
        if flag not in by_flag:
            if known := _similar(flag, by_flag):
                raise DataError(f"no option {_shown(flag)} of {name}; did you mean {known}?")
            raise DataError(f"options must be those of {program} {name} --help, got {_shown(flag)}.")
        option = by_flag[flag]
        if option.type is bool:
            if equals:
                remedy = f"Write {' or '.join((option.flags[0], *option.off_flags))}."
                raise DataError(f"{flag} must have no value, got {_shown(text)}. {remedy}")
            values[option.name] = flag not in option.off_flags
        elif equals or (rest and not _FLAG.match(rest[0])):
            values[option.name] = option.value(flag, text if equals else rest.popleft())
        else:
            raise DataError(f"{flag} must have a value, got none. Write {flag} VALUE, or {flag}=VALUE.")
    wanted = [*command.names]
    if len(names) < len(wanted):
        missing = wanted[len(names)].removesuffix("...")
        raise DataError(f"{missing} must be given, got nothing. Write: {_usage(program, name, command)}")
    if len(names) > len(wanted) and not any(one.endswith("...") for one in wanted):
        found = f"{_shown(names[len(wanted)])} without --NAME"
        raise DataError(f"arguments must be --NAME VALUE, got {found}. Put quotes around a value with spaces.")
    return names, values


def _usage(program: str, name: str, command: Command) -> str:
    return " ".join([program, name, *command.names])


def _similar(name: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def _shown(text: str) -> str:
    """Return a text of the command line for an error. An empty text has quotes, which an error would hide."""
    return show_name(text) or "''"


def _print_help(blocks: Iterator[list[_Paragraph]]) -> None:
    """Print blocks of paragraphs, with an empty line between two blocks."""
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    texts = [
        "".join(
            f"{line}\n"
            for text, indent in block
            for line in textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
        )
        for block in blocks
    ]
    sys.stdout.write("\n".join(texts).replace(_UNBROKEN, " "))


def _overview(program: str, description: str, commands: Mapping[str, Command]) -> Iterator[list[_Paragraph]]:
    yield [(f"usage: {program} COMMAND [OPTIONS]", 11)]
    yield [(description, 0)]
    width = max(map(len, commands)) + 2
    entries = ((f"  {name:{width}}{command.run.__doc__ or ''}", 2 + width) for name, command in commands.items())
    yield [("commands", 0), *entries]
    yield [("more", 0), ("  COMMAND --help shows the options of a command, and --version the version.", 2)]
    yield [("examples", 0), *((f"  {command.examples[0]}", 6) for command in commands.values())]


def _page(program: str, name: str, command: Command) -> Iterator[list[_Paragraph]]:
    yield [(f"usage: {_usage(program, name, command)}{' [OPTIONS]' if command.kinds else ''}", 11)]
    yield [(command.run.__doc__ or "", 0)]
    yield [("arguments", 0), *(part for one in command.names.items() for part in _entry(*one))]
    if command.kinds:
        yield [("options", 0), *(part for option in _options(command) for part in _entry(*_described(option)))]
    yield [("more", 0), (f"  {program} --help lists the commands.", 2)]
    yield [("examples", 0), *((f"  {line}", 6) for line in command.examples)]


def _entry(head: str, doc: str) -> list[_Paragraph]:
    return [(f"  {head.removesuffix('...')}", 4), (f"      {doc}", 6)]


def _described(option: _Option) -> tuple[str, str]:
    """Return the names of an option with the kind of its value, and its description with its default."""
    flags = ", ".join((*option.flags, *option.off_flags))
    if option.type is bool:
        return flags, option.doc
    head = f"{flags} {'|'.join(get_args(option.type)) or _VALUES[option.type]}"
    if option.default is None and "Default" in option.doc:
        return head, option.doc
    default = "none" if option.default is None else shlex.quote(str(option.default))
    return head, f"{option.doc} " + f"(default: {default})".replace(" ", _UNBROKEN)


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
