"""Configurations in files: TOML with the names of the options, and the `config.json` of a run."""

import codecs
import dataclasses
import errno
import json
import os
import select
import stat
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from pretrain._command_line.option_table import Option, options_of, value_of
from pretrain._config import LENGTHS, MICROBATCHES, PretrainConfig, replace_options, without_replaced
from pretrain._errors import UsageError, short, shown
from pretrain._presets import PRESETS
from pretrain._suggestions import did_you_mean, nearest_option

_OPTIONS = {option.name: option for option in options_of(PretrainConfig)}
_SECTIONS = {name.partition(".")[0] for name in _OPTIONS if "." in name}
_GRID = "grid."
# Where a shell puts the pipe of `<(command)`, and the standard input.
_PIPES_OF_A_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_SILENCE_S = 10.0
# Python's parser of TOML takes time that grows with the square of a key's length. A description of a run may be long.
_MOST_BYTES = {"TOML": 32_000, "JSON": 16_000_000}


def read_config(path: str) -> dict[str, Any]:
    """Read the options that a file gives.

    Args:
        path: a TOML file, a JSON file of the same structure, or the `config.json` of a run.

    Returns:
        Values by the names of the options, such as `train.max_steps`.

    Raises:
        UsageError: the file is not TOML or JSON, or has an unknown name or a value of a wrong type.
        OSError: the file cannot be read.
    """
    return {name: _read_value(name, value, path) for name, value in _read_values(path).items()}


def read_sweep(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the options of a file of `sweep`, and the values of its table `[grid]` as they are.

    Raises:
        UsageError: the file is not TOML or JSON, or has an unknown name or a value of a wrong type beside the grid.
        OSError: the file cannot be read.
    """
    values = _read_values(path)
    grid = {name.removeprefix(_GRID): value for name, value in values.items() if name.startswith(_GRID)}
    options = {name: value for name, value in values.items() if not name.startswith(_GRID)}
    return {name: _read_value(name, value, path) for name, value in options.items()}, grid


def _read_values(path: str) -> dict[str, Any]:
    """Return the values of a file by their dotted names."""
    try:
        return _parse(path)
    except RecursionError:
        raise UsageError(f"{path} must be options in sections, got too many levels of them.") from None


def _parse(path: str) -> dict[str, Any]:
    if "\0" in path:
        raise UsageError("--config must be the name of a file, got one with a null character.")
    kind = "JSON" if path.lower().endswith(".json") else "TOML"
    text = _read(path, _MOST_BYTES[kind]).removeprefix(codecs.BOM_UTF8)
    try:
        content = json.loads(text, object_pairs_hook=_object) if kind == "JSON" else tomllib.loads(text.decode())
    except ValueError as error:  # of both formats, and of text that is not UTF-8
        raise UsageError(f"{path} must be {kind}, got an error in it ({error}).") from None
    if isinstance(content, dict) and "data" in content and isinstance(content.get("config"), dict):
        from pretrain._run.description import parse_description  # imports of a second, which `--help` does without

        content = dataclasses.asdict(parse_description(text, path, "Give another --config.").config)
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold options by their names, got {type(content).__name__}.")
    if len(content) > 1 and not {name.replace("-", "_") for name in content} & (_OPTIONS.keys() | _SECTIONS):
        raise UsageError(
            f"{path} must hold options by their names, got {short(', '.join(content))}. Give a file of --print-config, "
            "or the config.json of a run."
        )
    pairs = list(_leaves(content))
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{path} must give each option once, got {short(twice)} twice.")
    return values


def _leaves(content: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of all sections by their dotted names, in which `-` is `_`."""
    for key, value in content.items():
        name = section + key.replace("-", "_")
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as TOML does: a name that occurs twice is an error."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{short(twice[0])} occurs twice")
    return dict(pairs)


def _read(path: str, most_bytes: int) -> bytes:
    """Return the content of a file, or of a pipe that a shell has opened, as for `--config <(command)`.

    Args:
        path: the file.
        most_bytes: the largest size.

    Raises:
        UsageError: the file is a device or another pipe, is too large, or its writer writes nothing.
        OSError: the file cannot be read.
    """
    if not path:
        raise UsageError("--config must be a file, got an empty name. Give a file, or leave the option out.")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer blocks neither here nor below
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode) and not path.startswith(_PIPES_OF_A_SHELL):
            raise UsageError(f"--config must be a file, got {short(path)}, a pipe or a device. Give another file.")
        content = b""
        while len(content) <= most_bytes:
            if not select.select([descriptor], [], [], _SILENCE_S)[0]:
                raise UsageError(f"--config must be a file, got {path}, a pipe that is silent. Give another file.")
            try:
                block = os.read(descriptor, most_bytes)
            except OSError as error:  # it names no file
                found = f"{short(path)} ({error.strerror})"
                raise UsageError(f"--config must be readable, got {found}. Give another file.") from None
            if not block:
                return content
            content += block
    finally:
        os.close(descriptor)
    raise UsageError(
        f"--config must be a file of at most {most_bytes:,} bytes, got {short(path)}, which is larger. Give another."
    )


def build_config(file: Mapping[str, Any], line: Mapping[str, Any]) -> PretrainConfig:
    """Build a configuration from options. Those of the command line replace those of the file, and both the preset's.

    Args:
        file: values of a file, by the names of the options.
        line: values of a command line.

    Raises:
        UsageError: a value is out of its range, or the command line has two options of which one replaces the other.
    """
    for replaced, *others in (LENGTHS, MICROBATCHES):
        given = [name for name in others if line.get(name) is not None]
        if given and replaced in line:
            one, other = (f"--{name.replace('_', '-')}" for name in (replaced, given[0]))
            raise UsageError(f"{one} cannot be given with {other}, which replaces it. Leave one of them out.")
    if line.get("anneal") is not None and (given := [name for name in LENGTHS if line.get(name) is not None]):
        flag = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{flag} cannot be given with --anneal, which is the number of steps. Leave one of them out.")
    values = {**without_replaced(file), **without_replaced(line)}
    # The config.json of a run has every option, and needs neither the other run nor the weights.
    is_complete = {"preset", "model.num_layers"} <= file.keys() and not {"from_checkpoint", "init_from"} & line.keys()
    base = PRESETS[values["preset"]]() if is_complete else _base(values)
    try:
        return replace_options(base, values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _base(values: Mapping[str, Any]) -> PretrainConfig:
    """Return the configuration that options replace: a preset, with the model of `init_from`, or a run's.

    Raises:
        UsageError: a preset is given beside a run, or the run or the weights do not exist.
    """
    parent, weights = values.get("from_checkpoint"), values.get("init_from")
    if parent is not None and weights is None:
        if "preset" in values:
            raise UsageError("--preset cannot be given with --from, which gives every default. Leave one of them out.")
        from pretrain._resolve.origin import settings_of  # imports of a second, which `--help` does without
        from ray_jax_launch import as_storage_path, join_path

        name, storage = values.get("name"), values.get("storage_path", PRESETS["quickstart"]().storage_path)
        return settings_of(parent, None if name is None else join_path(as_storage_path(storage), name))
    preset = PRESETS[values.get("preset", "quickstart")]()
    if weights in (None, preset.init_from) or parent is not None:
        return preset
    from pretrain._resolve.origin import with_weights_of

    return with_weights_of(preset, weights)


def to_toml(config: PretrainConfig) -> str:
    """Return a configuration as TOML, with every option. `read_config` and `build_config` give it back.

    TOML has no None. An option that is None is a comment, and the text `none` if the preset has another value.
    """
    preset = PRESETS[config.preset]()
    lines: list[str] = []
    section = ""
    for name, option in _OPTIONS.items():
        own, _, last = name.rpartition(".")
        if own != section:
            section = own
            lines.append(f"\n[{section}]")
        value = value_of(config, option)
        if value is None and (value_of(preset, option) is None or name in LENGTHS):  # `max_steps` is always given
            lines.append(f"# {last} = none")
        else:
            toml = "none" if value is None else list(value) if isinstance(value, tuple) else value
            lines.append(tomli_w.dumps({last: toml}).rstrip("\n"))
    return "\n".join(lines) + "\n"


def to_arguments(config: PretrainConfig) -> list[str]:
    """Return the arguments of the command `train` that give a configuration. `build_command` gives it back.

    Raises:
        UsageError: no arguments give it: one of several texts would be read as an option.
    """
    origin = {name: getattr(config, name) for name in ("from_checkpoint", "init_from") if getattr(config, name)}
    if config.from_checkpoint is None:
        origin["preset"] = config.preset
    base = _base(origin)
    changed = {
        name: value_of(config, option)
        for name, option in _OPTIONS.items()
        if name in origin or (value_of(config, option) != value_of(base, option) and name != "preset")
    }
    for replaced, *others in (LENGTHS, MICROBATCHES):
        if not {replaced, *others} & changed.keys():
            continue
        given = {name: value for name in others if (value := value_of(config, _OPTIONS[name])) is not None}
        changed = {name: value for name, value in changed.items() if name not in (replaced, *others)}
        changed |= given or {replaced: value_of(config, _OPTIONS[replaced])}
    return [word for name, value in changed.items() for word in _words(_OPTIONS[name], value)]


def _words(option: Option, value: Any) -> list[str]:
    """Return the words of the command line for a value of an option."""
    flag = option.flags[0]
    if option.type is bool:
        return [flag if value else option.off_flags[0]]
    texts = ["none"] if value is None else list(map(str, value)) if option.is_tuple else [str(value)]
    if not texts and not option.choices:
        return [f"{flag}="]
    if not any(text.startswith("-") for text in texts):
        return [flag, *texts]
    if len(texts) > 1:
        raise UsageError(f"{option.name} must be texts that begin with no -, got {shown(texts)}. Put a space before.")
    return [f"{flag}={texts[0]}"]


def _read_value(name: str, value: Any, path: str) -> Any:
    option = _OPTIONS.get(name)
    if name in _SECTIONS:
        raise UsageError(f"{name} in {path} must be a section, got {shown(value)}. Write the names of its options.")
    if option is None:
        known = nearest_option(name.replace("_", "-"), [known.replace("_", "-") for known in _OPTIONS])
        if known is None:
            raise UsageError(f"options in {path} must be those of pretrain --help-all, got {short(name)}.")
        raise UsageError(f"no option {short(name)}, in {path}; did you mean {known.replace('-', '_')}?")
    try:
        return option.from_file(value)
    except ValueError as error:
        remedy = did_you_mean(value, option.choices)
        raise UsageError(f"{name} in {path} must be {error}, got {shown(value)}.{remedy}") from None
