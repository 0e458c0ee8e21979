"""The commands and their exit codes. Light to import: each command imports what takes seconds."""

import dataclasses
import importlib
import io
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from rich.console import Console

from pretrain._command_line.arguments import build_command, split_command
from pretrain._command_line.command_classes import (
    COMMANDS,
    BlameCommand,
    DoctorCommand,
    EvalCommand,
    ExportCommand,
    PlanCommand,
    ReplayCommand,
    SampleCommand,
    ShowConfig,
    SweepCommand,
    TrainCommand,
)
from pretrain._command_line.completion import completion_script
from pretrain._command_line.config_file import to_toml
from pretrain._command_line.help_page import help_page
from pretrain._config import PretrainConfig
from pretrain._early_interrupt import raise_interrupts
from pretrain._errors import RunFailedError, UsageError, one_line, rejection, shown
from pretrain._formats import loss
from pretrain._output import Output, discard_unwritten, open_streams, print_error, set_log_level, show_warnings
from pretrain._screen.plan_table import show_plan
from pretrain._screen.printing import TextWriter, print_line
from pretrain._surroundings.environment import check_folders, check_limits, check_ray_variables, check_variables

_LOSSES = (("loss", "loss"), ("val loss", "val_loss"))
_FAILED = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
_NO_READER = 141
_TRAINING = (PretrainConfig, TrainCommand, SweepCommand)
_USERS_OF_JAX = (*_TRAINING, SampleCommand, EvalCommand, ExportCommand, PlanCommand, BlameCommand, ReplayCommand)
_NAMES = {kind: name for name, kind in COMMANDS.items()}
# Of a module of `pretrain._commands`, where the name is not twice that of the command.
_FUNCTIONS = {
    "data": "data.show_data",
    "eval": "evaluate.show_evaluation",
    "runs": "runs.show_runs",
    "verify": "verify_run.verify",
}
_HELP = ("-h", "--help", "--help-all", "--help_all")


def main(args: Sequence[str] | None = None) -> int:
    """Run the application with these arguments, or with those of the process.

    Returns:
        The exit code: 0 for success; 1 for failed training, runs that differ, a failed check, or a text that is not
        found; 2 for bad input, 130 after an interrupt, 141 if the reader of the output has closed it.
    """
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # the command prints the errors of `datasets` itself
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]  # rich would print nothing
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        if not os.path.isabs(os.environ.get(name, "/")):  # noqa: PTH117 - a text
            del os.environ[name]  # the XDG specification ignores a relative path, but matplotlib and datasets use it
    began_s = time.time()
    open_streams()
    show_warnings()
    hint = ""
    try:
        arguments = _checked(sys.argv[1:] if args is None else args)
        if text := _information(arguments):
            sys.stdout.write(text)
            code = 0
        else:
            check_folders()
            command = parse_command(arguments)
            if not isinstance(command, DoctorCommand):  # which reports a wrong variable with all else
                check_ray_variables()
            if isinstance(command, _USERS_OF_JAX):
                check_limits()
                check_variables()
            hint = ": run the same command again to continue" if isinstance(command, _TRAINING) else ""
            code = _run(command, began_s)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error(f"interrupted{hint}")
        return _INTERRUPTED
    except BrokenPipeError:
        return _NO_READER
    except RunFailedError as error:
        print_error(f"error: {str(error).rstrip('.')}: the same command continues from the newest checkpoint")
        return _FAILED
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sentence = rejection(error)
        if sentence is None:
            raise
        print_error(f"error: {sentence}")
        return _BAD_INPUT
    finally:
        discard_unwritten()


def _checked(args: Any) -> list[str]:
    """Return the arguments of a caller as a list.

    Raises:
        UsageError: they are not a list of texts.
    """
    if not isinstance(args, list | tuple) or not all(isinstance(one, str) for one in args):
        raise UsageError(f"args must be a list of texts, got {shown(args)}. Write it as in ['sample', 'first'].")
    return [*args]


def parse_command(arguments: Sequence[str]) -> Any:
    """Parse the arguments of the command line. The command `train` is the default.

    Raises:
        UsageError: the arguments are wrong.
        OSError: the file of a configuration cannot be read.
    """
    command, rest = split_command(arguments)
    return build_command(command, rest)


def _information(arguments: Sequence[str]) -> str | None:
    """Return the help, the versions or a script for a shell, if the arguments ask for them.

    Raises:
        UsageError: they name no command, no preset, or no shell.
    """
    if "--version" in arguments:
        names = ("pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "ray")
        return "".join(f"{name} {version(name)}\n" for name in names)
    if arguments[:1] == ["--completion"] or (arguments[:1] and arguments[0].startswith("--completion=")):
        return completion_script([*arguments[0].split("=")[1:], *arguments[1:]])
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    asked = next((argument for argument in arguments if argument in _HELP), None)
    if asked is None:
        return None
    command, rest = split_command([argument for argument in arguments if argument not in _HELP])
    return help_page(
        command,
        _defaults(rest),
        width=shutil.get_terminal_size().columns,
        is_overview=arguments[0].startswith("-"),
        shows_all=asked.startswith("--help-") or asked == "--help_all",
    )


def _defaults(arguments: Sequence[str]) -> PretrainConfig:
    """Return the defaults that the help shows: those of the preset that the arguments name.

    Raises:
        UsageError: there is no such preset.
    """
    words = pairwise(["", *arguments])
    given = [
        word.removeprefix("--preset=") for before, word in words if before == "--preset" or word.startswith("--preset=")
    ]
    config = build_command("train", [f"--preset={preset}" for preset in given])
    assert isinstance(config, PretrainConfig)
    return config


def standard_output() -> Output:
    """Return a console that keeps its stream: a tracker in this process may replace `sys.stdout` for a while."""
    return Output(file=sys.stdout, emoji=False)


def _run(command: Any, began_s: float) -> int:
    console = standard_output()
    match command:
        case PretrainConfig():
            return _train(command, console, began_s)
        case TrainCommand(config=config, output="quiet"):
            set_log_level(logging.ERROR)
            return _train(config, Output(file=sys.stdout, emoji=False, quiet=True), began_s)
        case TrainCommand(config=config):
            set_log_level(logging.INFO)
            return _train(config, console, began_s)
        case ShowConfig(config=config):
            sys.stdout.write(to_toml(config))
        case PlanCommand(config=config, options=options):
            given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
            as_json = given.pop("json")
            found = _imported("plan_run.plan")(config, **given, console=Console(stderr=True, emoji=False))
            show_plan(found, console=console, as_json=as_json)
            return 0 if found.fits else _FAILED
        case SweepCommand(configs=configs, arguments=arguments, parallel=parallel, dry_run=dry_run):
            if not dry_run:
                print_line(console, "loading JAX and Ray")
            runs = _imported("sweep.plan_sweep")(configs, arguments)
            if dry_run:
                _imported("sweep.show_commands")(runs, console)
                return 0
            failed = _imported("sweep.sweep")(runs, parallel=parallel, console=console)
            if failed:
                sentence = f"{len(failed)} of {len(configs)} runs have failed: {', '.join(failed)}"
                print_error(f"error: {one_line(sentence)}: the same command continues them")
                return _FAILED
        case SampleCommand():
            _sample(command, console)
        case ExportCommand():
            exported = _imported("export.export")(**dataclasses.asdict(command))
            of_step = "" if exported.step is None else f" of step {exported.step}"
            print_line(console, f"wrote the model{of_step} to {command.out}")
            if exported.commit_url is not None:
                print_line(console, f"uploaded it: {exported.commit_url}")
        case _:
            name = _NAMES[type(command)]
            is_success = _imported(_FUNCTIONS.get(name, f"{name}.{name}"))(**_options(command), console=console)
            return _FAILED if is_success is False else 0
    return 0


def _sample(command: SampleCommand, console: Console) -> None:
    options = dataclasses.asdict(command)
    if options.pop("interactive"):
        options["prompt"] = _typed_prompts(console)
    texts = TextWriter(console)
    try:
        for _ in _imported("sample.sample")(**options, write=texts.write):
            texts.end()
    except KeyboardInterrupt:
        texts.end()  # the message begins a line
        raise


def _options(command: Any) -> dict[str, Any]:
    """Return the options of a command as the arguments of its function."""
    fields = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    return {"as_json" if name == "json" else name: value for name, value in fields.items()}


def _typed_prompts(console: Console) -> Iterator[str]:
    """Yield the lines of standard input, until its end."""
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        if console.is_terminal and sys.stdin.isatty():
            console.file.write("> ")
            console.file.flush()
        line = sys.stdin.readline()
        if not line:
            return
        yield line.removesuffix("\n")


def _train(config: PretrainConfig, console: Console, began_s: float) -> int:
    print_line(console, "loading JAX and Ray")  # their imports take seconds
    result = _imported("train.train")(config, console=console, began_s=began_s)
    if result.error is not None:
        details, sentence = f"{result.error.details}\n" if result.error.details else "", str(result.error).rstrip(".")
        print_error(f"{details}error: {sentence}: the same command continues from the newest checkpoint")
        return _FAILED
    if console.quiet:
        losses = [f"{name} {loss(result.metrics[key])}" for name, key in _LOSSES if key in result.metrics]
        print_line(standard_output(), "  ".join([f"{result.folder}", f"step {result.metrics['step']:.0f}", *losses]))
    return 0


def _imported(name: str) -> Callable[..., Any]:
    """Return a function of `pretrain._commands`, such as `train.train`. From then on, Ctrl-C raises an exception."""
    module, _, function = name.partition(".")
    found = getattr(importlib.import_module(f"pretrain._commands.{module}"), function)
    raise_interrupts()
    return found
