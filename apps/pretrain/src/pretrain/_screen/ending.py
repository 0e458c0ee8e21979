"""The end of a run: its numbers, where the time went, samples, and the next commands."""

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pretrain._formats import duration, loss
from pretrain._run.find import DEFAULT_STORAGE
from pretrain._run.folder import RunFolder
from pretrain._run.history import RunHistory, Sample
from pretrain._run.metrics import of_sources
from pretrain._run.result import RunResult
from pretrain._screen.printing import print_facts, print_line
from pretrain._surroundings.typed_command import application
from ray_jax_launch import LaunchError, StoragePath, latest_step

_SMALLEST_SHARE = 0.01
_DIGITS = 16
_ITEMS = (("params", "params"), ("opt_state", "optimizer"))


def show_result(history: RunHistory, result: RunResult, console: Console, *, sample: str = "") -> None:
    """Print the numbers of a finished run, samples, and the next commands.

    Args:
        history: the run's history.
        result: the run's result.
        console: the output.
        sample: a text of the model, for a run without samples at its validations.
    """
    total_s = sum(result.seconds.values())
    num_starts = 1 + (result.restarts or 0)
    starts = f" of work over {num_starts} starts" if num_starts > 1 else ""
    print_line(console, f"done in {duration(total_s)}{starts}" if total_s else "done")
    print_facts(console, _numbers(history, result))
    if lines := sample_lines(history.samples, console.width if console.is_terminal else None):
        prompt = visible(next(found.prompt for found in history.samples))
        print_line(console, f'\nsamples of the prompt "{prompt}"')
        for line in lines:
            print_line(console, line)
    elif sample:
        console.rule("sample")
        print_line(console, sample)
        console.rule()
    print_line(console, f"\nrun folder: {history.folder}")
    name = as_typed(history.folder)
    for command in (f"sample {name}", f"eval {name}", f"report {name}", f"export {name} OUT"):
        print_line(console, f"  {application()} {command}")


def show_finished(history: RunHistory, result: RunResult, console: Console) -> None:
    """Print that a run is finished already, and its numbers."""
    print_line(console, f"the run in {history.folder} is finished; choose another --name for a new one")
    print_facts(console, _numbers(history, result))


def show_stopped(checkpoints: StoragePath, console: Console) -> None:
    """Print the step from which an interrupted run continues.

    Args:
        checkpoints: the folder or URI of the run's checkpoints.
        console: the output.
    """
    with contextlib.suppress(OSError, LaunchError):  # the storage or the output has gone; Ctrl-C ends the command
        step = latest_step(checkpoints)
        print_line(console, "stopped before the first checkpoint" if step is None else f"stopped, saved at step {step}")


def sample_lines(samples: Sequence[Sample], width: int | None) -> list[str]:
    """Return the first, the middle and the last sample of the first prompt, a line each.

    Args:
        samples: samples, in the order of steps.
        width: columns of a line; None for 80.
    """
    chosen = [sample for sample in samples if sample.prompt == samples[0].prompt]
    chosen = [chosen[index] for index in sorted({0, (len(chosen) - 1) // 2, len(chosen) - 1})] if chosen else []
    steps = [f"{sample.step:,}" for sample in chosen]
    width_of_step = max(map(len, steps), default=0)
    lines = []
    for step, sample in zip(steps, chosen, strict=True):
        line = Text(f"step {step:>{width_of_step}}  {visible(sample.text)}")
        line.truncate((width or 80) - 1)
        lines.append(line.plain.rstrip())
    return lines


def _numbers(history: RunHistory, result: RunResult) -> list[tuple[str, str]]:
    """Return the facts of a finished run. A fact that the run's files do not have is left out."""
    part = _part(history, result)
    facts = []
    if result.steps is not None:
        length = []
        if result.tokens is not None:
            length.append(f"{result.tokens:,} tokens")
        if result.epochs is not None:
            length.append(f"{result.epochs:,.2f} epochs")
        facts.append(("steps", f"{result.steps:,}" + (f": {', '.join(length)}" if length else "")))
    if result.restarts:
        facts.append(("restarts", str(result.restarts)))
    if num_skipped := int(result.metrics.get("num_skipped", 0)):
        facts.append(("skipped", f"{num_skipped:,} steps, whose loss or gradient was not finite"))
    if "loss" in result.metrics:
        facts.append(("loss", loss(result.metrics["loss"])))
    if result.full_val_loss is not None:
        facts.append(("val loss", f"{loss(result.full_val_loss)} on all validation tokens, as `eval` prints"))
    if result.best_val_loss is not None and result.last_val_loss is not None:
        last = f"{loss(result.last_val_loss)} at step {result.last_val_step:,}"
        best = f"{loss(result.best_val_loss)} at step {result.best_val_step:,}"
        label = "" if result.full_val_loss is not None else "val loss"
        values = f"{last}, the best" if result.last_val_step == result.best_val_step else f"{last}, best {best}"
        facts.append((label, f"{values}, on {part}"))
    if losses := of_sources(result.metrics):
        facts.append(("by source", ", ".join(f"{name} {loss(value)}" for name, value in losses.items())))
    if result.full_val_bits_per_byte is not None:
        facts.append(("bits per byte", f"{result.full_val_bits_per_byte:.4f} on all validation tokens"))
    if result.tokens_per_s is not None:
        facts.append(("speed", f"{result.tokens_per_s:,.0f} tokens/s while training"))
    if "params" in result.digests:
        roots = "  ".join(
            f"{label} {result.digests[name][:_DIGITS]}" for name, label in _ITEMS if name in result.digests
        )
        facts.append(("digest", roots))
    if shares := _shares(result.seconds):
        facts.append(("time", shares))
    return facts


def _part(history: RunHistory, result: RunResult) -> str:
    """Return the validation tokens of a validation during the run, as text."""
    config = history.description.config
    eval_tokens, seq_len = config.train.eval_tokens, config.model.seq_len
    # A part that has all tokens has the loss on all of them.
    if eval_tokens is None or (result.full_val_loss is not None and result.full_val_loss == result.last_val_loss):
        return "all validation tokens"
    return f"{max(1, eval_tokens // seq_len) * seq_len:,} validation tokens"


def _shares(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    shares = sorted(((part / total, name) for name, part in seconds.items() if part), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= _SMALLEST_SHARE)


def visible(text: str) -> str:
    """Return the text on one line, with its line breaks and tabs made visible."""
    text = text.replace("\n", "⏎").replace("\t", "→")
    return "".join(character if character.isprintable() else "·" for character in text)


def as_typed(folder: RunFolder) -> str:
    """Return the run as an argument of a command: a name in the default storage, a relative path, or a URI."""
    if folder.uri is not None:
        return shlex.quote(folder.uri)
    here = Path.cwd()
    if folder.path.parent == here / DEFAULT_STORAGE:
        return shlex.quote(folder.path.name)
    if folder.path.parent == here:  # a name alone is that of a run in the default storage
        return shlex.quote(f"./{folder.path.name}")
    return shlex.quote(str(folder.path.relative_to(here) if folder.path.is_relative_to(here) else folder.path))
