"""The command `replay`: steps of a run, computed again and compared to the bit."""

import contextlib
import dataclasses
import json
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import ray_jax_launch
from pretrain._audit.recorded_run import RecordedRun, read_run
from pretrain._audit.replay_difference import ReplayDifference, compare_replay
from pretrain._audit.replay_worker import replay_worker
from pretrain._audit.run_difference import FirstDifference
from pretrain._audit.segment import Segment, find_segment
from pretrain._config import LENGTHS
from pretrain._errors import UsageError, one_line, rejecting, shown
from pretrain._resolve.devices import check_batch
from pretrain._resolve.resolve import resolving
from pretrain._resolve.resolved_run import ResolvedRun
from pretrain._run.description import RunDescription
from pretrain._run.differences import differing_options
from pretrain._screen.printing import print_line
from pretrain._screen.run_view import Tokenizing
from ray_jax_launch import PermanentError, TrainingFailed, parse_hardware

_WIDTH = 80
_MOST_ARRAYS = 12


def replay(
    run: str,
    *,
    from_step: int | None,
    to_step: int | None,
    step: int | None,
    hardware: str | None,
    as_json: bool,
    console: Console,
) -> bool:
    """Compute steps of a run again, compare them to the bit with what the run has recorded, and print the answer.

    No file of the run is written, and no lock is taken: the run may train.

    Args:
        run: the run's folder, URI or name.
        from_step: compare the steps after it; None for the oldest checkpoint.
        to_step: the last step to compare; None for the newest checkpoint.
        step: compare this step alone.
        hardware: where to compute; None is the hardware of the run.
        as_json: print one line of JSON.
        console: the output.

    Returns:
        True if all that was compared is equal.

    Raises:
        UsageError: there is no such run, or no such step, the run has no state before it, or its data has changed.
        DataError: the data cannot be read.
        LaunchError: the hardware is not there, or the model does not fit it.
        TrainingFailed: a worker has failed.
    """
    if step is not None:
        if from_step is not None or to_step is not None:
            raise UsageError("--step must be given without --from and --to, got both. Leave one out.")
        from_step, to_step = step - 1, step
    recorded = read_run(run)
    if step is not None and recorded.last_step and not 1 <= step <= recorded.last_step:
        raise UsageError(f"--step must be from 1 to {recorded.last_step}, the last step of the run, got {step}.")
    segment = find_segment(recorded, from_step, to_step)
    recorded = dataclasses.replace(recorded, description=_description_at(recorded, segment))
    name = hardware or _hardware(recorded.description)
    notes = Console(stderr=True, emoji=False)
    with _resolved(recorded, name, notes) as resolved, _progress(segment, notes) as advance:
        found = _compute(resolved, segment, advance)
    answer = compare_replay(recorded, segment, found)
    if as_json:
        console.file.write(json.dumps(_facts(recorded, segment, answer, name), allow_nan=False) + "\n")
    else:
        for line in _texts(segment, answer):
            print_line(console, line)
    return answer.first_step is None


def _description_at(run: RecordedRun, segment: Segment) -> RunDescription:
    """Return the description of the run at the end of a segment. A run that continues may change its length.

    Raises:
        UsageError: the length changed within the segment, and the learning rates of the steps before depend on it.
    """
    later = [step for step in run.checkpoint_steps if step >= segment.stop]
    within = [step for step in run.checkpoint_steps if segment.start < step < segment.stop]
    last = run.read_checkpoint(later[0]).description if later else run.description
    for step in within:
        before = run.read_checkpoint(step).description.config
        changed = differing_options([before, last.config])
        configs = (before, last.config)
        if step <= min(of.optimizer.num_steps_before_decay(of.train.max_steps) for of in configs):
            changed = {name: values for name, values in changed.items() if name not in LENGTHS}
        if changed:
            name, (old, new) = next(iter(changed.items()))
            raise UsageError(
                f"{name} must be the same in all steps to replay, got {shown(old)} up to step {step} and then "
                f"{shown(new)}. Replay the parts: --to {step}, and --from {step}."
            )
    return last


def _hardware(description: RunDescription) -> str:
    """Return the hardware of the last start, or that of the first start if the last one took the best hardware."""
    given = description.config.hardware
    return description.hardware if given == "auto" else given


@contextlib.contextmanager
def _resolved(run: RecordedRun, name: str, console: Console) -> Iterator[ResolvedRun]:
    """Open the run's data, which must be the same as then, and connect to its hardware."""
    config = dataclasses.replace(run.description.config, hardware=name)
    hardware = check_batch(config, parse_hardware(name))
    stored = dataclasses.replace(run.description, config=config)
    tokenizing = Tokenizing() if config.data_mode == "stream" else None
    with (
        rejecting(),
        resolving(config, hardware, run.folder, stored, stored.origin, console, report=tokenizing) as resolved,
    ):
        yield resolved


@contextlib.contextmanager
def _progress(segment: Segment, console: Console) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, on a terminal. Yields a function that gets the last step that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("computing steps again", total=segment.stop - segment.start)
        yield lambda step: bar.update(task, completed=step - segment.start)


def _compute(resolved: ResolvedRun, segment: Segment, advance: Callable[[int], None]) -> Any:
    """Compute the steps on the hardware. What Ray Train writes goes to a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="pretrain-replay-") as folder:
        try:
            result = ray_jax_launch.launch(
                replay_worker,
                {"resolved": resolved, "segment": segment},
                hardware=resolved.hardware,
                storage_path=folder,
                name="replay",
                env_vars=resolved.worker_variables,
                on_metrics=lambda rank, metrics: advance(int(metrics["step"])),
                max_failures=0,
            )
        except PermanentError as error:  # of a loop in this process
            raise TrainingFailed(str(error), 0, traceback.format_exc(), "") from error
    return result.return_value


def _facts(run: RecordedRun, segment: Segment, answer: ReplayDifference, hardware: str) -> dict[str, Any]:
    found = answer.run
    return {
        "verified": answer.first_step is None,
        "run": str(run.folder),
        "start": segment.start,
        "from": segment.first,
        "to": segment.stop,
        "last_step": run.last_step,
        "hardware": hardware,
        "first_step": answer.first_step,
        **{f"first_{kind}": dataclasses.asdict(first) for kind, first in found.first.items()},
        "first_record": None if answer.record is None else dataclasses.asdict(answer.record),
        "num_losses": found.num_losses,
        "num_windows": found.num_windows,
        "same_checkpoints": found.same_checkpoints,
        "checkpoint": None if found.checkpoint is None else dataclasses.asdict(found.checkpoint),
        "causes": answer.causes,
    }


def _texts(segment: Segment, answer: ReplayDifference) -> list[str]:
    is_one = segment.stop == segment.first + 1
    steps = f"step {segment.stop:,}" if is_one else f"steps {segment.first + 1:,} to {segment.stop:,}"
    found = answer.run
    compared = [_number(found.num_losses, "loss", "losses")]
    if found.num_windows:
        compared.append(f"the windows of {_number(found.num_windows, 'record', 'records')}")
    if found.same_checkpoints:
        checkpoints = ", ".join(f"{step:,}" for step in found.same_checkpoints)
        compared.append(f"the arrays of the checkpoint{'s' if len(found.same_checkpoints) > 1 else ''} {checkpoints}")
    *others, last = compared
    text = f"{', '.join(others)}, and {last}" if others else last
    if answer.first_step is None:
        lines = _wrapped(f"{steps}: verified, bit for bit")
        lines += _wrapped(f"Computed again from {_start(segment)}. Equal to the bit: {text}.")
    else:
        differs = "differs" if is_one else f"step {answer.first_step:,} is the first one that differs"
        lines = _wrapped(f"{steps}: {differs}")
        lines += _wrapped(f"Computed again from {_start(segment)}.")
        for first in sorted(found.first.values(), key=lambda first: first.step):
            lines += _wrapped(_sentence(first))
            if first.kind == "arrays" and found.checkpoint is not None:
                names = found.checkpoint.names
                lines += [f"  {name}" for name in names[:_MOST_ARRAYS]]
                lines += [f"  and {len(names) - _MOST_ARRAYS:,} more"] if len(names) > _MOST_ARRAYS else []
        if answer.record is not None:
            record = answer.record
            lines += _wrapped(
                f"The record of step {record.step:,} has the {record.name} {record.recorded}; computed again it is "
                f"{record.recomputed}."
            )
    unknown = segment.stop - segment.first - found.num_losses
    if unknown:
        lines += _wrapped(f"The losses of {unknown:,} steps are not recorded.")
    for cause in answer.causes:
        lines += _wrapped(cause)
    return lines


def _number(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _start(segment: Segment) -> str:
    if segment.has_checkpoint:
        return f"the checkpoint of step {segment.start:,}"
    return "the random parameters of step 0"


def _sentence(first: FirstDifference) -> str:
    if first.kind == "windows":
        return f"Step {first.step:,} has recorded the windows {first.of_a}; computed again they are {first.of_b}."
    if first.kind == "loss":
        of_a, of_b = (np.format_float_positional(np.float32(value)) for value in (first.of_a, first.of_b))
        return f"Step {first.step:,} has recorded the loss {of_a}; computed again it is {of_b}."
    return f"The checkpoint of step {first.step:,} has other arrays than those computed again:"


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(one_line(paragraph), _WIDTH, break_long_words=False, break_on_hyphens=False)
