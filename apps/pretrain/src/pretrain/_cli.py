"""The command line. Light to import: each command imports what takes seconds."""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from pretrain._config import PresetName, PretrainConfig
from pretrain._output import Output, discard_unwritten, open_streams, print_error
from pretrain._presets import PRESETS
from pretrain._rejection import rejection

_FAILED, _BAD_INPUT, _INTERRUPTED, _NO_READER = 1, 2, 130, 141

_DESCRIPTION = """Pretrain GPT-2. Without arguments: the quickstart, minutes on any machine.

The same command again continues an interrupted run. A preset fills in every option. Each option can be changed by its
name: --preset baby --data book.txt --train.max-steps 500. `sample --help` shows the options of the command `sample`."""


RunName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
_LINE_BREAK = tyro.conf.arg(help_behavior_hint="(default: a line break)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCommand:
    """Continue a prompt with a trained model."""

    run: RunName
    """The run's folder or URI, or its name in ./runs."""

    prompt: Annotated[str, _LINE_BREAK] = "\n"
    """The beginning of the text."""

    max_new_tokens: int = 400
    """Number of tokens to add."""

    temperature: float = 0.8
    """Randomness of the draw; 0 takes the most likely token each time."""

    top_k: int | None = 40
    """Draw from the top_k most likely tokens, at least 1; None draws from all tokens."""

    top_p: float | None = None
    """Draw from the most likely tokens whose probabilities sum to top_p; None draws from all tokens."""

    seed: int = 0
    """Seed of the draw. The same seed gives the same text."""

    num_samples: int = 1
    """Number of texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalCommand:
    """Evaluate a trained model on all of its validation tokens, and print the loss as JSON."""

    run: RunName
    """The run's folder or URI, or its name in ./runs."""

    data: str | None = None
    """Token files to evaluate on; None takes those of the run."""

    batch_size: int = 32
    """Windows per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCommand:
    """Write a trained model in Hugging Face's format, for transformers, vLLM and others."""

    run: RunName
    """The run's folder or URI, or its name in ./runs."""

    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """A folder for config.json and model.safetensors, new or empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Preset:
    preset: PresetName = "quickstart"


Command = PretrainConfig | SampleCommand | EvalCommand | ExportCommand


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    options: Annotated[
        Annotated[PretrainConfig, tyro.conf.subcommand("train")]
        | Annotated[SampleCommand, tyro.conf.subcommand("sample")]
        | Annotated[EvalCommand, tyro.conf.subcommand("eval")]
        | Annotated[ExportCommand, tyro.conf.subcommand("export")],
        tyro.conf.arg(name=""),
    ]
    """The command, with its options. Its name is part of tyro's errors."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the application with these arguments, or with those of the process.

    Returns:
        The exit code: 0 for success, 1 for failed training, 2 for bad input, 130 after an interrupt, 141 if the reader
        of the output has closed it.
    """
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # the command prints the errors of `datasets` itself
    logging.getLogger("absl").setLevel(logging.ERROR)
    open_streams()
    hint = ""
    try:
        command = parse_command(sys.argv[1:] if args is None else args)
        hint = ": run the same command again to continue" if isinstance(command, PretrainConfig) else ""
        code = _run(command)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print_error(f"interrupted{hint}")
        return _INTERRUPTED
    except BrokenPipeError:
        return _NO_READER
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
        SystemExit: the arguments ask for help, or are wrong.
    """
    try:  # the preset is the source of all other defaults
        chosen, _ = tyro.cli(_Preset, args=arguments, return_unknown_args=True, add_help=False, console_outputs=False)
    except SystemExit:  # the next parser prints the error
        chosen = _Preset()
    preset = PRESETS[chosen.preset]()
    if _has_length(arguments):  # a length that is given replaces the epochs of the preset
        preset = dataclasses.replace(preset, train=dataclasses.replace(preset.train, max_epochs=None, max_tokens=None))
    return tyro.cli(
        _Line,
        prog="pretrain",
        description=_DESCRIPTION,
        args=arguments,
        default=_Line(options=preset),
        config=(tyro.conf.CascadeSubcommandArgs,),
    ).options


def _has_length(arguments: Sequence[str]) -> bool:
    names = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    return not names.isdisjoint({"__train.max_steps", "__train.max_epochs", "__train.max_tokens"})


def _run(command: Command) -> int:
    match command:
        case PretrainConfig():
            return _train(command)
        case SampleCommand():
            return _sample(command)
        case EvalCommand():
            return _evaluate(command)
        case ExportCommand():
            return _export(command)


def _train(config: PretrainConfig) -> int:
    from pretrain._commands.train import train

    error = train(config, console=Output()).error
    if error is not None:
        print_error(f"{error.details}\nerror: {error}: the same command continues from the newest checkpoint")
        return _FAILED
    return 0


def _sample(command: SampleCommand) -> int:
    from pretrain._commands.sample import sample

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
    return 0


def _evaluate(command: EvalCommand) -> int:
    from pretrain._commands.evaluate import evaluate

    found = evaluate(command.run, data=command.data, batch_size=command.batch_size, console=Console(stderr=True))
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
    return 0


def _export(command: ExportCommand) -> int:
    from pretrain._commands.export import export

    step = export(command.run, command.out)
    Output(soft_wrap=True, highlight=False).print(f"wrote the model of step {step} to {command.out}", markup=False)
    return 0
