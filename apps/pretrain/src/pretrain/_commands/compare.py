"""The command `compare`: are the runs B better than the runs A?"""

import json
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console

from pretrain._commands.report import matching_runs
from pretrain._compare.comparison import ComparedRun, Comparison, Pair, compare_runs
from pretrain._compare.paired import Interval, t_quantile
from pretrain._errors import UsageError, one_line, rejecting, short
from pretrain._formats import count, loss
from pretrain._run.find import find_run, names_a_checkpoint
from pretrain._run.lock import command_runs
from pretrain._run.names import typed_value
from pretrain._run.result import read_result
from pretrain._run.step_losses import read_step_losses, read_val_losses
from pretrain._screen.printing import print_line

_WIDTH = 80
_FEW_SEEDS = 4  # a seed more makes the quantile of Student's t smaller by a tenth or more


def compare(
    runs: Sequence[str], *, against: Sequence[str] | None = None, at: int | None = None, as_json: bool, console: Console
) -> Comparison:
    """Compare runs, and print the comparison.

    Args:
        runs: two runs, A and B; with `against`, the runs A. A pattern such as `lr-*` stands for the runs it matches.
        against: the runs B, of the same seeds as the runs A; or patterns.
        at: the last step to compare; None takes the last one that all runs have.
        as_json: print one line of JSON.
        console: the output.

    Raises:
        UsageError: a run does not exist or is damaged, the runs did not read the same windows, do not form pairs, or
            have too few losses.
    """
    first = [name for pattern in runs for name in matching_runs(pattern)]
    second = [name for pattern in against or () for name in matching_runs(pattern, option="--against")]
    if against is None and len(first) != 2:
        given = f"{len(first)} run{'' if len(first) == 1 else 's'}"
        raise UsageError(f"RUN must be two runs, got {given}. Write: compare A B, or compare A1 A2 --against B1 B2")
    if against is None:
        first, second = first[:1], first[1:]
    if not first or len(first) != len(second):
        raise UsageError(
            f"RUN must be as many runs as --against has, got {len(first)} and {len(second)} runs. Each seed has "
            "an A and a B."
        )
    if named := next((name for name in (*first, *second) if names_a_checkpoint(name)), None):
        run, _, step = named.rpartition("@")
        remedy = f"Write {short(run)}, and --at {step}." if step.isdecimal() else f"Write {short(run)}."
        raise UsageError(f"RUN must be a run without a checkpoint, got {short(named)}. {remedy}")
    found = compare_runs([_read(name) for name in first], [_read(name) for name in second], at)
    if as_json:
        console.file.write(_json_line(found))
        return found
    for label, names in (("A", found.first), ("B", found.second)):
        print_line(console, f"{label}: {one_line(', '.join(names))}")  # in one line, to be copied
    for paragraph in _paragraphs(found):
        for line in textwrap.wrap(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False):
            print_line(console, line)
    return found


def _read(name: str) -> ComparedRun:
    with rejecting():
        folder, description = find_run(name)
        return ComparedRun(
            name=str(folder),
            description=description,
            losses=read_step_losses(folder.step_losses),
            # Those of a run that is extended are of its former last step, until it is finished again.
            val_losses=None
            if read_result(folder) is None
            else read_val_losses(folder.val_losses, description.config.model.seq_len),
            is_training=command_runs(folder),
        )


def _val_steps(found: Comparison, side: int) -> list[int]:
    """Return the steps of the validation losses of A or B, each once."""
    return sorted({step for pair in found.pairs if (step := pair.val_steps[side]) is not None})


def _json_line(found: Comparison) -> str:
    return json.dumps(found.to_json(), allow_nan=False) + "\n"


def _paragraphs(found: Comparison) -> Iterator[str]:
    for name, (of_a, of_b) in found.differing_options.items():
        yield f"{name}: {typed_value(of_a)} in A, {typed_value(of_b)} in B"
    yield from _single(found, found.pairs[0]) if found.seeds is None else _several(found, found.seeds)
    of_a, of_b = (_val_steps(found, side) for side in (0, 1))
    if of_a and of_b and len({*of_a, *of_b}) > 1:
        yield (
            "The losses on the validation text are not compared, as they are of different steps: "
            f"{' and '.join(map(str, of_a))} in A, and {' and '.join(map(str, of_b))} in B."
        )


def _single(found: Comparison, pair: Pair) -> Iterator[str]:
    """Yield the sentences about one pair."""
    if pair.same_losses:
        yield f"The losses of all steps up to {found.step} are equal."
        return
    is_paired = pair.seeds[0] == pair.seeds[1]
    windows = "on the same windows" if is_paired else "on different windows (the seeds differ)"
    known = list(_known(pair, windows))
    if known and not pair.options.is_different:
        yield f"{' '.join(known)} One pair of runs cannot say whether the options are the cause."
        yield (
            "Runs of the same options differ too, by the noise of the training. As far as this pair shows that noise, "
            f"B - A is {_difference(pair.options)}. Train A and B with more seeds, and compare them: compare A1 A2 A3 "
            "--against B1 B2 B3."
        )
        yield f"The {_training_losses(found, pair)}, {windows}."
    else:
        yield f"{_verdict(pair.options)} at step {found.step}."
        yield (
            f"The {_training_losses(found, pair)}, {windows}. The interval allows for the noise of the training as far "
            "as one pair of runs shows it. Other seeds may differ by more: compare several with --against."
        )
    if pair.unpaired_steps is not None and pair.unpaired_steps > found.step - found.from_step + 1:
        yield (
            f"The noise of the batches alone is {_width(pair.batches)}. If A and B had read different windows, their "
            f"mean losses over about {count(pair.unpaired_steps, exact_below=1e5)} steps would have the same noise."
        )
    if pair.val_losses is not None and pair.models is not None:
        model = _verdict(pair.models, "the model of A", "the model of B")
        yield (
            f"The losses on the validation text after the last step are {loss(pair.val_losses[0])} and "
            f"{loss(pair.val_losses[1])}: {model}. The interval allows for another text of this kind, not for another "
            "seed."
        )


def _known(pair: Pair, windows: str) -> Iterator[str]:
    """Yield the sentences that are certain about these two runs, whatever the cause."""
    places = ((pair.batches, f"in training, {windows}"), (pair.models, "on the validation text"))
    for interval, place in places:
        if interval is not None and interval.is_different:
            yield f"{_verdict(interval, 'The model of A', 'The model of B')} {place}."


def _training_losses(found: Comparison, pair: Pair) -> str:
    steps = f"the steps {found.from_step} to {found.step}"
    return f"training losses of {steps} are {loss(pair.losses[0])} and {loss(pair.losses[1])}"


def _several(found: Comparison, over_seeds: Interval) -> Iterator[str]:
    """Yield the sentences about pairs of several seeds."""
    yield f"{_verdict(over_seeds)} at step {found.step}, over {len(found.pairs)} seeds."
    yield (
        f"This is the training loss of the steps {found.from_step} to {found.step}. The interval allows for other "
        f"seeds: Student's t with {over_seeds.df} degree{'s' if over_seeds.df > 1 else ''} of freedom."
    )
    num_seeds = len(found.pairs)
    if not over_seeds.is_different and num_seeds <= _FEW_SEEDS:
        yield (
            f"With {num_seeds} seeds the interval is +- {t_quantile(over_seeds.df):.1f} standard errors, with "
            f"{num_seeds + 1} seeds +- {t_quantile(over_seeds.df + 1):.1f}. Train another seed of A and B, and compare "
            "again."
        )
    if found.val_seeds is not None:
        yield f"On the validation text after the last step, {_verdict(found.val_seeds, 'A', 'B')}."
    yield "The pairs, with the intervals of the single pairs, which do not allow for other seeds:"
    for pair in found.pairs:
        validation = "" if pair.models is None else f", validation {_nats(pair.models.mean, sign='+')}"
        yield f"seed {pair.seeds[0]}: B - A is {_nats(pair.options.mean, sign='+')} {_width(pair.options)}{validation}"


def _verdict(interval: Interval, first: str = "A", second: str = "B") -> str:
    """Return which one is better, and by how much."""
    if interval.is_different:
        better = first if interval.mean > 0 else second
        return f"{better} is better by {_nats(abs(interval.mean))} {_width(interval)} nats (95 %)"
    return f"{first} and {second} cannot be told apart: B - A is {_difference(interval)}"


def _difference(interval: Interval) -> str:
    return f"{_nats(interval.mean, sign='+')} {_width(interval)} nats (95 %)"


def _width(interval: Interval) -> str:
    return f"+- {_nats(interval.half_width)}"


def _nats(value: float, *, sign: str = "") -> str:
    """Return a difference with 4 decimals, or 2 digits if it is small.

    >>> _nats(0.01234), _nats(-0.000012), _nats(0.5, sign="+")
    ('0.0123', '-1.2e-05', '+0.5000')
    """
    return f"{value:{sign}.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:{sign}.1e}"
