"""The grid of the command `sweep`: several values of options, each combination of which is a run."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain._command_line.config_file import build_config
from pretrain._command_line.option_table import Option, options_of
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, short, shown
from pretrain._suggestions import did_you_mean, nearest_option

_OPTIONS = {flag.removeprefix("--"): option for option in options_of(PretrainConfig) for flag in option.flags}
_MOST_RUNS = 1000
_BOOLEANS = {"true": True, "false": False}


def read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values that texts such as `seed=1,2,3` give, by the names of the options.

    Raises:
        UsageError: a text has another form, or a value is none of its option.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise UsageError(f"--grid must be OPTION=VALUE,VALUE such as seed=1,2,3, got {short(text)}.")
        option = _find(name, "--grid")
        if option.name in grid:
            raise UsageError(f"--grid must have each option once, got {short(name)} twice.")
        grid[option.name] = [_from_text(option, name, value) for value in values.split(",")]
    return grid


def check_grid(content: Mapping[str, Any], path: str) -> dict[str, list[Any]]:
    """Return the values that the table `[grid]` of a file gives, by the names of the options.

    Args:
        content: the values, by dotted names.
        path: the file, for errors.

    Raises:
        UsageError: an option does not exist, or its values are no list of its values.
    """
    grid: dict[str, list[Any]] = {}
    for name, values in content.items():
        option = _find(name, f"grid in {path}")
        if not isinstance(values, list) or not values:
            raise UsageError(f"grid.{name} in {path} must be a list of values, got {shown(values)}.")
        grid[option.name] = [_from_file(option, f"grid.{name} in {path}", value) for value in values]
    return grid


def grid_configs(
    file: Mapping[str, Any], line: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> tuple[PretrainConfig, ...]:
    """Return the configuration of each combination of a grid. The last option changes first.

    Args:
        file: options of a file, for all runs.
        line: options of the command line, for all runs.
        grid: the values of each option of the grid.

    Raises:
        UsageError: an option is given twice, a value is out of its range, or there are too many runs.
    """
    if not grid:
        raise UsageError("sweep must have a grid, got none. Give --grid OPTION=VALUE,VALUE, or a FILE with [grid].")
    if "name" in {**file, **line, **grid}:
        raise UsageError("name cannot be given to sweep, which names each run by its options. Leave it out.")
    if twice := next((name for name in grid if name in line), None):
        flag = f"--{twice.replace('_', '-')}"
        raise UsageError(f"{flag} cannot be given beside its values in the grid. Leave one of them out.")
    num_runs = math.prod(map(len, grid.values()))
    if num_runs > _MOST_RUNS:
        raise UsageError(f"a grid must have at most {_MOST_RUNS:,} runs, got {num_runs:,}. Give fewer values.")
    combinations = itertools.product(*grid.values())
    return tuple(build_config(file, {**line, **dict(zip(grid, values, strict=True))}) for values in combinations)


def _find(name: str, place: str) -> Option:
    flag = name.replace("_", "-")
    if flag in _OPTIONS:
        return _OPTIONS[flag]
    from pretrain._run.names import short_name  # imports of a second, which `--help` does without

    by_short_name = {short_name(option.name): known for known, option in _OPTIONS.items()}
    known = by_short_name.get(name.rpartition(".")[2]) or nearest_option(flag, [*_OPTIONS])
    remedy = f"; did you mean {known}?" if known else ", see pretrain train --help-all."
    raise UsageError(f"no option {short(name)}, of {place}{remedy}")


def _from_text(option: Option, name: str, text: str) -> Any:
    try:
        if option.type is bool:
            if text not in _BOOLEANS:
                raise ValueError(option.constraint())
            return _BOOLEANS[text]
        return option.from_text([text])
    except ValueError as error:
        raise UsageError(f"--grid {name} must be {error}, got {short(text)}.{_similar(option, text)}") from None


def _from_file(option: Option, name: str, value: Any) -> Any:
    try:
        return option.from_file(value)
    except ValueError as error:
        raise UsageError(f"each of {name} must be {error}, got {shown(value)}.{_similar(option, value)}") from None


def _similar(option: Option, value: Any) -> str:
    return did_you_mean(value, option.choices)
