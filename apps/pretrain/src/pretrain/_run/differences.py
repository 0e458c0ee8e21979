"""The options that change the result of a run, and those that differ between runs."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any, get_type_hints

from pretrain._config import PretrainConfig
from pretrain._run.files import flatten


def option_values(config: PretrainConfig) -> dict[str, Any]:
    """Return the values of all options, by their dotted names."""
    return flatten(dataclasses.asdict(config))


def changes_result(name: str) -> bool:
    """Return whether an option changes the result of a run by more than rounding.

    >>> changes_result("seed"), changes_result("train.log_every"), changes_result("mesh.fsdp")
    (True, False, False)
    """
    return name in _of_result(PretrainConfig)


def differing_options(configs: Sequence[PretrainConfig]) -> dict[str, list[Any]]:
    """Return the options that change the result and differ between runs, with the value of each run.

    Args:
        configs: the resolved configurations, one for each run.
    """
    values = [option_values(config) for config in configs]
    columns = {name: [of_run[name] for of_run in values] for name in values[0] if changes_result(name)}
    return {name: column for name, column in columns.items() if any(value != column[0] for value in column)}


@cache
def _of_result(config: type, section: str = "") -> frozenset[str]:
    """Return the dotted names of the options of a dataclass that change the result."""
    types = get_type_hints(config)
    names: set[str] = set()
    for field in dataclasses.fields(config):
        if not field.metadata.get("changes_result", True):
            continue
        name = section + field.name
        names |= _of_result(types[field.name], f"{name}.") if dataclasses.is_dataclass(types[field.name]) else {name}
    return frozenset(names)
