"""The command line. Light to import: what takes seconds is imported by the command that needs it."""

import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence

import tyro
from rich.console import Console

from pretrain._config import PretrainConfig
from pretrain._output import Output, discard_unwritten, open_streams, say
from pretrain._presets import PRESETS
from pretrain._rejection import rejection

_FAILED, _BAD_INPUT, _INTERRUPTED, _NO_READER = 1, 2, 130, 141

_TRAIN_DESCRIPTION = """Pretrain GPT-2. With no argument: the quickstart, minutes on any machine.

Commands: train (this one, the default), sample RUN, eval RUN, export RUN OUT; each has a --help of its own.

The same command again continues a run that was interrupted. A preset fills in every option, and each can be
changed by its name: --preset baby --data book.txt --train.max-steps 500."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the application with these arguments, or those of the process.

    Returns:
        The exit code: 0, 1 where training failed, 2 for bad input, 130 after an interrupt, 141 where the output's
        reader went away.
    """
    arguments = [*(sys.argv[1:] if args is None else args)]
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # what fails there is said here, in a sentence
    logging.getLogger("absl").setLevel(logging.ERROR)
    open_streams()
    command = _train
    if arguments and arguments[0] in _COMMANDS:
        command = _COMMANDS[arguments.pop(0)]
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say("interrupted: the same command continues from the newest checkpoint")
        return _INTERRUPTED
    except BrokenPipeError:
        return _NO_READER  # whoever read the output, such as `head`, has seen enough
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sentence = rejection(error)
        if sentence is None:
            raise
        say(f"error: {sentence}")
        return _BAD_INPUT
    finally:
        discard_unwritten(sys.stdout)
        discard_unwritten(sys.stderr)


def read_config(arguments: list[str]) -> PretrainConfig:
    """The configuration that these options of `train` name. Exits where they are none, as command lines do."""
    return tyro.cli(
        PretrainConfig,
        prog="pretrain",
        description=_TRAIN_DESCRIPTION,
        args=arguments,
        default=PRESETS[_named_preset(arguments)](),
    )


def _train(arguments: list[str]) -> int:
    config = read_config(arguments)
    vocab_size_given = any(argument.replace("_", "-").startswith("--model.vocab-size") for argument in arguments)
    from pretrain._commands.train import train
    from ray_jax_launch import TrainingFailed

    try:
        train(config, Output(), vocab_size_given=vocab_size_given)
    except TrainingFailed as error:
        say(f"{error.details}\nerror: {error}: the same command continues from the newest checkpoint")
        return _FAILED
    return 0


def _named_preset(arguments: list[str]) -> str:
    """The preset, which has to be known before the options that it fills in can be read."""
    for option, value in itertools.pairwise([*arguments, ""]):
        name = value if option == "--preset" else option.removeprefix("--preset=")
        if name in PRESETS and option.startswith("--preset"):
            return name
    return "quickstart"  # tyro will say what is wrong with any other value


def _sample(arguments: list[str]) -> int:
    return tyro.cli(_sample_command, prog="pretrain sample", args=arguments)


def _sample_command(
    run: tyro.conf.Positional[str],
    *,
    prompt: str = "\n",
    max_new_tokens: int = 400,
    temperature: float = 0.8,
    top_k: int | None = 40,
    top_p: float | None = None,
    seed: int = 0,
    num_samples: int = 1,
) -> int:
    """Let a trained model write.

    Args:
        run: The run's folder or URI, or its name in ./runs.
        prompt: What the text begins with.
        max_new_tokens: How many tokens to add.
        temperature: Higher is bolder; 0 takes the likeliest token each time.
        top_k: Draw among so many of the likeliest tokens, at least 1; None draws among all.
        top_p: Draw among the likeliest tokens that have this probability together; None draws among all.
        seed: The same seed gives the same text.
        num_samples: How many texts to write.
    """
    from pretrain._commands.sample import sample

    texts = sample(
        run,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        num_samples=num_samples,
    )
    console = Output(soft_wrap=True, highlight=False)
    for number, text in enumerate(texts):
        if number:
            console.rule()
        console.print(text, markup=False)
    return 0


def _eval(arguments: list[str]) -> int:
    return tyro.cli(_eval_command, prog="pretrain eval", args=arguments)


def _eval_command(
    run: tyro.conf.Positional[str],
    *,
    data: str | None = None,
    batch_size: int = 32,
) -> int:
    """Evaluate a trained model over all of its validation tokens and print the loss as JSON.

    Args:
        run: The run's folder or URI, or its name in ./runs.
        data: Token files to evaluate on instead of the run's own.
        batch_size: Windows per step.
    """
    from pretrain._commands.evaluate import evaluate

    found = evaluate(run, data=data, batch_size=batch_size, console=Console(stderr=True))
    found_json = json.dumps({"step": found.step, "val_loss": found.val_loss, "num_tokens": found.num_tokens})
    sys.stdout.write(found_json + "\n")
    return 0


def _export(arguments: list[str]) -> int:
    return tyro.cli(_export_command, prog="pretrain export", args=arguments)


def _export_command(run: tyro.conf.Positional[str], out: tyro.conf.Positional[str]) -> int:
    """Write a trained model in Hugging Face's layout, for transformers, vLLM and others.

    Args:
        run: The run's folder or URI, or its name in ./runs.
        out: A folder for config.json and model.safetensors, new or empty.
    """
    from pretrain._commands.export import export

    step = export(run, out)
    Output(soft_wrap=True, highlight=False).print(f"wrote the model of step {step} to {out}", markup=False)
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train, "sample": _sample, "eval": _eval, "export": _export,
}  # fmt: skip
