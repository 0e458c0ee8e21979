"""The help of each command, wrapped to the width of the terminal."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from typing import Any

from pretrain._command_line.arguments import command_options, usage_names
from pretrain._command_line.command_classes import COMMANDS, EXAMPLES, FREQUENT, PlanOptions
from pretrain._command_line.option_table import Option, options_of, with_defaults
from pretrain._config import PretrainConfig

_NARROWEST, _WIDEST = 20, 100
_UNBROKEN = "\N{NO-BREAK SPACE}"
_CHOICES_WIDTH = 30
_USAGE_INDENT = " " * 11
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
    width = min(width, _WIDEST)
    options = options_of(PlanOptions) if command == "plan" else command_options(command)
    if command == "train":
        own = tuple(option for option in options if option.name in ("config", "print_config"))
        options = (*own, *with_defaults(options[len(own) :], config))
    return "\n".join(_page(command, options, width=width, is_overview=is_overview, shows_all=shows_all)) + "\n"


def shown_default(option: Option) -> str | None:
    """Return the default of an option as one would type it in a shell; None if there is none to show."""
    value = option.default
    if value is MISSING or option.type is bool:
        return None
    if value is None:
        return None if "Default" in option.doc else "none"
    return " ".join(_typed(item) for item in value) if option.is_tuple else _typed(value)


def _page(command: str, options: Sequence[Option], *, width: int, is_overview: bool, shows_all: bool) -> Iterator[str]:
    if is_overview:
        yield from _wrap("usage: pretrain [COMMAND] [OPTIONS]", width, _USAGE_INDENT)
        yield ""
        yield from _wrap(_INTRODUCTION, width)
        yield "\ncommands"
        for name, kind in COMMANDS.items():
            summary = _summary(kind) + (" The default." if name == "train" else "")
            yield from _wrap(f"  {name:9}{summary}", width, hang=" " * 11)
    else:
        words = f"usage: pretrain {command} {usage_names(options)}".rstrip()
        yield from _wrap(f"{words} [OPTIONS]", width, _USAGE_INDENT)
        yield ""
        yield from _wrap(_summary(COMMANDS[command]), width)
    names = [option for option in options if option.placeholder is not None]
    flags = [option for option in options if option.placeholder is None]
    if names:
        yield "\narguments"
        for option in names:
            yield from _entry(option, option.placeholder or "", width)
    if command == "train" and not shows_all:
        flags = sorted((one for one in flags if one.name in FREQUENT), key=lambda one: FREQUENT.index(one.name))
        yield "\noptions of train"
        yield from _flags(flags, width, shows_all=False)
    else:
        sections = dict.fromkeys(option.name.rpartition(".")[0] for option in flags)
        for section in sections:
            yield f"\n{_SECTION_TITLES[section] if command == 'train' else 'options'}"
            yield from _flags([option for option in flags if option.name.rpartition(".")[0] == section], width)
    yield "\nmore"
    if not is_overview:
        yield from _wrap("  pretrain --help lists the commands.", width, "  ")
    if command == "train" and not shows_all:
        yield from _wrap(
            "  --help-all shows all options, and --preset NAME --help the defaults of a preset.", width, "  "
        )
    if command == "plan":
        yield from _wrap("  pretrain train --help-all shows the other options.", width, "  ")
    if is_overview:
        yield from _wrap("  COMMAND --help shows the options of a command, and --version the versions.", width, "  ")
    yield "\nexamples"
    for line in EXAMPLES[command]:
        yield from _wrap(f"  {line}", width, hang="      ")


def _flags(options: Sequence[Option], width: int, *, shows_all: bool = True) -> Iterator[str]:
    for option in options:
        values = ""
        if option.type is bool:
            values = f", {option.off_flag}" if shows_all else ""
        elif option.choices and len("|".join(option.choices)) <= _CHOICES_WIDTH:
            values = f" {'|'.join(option.choices)}"
        else:
            values = f" {'INTEGER' if option.type is int else 'NUMBER' if option.type is float else 'TEXT'}"
        yield from _entry(option, ", ".join(option.flags) + values + (" ..." if option.is_tuple else ""), width)


def _entry(option: Option, title: str, width: int) -> Iterator[str]:
    doc, default = option.doc, shown_default(option)
    if option.choices and len("|".join(option.choices)) > _CHOICES_WIDTH and not option.is_tuple:
        doc += f" One of {', '.join(option.choices)}."
    if default is not None:
        doc += " " + f"(default: {default})".replace(" ", _UNBROKEN)
    yield from _wrap(f"  {title}", width, hang="    ")
    yield from _wrap(f"      {doc}", width, hang="      ")


def _wrap(text: str, width: int, hang: str = "") -> list[str]:
    lines = textwrap.wrap(text, max(width, _NARROWEST), subsequent_indent=hang, break_on_hyphens=False)
    return [line.replace(_UNBROKEN, " ") for line in lines]


def _summary(command: type) -> str:
    return (command.__doc__ or "").partition("\n")[0]


def _typed(value: Any) -> str:
    """Return a value as one would type it in a shell, with line breaks visible."""
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{text.encode('unicode_escape').decode()}'"
