"""Command lines, read into the command that they give.

No library for command lines reads them. argparse, and tyro 1.0.17, reject `--prompt -x`. tyro also draws its errors in
a frame, with its hook for errors in a private module, and does not read `none`. cyclopts 5.5.2 reads `--prompt -x` only
if the option then takes a following `--seed` as its value too; it drops the section `[train]` of a file because there
is a command of this name, rejects an option that is given twice, and shows no preset's defaults in its help. Both
answer `--lr` and a misspelled command with no similar name. With both, the presets, the file of `--config`, the checks
of types, the similar names and the short help would still be code of this package.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from pretrain._command_line.command_classes import (
    COMMANDS,
    FREQUENT,
    ConfigOptions,
    OutputOptions,
    PlanCommand,
    PlanOptions,
    ShowConfig,
    SweepCommand,
    SweepOptions,
    TrainCommand,
)
from pretrain._command_line.config_file import build_config, read_config, read_sweep, to_arguments
from pretrain._command_line.grid import check_grid, grid_configs, read_grid
from pretrain._command_line.option_table import Option, options_of
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, short
from pretrain._suggestions import did_you_mean, nearest, nearest_option
from pretrain._surroundings.typed_command import application

# A word that is no value. A value of this form is written after an equals sign.
_FLAG = re.compile(r"--[A-Za-z]")
_OF_A_CHECKPOINT, _TAKES_A_CHECKPOINT = ("--step", "--best"), ("sample", "eval", "export")
# What other programs call the continuation of a run.
_CONTINUING = ("--resume", "--continue", "--restart")


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
            return (*options_of(ConfigOptions), *options_of(OutputOptions), *own)
        case "plan":
            return (*own, *options_of(ConfigOptions), *options_of(PretrainConfig))
        case "sweep":
            config = (option for option in options_of(ConfigOptions) if option.name == "config")
            return (*own, *config, *options_of(PretrainConfig))
        case _:
            return own


def build_command(command: str, arguments: Sequence[str]) -> Any:
    """Return the command that its arguments give: a configuration to train, or a class of `command_classes`.

    Raises:
        UsageError: an option does not exist, or its value has the wrong type or is out of its range.
        OSError: the file of a configuration cannot be read.
    """
    values = _read_values(command, arguments)
    if command == "sweep":
        return _build_sweep(values)
    if command not in ("train", "plan"):
        return COMMANDS[command](**values)
    planned = {one.name: values.pop(one.name) for one in options_of(PlanOptions) if one.name in values}
    file, shows = values.pop("config", None), values.pop("print_config", False)
    is_quiet, is_verbose = values.pop("quiet", False), values.pop("verbose", False)
    if is_quiet and is_verbose:
        raise UsageError("--quiet cannot be given with --verbose. Leave one of them out.")
    config = build_config(read_config(file) if file is not None else {}, values)
    if shows:
        return ShowConfig(config=config)
    if command == "plan":
        return PlanCommand(config=config, options=PlanOptions(**planned))
    if is_quiet or is_verbose:
        return TrainCommand(config=config, output="quiet" if is_quiet else "verbose")
    return config


def _build_sweep(values: dict[str, Any]) -> SweepCommand:
    own = {one.name: values.pop(one.name, one.default) for one in options_of(SweepOptions)}
    if own["parallel"] < 1:
        raise UsageError(f"--parallel must be at least 1, got {own['parallel']}.")
    config = values.pop("config", None)
    file, grid = read_config(config) if config is not None else {}, dict[str, Any]()
    if own["file"] is not None:
        options, found = read_sweep(own["file"])
        file, grid = {**file, **options}, check_grid(found, own["file"])
    configs = grid_configs(file, values, {**grid, **read_grid(own["grid"])})
    arguments = tuple(tuple(to_arguments(one)) for one in configs)
    return SweepCommand(configs=configs, arguments=arguments, parallel=own["parallel"], dry_run=own["dry_run"])


def usage(command: str) -> str:
    """Return the usage of a command, without the word for its options."""
    words: list[str] = []
    for one in command_options(command):
        if one.placeholder is not None:
            word = f"{one.placeholder}{'...' if one.is_tuple else ''}"
            words.append(word if one.default is MISSING else f"[{word}]")
    return " ".join([application(), command, *words])


def _read_values(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the options that are given, by their names. The last value of an option counts."""
    flagged = [option for option in command_options(command) if option.placeholder is None]
    by_flag = {flag: option for option in flagged for flag in (*option.flags, *option.off_flags)}
    values: dict[str, Any] = {}
    unnamed: list[str] = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        flag, equals, attached = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("-"):
            unnamed.append(word)
            continue
        if flag not in by_flag:
            raise _unknown_flag(command, flag)
        option = by_flag[flag]
        if option.type is bool:
            if equals:
                remedy = f"Write {' or '.join((option.flags[-1], *option.off_flags))}."
                raise UsageError(f"{flag} must have no value, got {short(attached)}. {remedy}")
            values[option.name] = flag not in option.off_flags
            continue
        texts = [attached] if equals else []
        while not equals and words and not _FLAG.match(words[0]) and (option.is_tuple or not texts):
            texts.append(words.popleft())
        if texts == [""] and option.is_tuple and "." in option.name:  # empties what a file or another run has set
            texts = []
        elif not texts and not (option.is_tuple and option.choices):  # no value is no choice
            raise UsageError(f"{flag} must have a value, got none. Write {flag} VALUE, or {flag}=VALUE.")
        values[option.name] = _convert(option, flag, texts)
    return values | _place(command, unnamed)


def _place(command: str, texts: list[str]) -> dict[str, Any]:
    """Return the values of the options without a flag."""
    values: dict[str, Any] = {}
    for option in command_options(command):
        if option.placeholder is None:
            continue
        taken, texts = (texts, []) if option.is_tuple else (texts[:1], texts[1:])
        if taken:
            values[option.name] = _convert(option, option.placeholder, taken)
        elif option.default is MISSING:
            raise UsageError(f"{option.placeholder} must be given, got nothing. Write: {usage(command)}")
    if texts:
        found = f"{short(texts[0])} without --NAME"
        raise UsageError(f"arguments must be --NAME VALUE, got {found}. Put quotes around a value with spaces.")
    return values


def _convert(option: Option, flag: str, texts: list[str]) -> Any:
    try:
        return option.from_text(texts)
    except ValueError as error:
        given = next((text for text in texts if option.choices and text not in option.choices), " ".join(texts))
        remedy = did_you_mean(given, option.choices)
        raise UsageError(f"{flag} must be {error}, got {short(given)}.{remedy}") from None


def _unknown_flag(command: str, flag: str) -> UsageError:
    if command == "train" and flag in _CONTINUING:
        return UsageError(
            f"no option {flag}. The same command continues its run from the newest checkpoint; another --name starts "
            "a new run."
        )
    if flag in _OF_A_CHECKPOINT and command in _TAKES_A_CHECKPOINT:
        return UsageError(f"no option {flag} of {command}. Name a checkpoint RUN@STEP, with a number, or RUN@best.")
    frequent_first = sorted(command_options(command), key=lambda option: option.name not in FREQUENT)
    known = nearest_option(flag.lstrip("-"), [one.flags[-1][2:] for one in frequent_first if one.placeholder is None])
    if known is None:
        page = f"{application()} {command} {'--help-all' if command == 'train' else '--help'}"
        return UsageError(f"options must be those of {page}, got {short(flag)}.")
    place = "" if command == "train" else f" of {command}"
    return UsageError(f"no option {short(flag)}{place}; did you mean --{known}?")
