"""The commands and their exit codes. Light to import: each command imports what takes seconds."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console

from pretrain._command_line.arguments import build_command, split_command
from pretrain._command_line.command_classes import (
    Command,
    EvalCommand,
    ExportCommand,
    ProfileCommand,
    ReportCommand,
    RunsCommand,
    SampleCommand,
    ShowConfig,
    WatchCommand,
)
from pretrain._command_line.config_file import build_config, to_toml
from pretrain._command_line.help_page import help_page
from pretrain._config import PretrainConfig
from pretrain._early_interrupt import raise_interrupts
from pretrain._errors import RunFailedError
from pretrain._output import Output, discard_unwritten, open_streams, print_error, show_warnings
from pretrain._presets import PRESETS
from pretrain._rejection import rejection

_FAILED, _BAD_INPUT, _INTERRUPTED, _NO_READER = 1, 2, 130, 141
_HELP = ("-h", "--help", "--help-all", "--help_all")


def main(args: Sequence[str] | None = None) -> int:
    """Run the application with these arguments, or with those of the process.

    Returns:
        The exit code: 0 for success, 1 for failed training, 2 for bad input, 130 after an interrupt, 141 if the reader
        of the output has closed it.
    """
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # the command prints the errors of `datasets` itself
    open_streams()
    show_warnings()
    arguments = list(sys.argv[1:] if args is None else args)
    hint = ""
    try:
        if text := _information(arguments):
            sys.stdout.write(text)
            code = 0
        else:
            command = parse_command(arguments)
            hint = ": run the same command again to continue" if isinstance(command, PretrainConfig) else ""
            code = _run(command)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error(f"interrupted{hint}")
        return _INTERRUPTED
    except BrokenPipeError:
        return _NO_READER
    except RunFailedError as error:
        print_error(f"error: {error}: the same command continues from the newest checkpoint")
        return _FAILED
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sentence = rejection(error)
        if sentence is None:
            raise
        print_error(f"error: {sentence}")
        return _BAD_INPUT
    finally:
        discard_unwritten()


def parse_command(arguments: Sequence[str]) -> Command:
    """Parse the arguments of the command line. The command `train` is the default.

    Raises:
        UsageError: the arguments are wrong.
        OSError: the file of a configuration cannot be read.
    """
    command, rest = split_command(arguments)
    return build_command(command, rest)


def _information(arguments: Sequence[str]) -> str | None:
    """Return the help or the versions, if the arguments ask for them."""
    if "--version" in arguments:
        names = ("pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "ray")
        return "".join(f"{name} {version(name)}\n" for name in names)
    asked = next((argument for argument in arguments if argument in _HELP), None)
    if asked is None:
        return None
    command, rest = split_command([argument for argument in arguments if argument not in _HELP])
    return help_page(
        command,
        build_config({}, {"preset": preset} if (preset := _preset(rest)) else {}),
        width=shutil.get_terminal_size().columns,
        is_overview=arguments[0].startswith("-"),
        shows_all=asked.startswith("--help-") or asked == "--help_all",
    )


def _preset(arguments: Sequence[str]) -> str | None:
    """Return the preset whose defaults the help shows, if the arguments name one."""
    given = " ".join(arguments).replace("--preset=", "--preset ").partition("--preset ")[2].partition(" ")[0]
    return given if given in PRESETS else None


def _run(command: Command) -> int:
    match command:
        case PretrainConfig():
            return _train(command)
        case ShowConfig(config=config):
            sys.stdout.write(to_toml(config))
        case SampleCommand():
            _sample(command)
        case EvalCommand():
            _evaluate(command)
        case ExportCommand():
            _export(command)
        case ReportCommand():
            _report(command)
        case RunsCommand():
            _show_runs(command)
        case WatchCommand():
            _watch(command)
        case ProfileCommand():
            _show_profile(command)
    return 0


def _train(config: PretrainConfig) -> int:
    from pretrain._commands.train import train

    raise_interrupts()
    error = train(config, console=Output()).error
    if error is not None:
        print_error(f"{error.details}\nerror: {error}: the same command continues from the newest checkpoint")
        return _FAILED
    return 0


def _sample(command: SampleCommand) -> None:
    from pretrain._commands.sample import sample

    raise_interrupts()
    texts = sample(
        command.run,
        prompt=command.prompt,
        max_new_tokens=command.max_new_tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
        num_samples=command.num_samples,
    )
    console = Output(soft_wrap=True, highlight=False)
    for number, text in enumerate(texts):
        if number:
            console.rule()
        console.print(text, markup=False)


def _evaluate(command: EvalCommand) -> None:
    from pretrain._commands.evaluate import evaluate

    raise_interrupts()
    found = evaluate(command.run, data=command.data, batch_size=command.batch_size, console=Console(stderr=True))
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")


def _export(command: ExportCommand) -> None:
    from pretrain._commands.export import export

    raise_interrupts()
    step = export(command.run, command.out)
    Output(soft_wrap=True, highlight=False).print(f"wrote the model of step {step} to {command.out}", markup=False)


def _report(command: ReportCommand) -> None:
    from pretrain._commands.report import report

    raise_interrupts()
    report(command.runs, out=command.out, console=Output())


def _show_runs(command: RunsCommand) -> None:
    from pretrain._commands.runs import show_runs

    raise_interrupts()
    show_runs(command.storage_path, console=Output())


def _watch(command: WatchCommand) -> None:
    from pretrain._commands.watch import watch

    raise_interrupts()
    watch(command.run, console=Output())


def _show_profile(command: ProfileCommand) -> None:
    from pretrain._commands.profile import show_profile

    raise_interrupts()
    show_profile(command.run, console=Output(), num_ops=command.num_ops)
