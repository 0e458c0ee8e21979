"""Command lines, read into the command that they give.

argparse is not used: it rejects a value that begins with a minus sign, such as `-x` or `-1e-3`, with a message of its
own.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from pretrain._command_line.command_classes import (
    COMMANDS,
    FREQUENT,
    Command,
    ConfigOptions,
    PlanCommand,
    PlanOptions,
    ShowConfig,
)
from pretrain._command_line.config_file import build_config, read_config
from pretrain._command_line.option_table import Option, options_of
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, short
from pretrain._suggestions import did_you_mean, nearest, nearest_option

# A word that is no value. A value of this form is written after an equals sign.
_FLAG = re.compile(r"--[A-Za-z]")


def split_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command, by default `train`, and its arguments.

    Raises:
        UsageError: there is no such command.
    """
    if not arguments or arguments[0].startswith("-"):
        return "train", list(arguments)
    if arguments[0] not in COMMANDS:
        known = nearest(arguments[0], COMMANDS)
        remedy = f"; did you mean {known}?" if known else "."
        raise UsageError(f"no command {short(arguments[0])}; there are {', '.join(COMMANDS)}{remedy}")
    return arguments[0], list(arguments[1:])


def command_options(command: str) -> tuple[Option, ...]:
    """Return the options of a command."""
    own = options_of(COMMANDS[command])
    match command:
        case "train":
            return (*options_of(ConfigOptions), *own)
        case "plan":
            return (*own, *options_of(ConfigOptions), *options_of(PretrainConfig))
        case _:
            return own


def build_command(command: str, arguments: Sequence[str]) -> Command:
    """Return the command that its arguments give.

    Raises:
        UsageError: an option does not exist, or its value has the wrong type or is out of its range.
        OSError: the file of a configuration cannot be read.
    """
    options = command_options(command)
    values = _read_values(command, arguments, options)
    if command in ("train", "plan"):
        planned = {name: values.pop(name) for name in [one.name for one in options_of(PlanOptions)] if name in values}
        file, shows = values.pop("config", None), values.pop("print_config", False)
        config = build_config(read_config(file) if file is not None else {}, values)
        if shows:
            return ShowConfig(config=config)
        return config if command == "train" else PlanCommand(config=config, options=PlanOptions(**planned))
    for option in options:
        if option.default is MISSING and option.name not in values:
            raise UsageError(
                f"{option.placeholder} must be given, got nothing. Write: pretrain {command} {usage_names(options)}"
            )
    return COMMANDS[command](**values)


def usage_names(options: Sequence[Option]) -> str:
    """Return the values without a flag, as in a usage line."""
    words: list[str] = []
    for option in options:
        if option.placeholder is not None:
            word = option.placeholder + ("..." if option.is_tuple else "")
            words.append(word if option.default is MISSING else f"[{word}]")
    return " ".join(words)


def _read_values(command: str, arguments: Sequence[str], options: Sequence[Option]) -> dict[str, Any]:
    by_flag = {flag: option for option in options for flag in option.flags}
    off_flags = {option.off_flag: option for option in options if option.off_flag is not None}
    unnamed = deque(option for option in options if option.placeholder is not None)
    values: dict[str, Any] = {}
    words = deque(arguments)
    while words:
        word = words.popleft()
        flag, equals, attached = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("-"):
            if not unnamed:
                raise UsageError(
                    f"arguments must be --NAME VALUE, got {short(word)} without --NAME. Put quotes around a value with "
                    "spaces."
                )
            option = unnamed.popleft()
            texts = [word, *_take_values(words)] if option.is_tuple else [word]
            values[option.name] = _convert(option, option.placeholder or "", texts)
        elif not (option := off_flags.get(flag) or by_flag.get(flag)) or option.placeholder is not None:
            _reject_flag(command, flag, options)
        elif option.type is bool:
            if equals:
                remedy = f"Write {option.flags[-1]} or {option.off_flag}."
                raise UsageError(f"{flag} must have no value, got {short(attached)}. {remedy}")
            values[option.name] = flag not in off_flags
        elif option.is_tuple:
            values[option.name] = _convert(option, flag, [attached] if equals else _take_values(words))
        elif equals or (words and not _FLAG.match(words[0])):
            values[option.name] = _convert(option, flag, [attached if equals else words.popleft()])
        else:
            raise UsageError(f"{flag} must have a value, got none. Write {flag} VALUE, or {flag}=VALUE.")
    return values


def _take_values(words: deque[str]) -> list[str]:
    taken: list[str] = []
    while words and not _FLAG.match(words[0]):
        taken.append(words.popleft())
    return taken


def _convert(option: Option, flag: str, texts: list[str]) -> Any:
    try:
        return option.from_text(texts)
    except ValueError as error:
        given = next((text for text in texts if option.choices and text not in option.choices), " ".join(texts))
        remedy = did_you_mean(given, option.choices, "Change it.")
        raise UsageError(f"{flag} must be {error}, got {short(given)}. {remedy}") from None


def _reject_flag(command: str, flag: str, options: Sequence[Option]) -> NoReturn:
    frequent_first = sorted(options, key=lambda option: option.name not in FREQUENT)
    flags = [option.flags[-1][2:] for option in frequent_first if option.placeholder is None]
    known = nearest_option(flag.lstrip("-"), flags)
    if known is None:
        raise UsageError(
            f"options must be those of pretrain {command} --help-all, got {short(flag)}. Correct the name."
        )
    place = "" if command == "train" else f" of {command}"
    raise UsageError(f"no option {short(flag)}{place}; did you mean --{known}?")
