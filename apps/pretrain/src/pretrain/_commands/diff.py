"""The command `diff`: are two runs, or two checkpoints, the same to the bit?"""

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from pretrain._audit.recorded_run import read_checkpoint, read_run
from pretrain._audit.run_difference import (
    CheckpointDifference,
    FirstDifference,
    Kind,
    RunDifference,
    compare_checkpoints,
    compare_runs,
)
from pretrain._errors import UsageError, one_line, rejecting, short
from pretrain._run.find import find_checkpoint, names_a_checkpoint
from pretrain._run.folder import RunFolder
from pretrain._run.names import typed_value
from pretrain._screen.printing import print_line
from pretrain._surroundings.environment import start_jax

_WIDTH = 80
_MOST_ARRAYS, _MOST_CHECKPOINTS = 12, 8
_WHAT: dict[Kind, str] = {
    "windows": "the positions of the windows",
    "loss": "the losses",
    "arrays": "the arrays of the checkpoints",
}


def diff(a: str, b: str, *, elements: bool, as_json: bool, console: Console) -> bool:
    """Say whether two runs or two checkpoints are the same, and where they differ first. Print the answer.

    Args:
        a: a run, or a checkpoint as RUN@STEP or RUN@best.
        b: another one; a checkpoint if `a` is one.
        elements: read the arrays that differ, and count their elements.
        as_json: print one line of JSON.
        console: the output.

    Returns:
        True if nothing differs of what both have recorded.

    Raises:
        UsageError: there is no such run or checkpoint, it has no digests, only one of them is a checkpoint, or the runs
            have recorded no step in common.
    """
    named = [names_a_checkpoint(name) for name in (a, b)]
    if named[0] != named[1]:
        raise UsageError(
            f"A and B must be two runs or two checkpoints, got {short(a)} and {short(b)}. Write RUN@STEP for both, or "
            "RUN for both."
        )
    lines = _checkpoints(a, b, elements) if named[0] else _runs(a, b, elements)
    if as_json:
        console.file.write(json.dumps(lines.facts, allow_nan=False) + "\n")
        return lines.same
    for line in lines.texts:
        print_line(console, line)
    return lines.same


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    same: bool
    facts: dict[str, Any]
    """The object of `--json`."""
    texts: list[str]
    """The lines of the output."""


def _checkpoints(a: str, b: str, elements: bool) -> _Answer:
    with rejecting():
        chosen = [find_checkpoint(name) for name in (a, b)]
    recorded = [read_checkpoint(one.folder, one.step) for one in chosen]
    found = compare_checkpoints(*recorded)
    if elements:
        found = _with_elements(found, [one.folder for one in chosen])
    places = [f"{one.folder}@{one.step}" for one in chosen]
    facts = {"same": found.same, "a": places[0], "b": places[1], "checkpoint": dataclasses.asdict(found)}
    texts = _heads(*places)
    if found.same:
        texts += _wrapped(f"The checkpoints are the same: all {found.num_arrays} arrays are equal to the bit.")
        texts += [f"{item} {root}" for item, root in recorded[0].roots.items()]
    else:
        texts += _wrapped(f"The checkpoints differ in {_of(len(found.names), found.num_arrays, 'array')}:")
        texts += _arrays(found)
    return _Answer(same=found.same, facts=facts, texts=texts)


def _runs(a: str, b: str, elements: bool) -> _Answer:
    runs = [read_run(name) for name in (a, b)]
    found = compare_runs(*runs)
    if not (found.num_losses or found.num_windows or found.same_checkpoints or found.checkpoint):
        raise UsageError(
            f"A and B must have recorded steps in common, got steps up to {found.last_steps[0]} and "
            f"{found.last_steps[1]}. Train them further."
        )
    if elements and found.checkpoint is not None:
        with_elements = _with_elements(found.checkpoint, [run.folder for run in runs])
        found = dataclasses.replace(found, checkpoint=with_elements)
    facts = {
        "same": not found.first,
        "a": str(runs[0].folder),
        "b": str(runs[1].folder),
        "first": None if found.earliest is None else dataclasses.asdict(found.earliest),
        **{f"first_{kind}": dataclasses.asdict(of_kind) for kind, of_kind in found.first.items()},
        "through": found.through,
        "num_losses": found.num_losses,
        "num_windows": found.num_windows,
        "same_checkpoints": found.same_checkpoints,
        "last_steps": found.last_steps,
        "settings": found.settings,
        "checkpoint": None if found.checkpoint is None else dataclasses.asdict(found.checkpoint),
    }
    texts = _heads(*(str(run.folder) for run in runs))
    for name, (of_a, of_b) in found.settings.items():
        texts += _wrapped(f"{name}: {typed_value(of_a)} in A, {typed_value(of_b)} in B")
    for paragraph in _paragraphs(found):
        texts += _wrapped(paragraph)
    if found.checkpoint is not None:
        texts += _arrays(found.checkpoint)
    return _Answer(same=not found.first, facts=facts, texts=texts)


def _with_elements(found: CheckpointDifference, folders: Sequence[RunFolder]) -> CheckpointDifference:
    """Read the arrays that differ, and compare their elements."""
    from pretrain._audit.checkpoint_arrays import differing_elements, read_arrays  # imports jax

    if not found.differing:
        return found
    start_jax()
    a, b = (
        read_arrays(folder, read_checkpoint(folder, step), found.differing)
        for folder, step in zip(folders, found.steps, strict=True)
    )
    elements = {
        name: differing_elements(a[name], b[name])
        for name in found.differing
        if (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype)
    }
    return dataclasses.replace(found, elements=elements)


def _heads(a: str, b: str) -> list[str]:
    return [f"A: {one_line(a)}", f"B: {one_line(b)}"]  # each in one line, to be copied


def _paragraphs(found: RunDifference) -> Iterator[str]:
    earliest = found.earliest
    compared = (
        f"{_count(found.num_losses, 'loss', 'losses')}, the positions of the windows of "
        f"{_count(found.num_windows, 'record', 'records')}"
    )
    if earliest is None:
        ends = _ends(found)
        yield f"The runs are the same through step {found.through:,}{ends}."
        yield f"Equal to the bit: {compared}, and {_checkpoint_steps(found.same_checkpoints)}."
        return
    yield _sentence(earliest, found)
    for kind, what in _WHAT.items():
        later = found.first.get(kind)
        if later is None and kind != "arrays":
            of_loss, of_windows = (found.num_losses, "step", "steps"), (found.num_windows, "record", "records")
            yield f"{what} of {_count(*(of_loss if kind == 'loss' else of_windows))} are equal.".capitalize()
        elif later is not None and later is not earliest:
            yield f"{what} first differ at step {later.step:,}.".capitalize()
    if found.same_checkpoints:
        yield f"Equal to the bit: {_checkpoint_steps(found.same_checkpoints)}."
    if found.checkpoint is not None:
        number = _of(len(found.checkpoint.names), found.checkpoint.num_arrays, "array")
        yield f"The checkpoints of step {found.checkpoint.steps[0]:,} differ in {number}:"
    elif not found.same_checkpoints:
        yield "The runs have no checkpoint of the same step any more."


def _sentence(first: FirstDifference, found: RunDifference) -> str:
    """Return the sentence about the first difference."""
    if first.kind == "arrays":
        return f"The runs first differ at step {first.step:,}: the arrays of its checkpoints differ."
    if first.kind == "loss":
        of_a, of_b = (np.format_float_positional(np.float32(value)) for value in (first.of_a, first.of_b))
        return f"The runs first differ at step {first.step:,}: its loss is {of_a} in A and {of_b} in B."
    return (
        f"The runs first differ at step {first.step:,}: it reads other windows ({first.of_a} in A, {first.of_b} in B). "
        "The windows are known at each record."
    )


def _ends(found: RunDifference) -> str:
    """Return which run ends there, if the other one goes on."""
    last_a, last_b = found.last_steps
    if last_a == last_b:
        return ""
    return f", where {'A' if last_a < last_b else 'B'} ends; {'B' if last_a < last_b else 'A'} goes on to step " + (
        f"{max(last_a, last_b):,}"
    )


def _checkpoint_steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint, as none is left of the same step"
    shown_steps = ", ".join(f"{step:,}" for step in steps[-_MOST_CHECKPOINTS:])
    more = "..., " if len(steps) > _MOST_CHECKPOINTS else ""
    return f"the checkpoint{'s' if len(steps) > 1 else ''} of step{'s' if len(steps) > 1 else ''} {more}{shown_steps}"


def _arrays(found: CheckpointDifference) -> list[str]:
    """Return a line for each of the first arrays that differ."""
    lines = []
    for name in found.names[:_MOST_ARRAYS]:
        note = " (only in A)" if name in found.only_in_a else " (only in B)" if name in found.only_in_b else ""
        if (of := found.elements.get(name)) is not None:
            largest = "" if of.largest is None else f", by {of.largest:.3g} at most"
            note = f" {_of(of.num_elements, of.size, 'element')}{largest}"
        lines.append(f"  {name}{note}")
    if len(found.names) > _MOST_ARRAYS:
        lines.append(f"  and {len(found.names) - _MOST_ARRAYS:,} more")
    return lines


def _of(number: int, total: int, what: str) -> str:
    return f"{number:,} of {total:,} {what}{'' if total == 1 else 's'}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(one_line(paragraph), _WIDTH, break_long_words=False, break_on_hyphens=False)
