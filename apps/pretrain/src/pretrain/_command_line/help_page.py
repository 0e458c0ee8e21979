"""The help of each command, wrapped to the width of the terminal."""

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from pretrain._command_line.arguments import usage
from pretrain._command_line.command_classes import COMMANDS, EXAMPLES, FREQUENT, GROUPS, ConfigOptions, OutputOptions
from pretrain._command_line.option_table import Option, options_of, with_defaults
from pretrain._config import PretrainConfig
from pretrain._surroundings.typed_command import application

_NARROWEST, _WIDEST = 20, 100
_UNBROKEN = "\N{NO-BREAK SPACE}"
_CHOICES_WIDTH = 30
_VALUES = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
_INTRODUCTION = (
    "Pretrain GPT-2. Without arguments: the quickstart, minutes on any machine. The same command again continues an "
    "interrupted run. A preset fills in every option."
)
_SECTION_TITLES = {
    "": "run", "prepare": "text and tokens", "model": "model", "train": "training", "optimizer": "optimizer",
    "mesh": "mesh of devices",
}  # fmt: skip


def help_page(command: str, config: PretrainConfig, *, width: int, is_overview: bool, shows_all: bool) -> str:
    """Return the help of a command.

    Args:
        command: the name of the command.
        config: the source of the defaults of `train`.
        width: the width of the terminal, in characters.
        is_overview: whether the page begins with the list of all commands.
        shows_all: whether to show all options of `train`, or the frequent ones.
    """
    blocks = _page(command, config, is_overview=is_overview, shows_all=shows_all)
    lines = [[line for text, indent in block for line in _wrap(text, min(width, _WIDEST), indent)] for block in blocks]
    return "\n\n".join("\n".join(block) for block in lines) + "\n"


def shown_default(option: Option) -> str | None:
    """Return the default of an option as one would type it in a shell; None if there is none to show."""
    value = option.default
    if value is MISSING or option.type is bool or value == ():
        return None
    if value is None:
        return None if "Default" in option.doc else "none"
    return " ".join(_typed(item) for item in value) if option.is_tuple else _typed(value)


def _page(
    command: str, config: PretrainConfig, *, is_overview: bool, shows_all: bool
) -> Iterator[list[tuple[str, int]]]:
    """Yield blocks of paragraphs, each paragraph with the indentation of its lines below the first one."""
    groups = _groups(command, config, shows_all=shows_all)
    more: list[str] = []
    if is_overview:
        default = {"train": " The default."}
        yield [(f"usage: {application()} [COMMAND] [OPTIONS]", 11)]
        yield [(_INTRODUCTION, 0)]
        yield [
            ("commands", 0),
            *(
                (f"  {'' if number else group:10}{name:9}{_summary(kind)}{default.get(name, '')}", 21)
                for group, commands in GROUPS.items()
                for number, (name, kind) in enumerate(commands.items())
            ),
        ]
    else:
        yield [(f"usage: {usage(command)}{' [OPTIONS]' if {*groups} - {'arguments'} else ''}", 11)]
        yield [(_described(COMMANDS[command]), 0)]
        more.append(f"{application()} --help lists the commands.")
    for title, options in groups.items():
        yield [(title, 0), *(paragraph for option in options for paragraph in _entry(option))]
    if command == "train" and not shows_all:
        more.append("--help-all shows all options, and --preset NAME --help the defaults of a preset.")
    if command in ("plan", "sweep"):
        more.append(f"{application()} train --help-all shows the other options.")
    if is_overview:
        more.append("COMMAND --help shows the options of a command, and --version the versions.")
        if application() == "pretrain":
            more.append('eval "$(pretrain --completion bash)" completes commands and options; also zsh and fish.')
    yield [("more", 0), *((f"  {line}", 2) for line in more)]
    yield [("examples", 0), *((f"  {_as_typed(line)}", 6) for line in EXAMPLES[command])]


def _as_typed(example: str) -> str:
    """Return an example with the beginning of this command line."""
    return example.replace("pretrain", application(), 1)


def _groups(command: str, config: PretrainConfig, *, shows_all: bool) -> dict[str, list[Option]]:
    """Return the options to show, by the titles above them."""
    if command != "train":
        options = options_of(COMMANDS[command])
        arguments = [option for option in options if option.placeholder is not None]
        groups = {"arguments": arguments, "options": [option for option in options if option not in arguments]}
        return {title: group for title, group in groups.items() if group}
    options = (
        *options_of(ConfigOptions),
        *options_of(OutputOptions),
        *with_defaults(options_of(PretrainConfig), config),
    )
    if not shows_all:
        by_name = {option.name: option for option in options}
        return {"options of train": [by_name[name] for name in FREQUENT]}
    return {
        title: [option for option in options if option.name.rpartition(".")[0] == section]
        for section, title in _SECTION_TITLES.items()
    }


def _entry(option: Option) -> list[tuple[str, int]]:
    """Return the names of an option with the kind of its value, and its description with its default."""
    values = "|".join(option.choices)
    doc = option.doc
    default = shown_default(option)
    if len(values) > _CHOICES_WIDTH:
        values, doc = "TEXT", f"{doc} One of {', '.join(option.choices)}."
    if default is not None:
        doc += " " + f"(default: {default})".replace(" ", _UNBROKEN)
    head = option.placeholder or ", ".join((*option.flags, *option.off_flags))
    if option.placeholder is None and option.type is not bool:
        values = values or _VALUES[option.type] + ("" if option.word is None else f"|{option.word}")
        head += f" {values}{' ...' if option.is_tuple else ''}"
    return [(f"  {head}", 4), (f"      {doc}", 6)]


def _described(command: type) -> str:
    """Return the summary of a command, and the sentences below it."""
    text, _, _ = (command.__doc__ or "").partition("Raises:")
    return " ".join(text.split())


def _summary(command: type) -> str:
    return (command.__doc__ or "").partition("\n")[0]


def _typed(value: Any) -> str:
    """Return a value as one would type it in a shell, with line breaks visible."""
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{text.encode('unicode_escape').decode()}'"


def _wrap(text: str, width: int, indent: int) -> list[str]:
    lines = textwrap.wrap(text, max(width, _NARROWEST), subsequent_indent=" " * indent, break_on_hyphens=False)
    return [line.replace(_UNBROKEN, " ") for line in lines]
