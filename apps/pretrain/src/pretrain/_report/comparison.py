"""The comparison of runs: lines that stand for several seeds, what differs, and the rank by validation loss."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from pretrain._formats import loss, option
from pretrain._report.reported_run import ReportedRun
from pretrain._run.differences import differing_options
from pretrain._run.files import flatten
from pretrain._run.state import is_finished

_RESULTS = ("final, all validation tokens", "best", "last", "steps")
_MOST_IN_LABEL = 3  # options in the label of several seeds
_MOST_SEEDS = 4  # to name in a cell


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line of each chart: a run, or the mean of runs that differ in their seed alone."""

    label: str
    """Name, unlike those of the other lines."""

    runs: tuple[ReportedRun, ...]
    """The run, or two and more runs, in the order of the command line."""

    @property
    def number(self) -> int:
        """Return the number of the line."""
        return self.runs[0].series

    @property
    def color(self) -> str:
        """Return the CSS classes of the color and of the dashes."""
        return self.runs[0].color

    @property
    def is_group(self) -> bool:
        """Return whether the line is a mean."""
        return len(self.runs) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the comparison."""

    label: str
    """Name of the line or of the run."""

    color: str
    """CSS classes of its line."""

    is_single: bool
    """True for one of the runs of the mean above."""

    rank: int | None
    """1 for the lowest loss, equal for equal losses. None for a single run, for a line without a finished run, and if
    the losses cannot be compared."""

    cells: list[str]
    """Values, as many as the columns of the comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A table of runs, the best first."""

    options: dict[str, str]
    """Short names of the options that change the result and differ, by their full names: the first columns."""

    columns: list[str]
    """Headings of the other columns."""

    rows: list[Row]
    """Rows. The runs of a mean follow it."""

    ranked_by: str | None
    """Name of the loss that decides the rank; None if there is no rank."""

    has_finished: bool
    """True if a run is finished."""

    lines: list[Series]
    """The lines, in the order of their rows."""


def series_of(runs: Sequence[ReportedRun]) -> list[Series]:
    """Return the lines of runs, in the order of their numbers. The label of a mean has what differs from the others."""
    members: dict[int, list[ReportedRun]] = {}
    for run in runs:
        members.setdefault(run.series, []).append(run)
    differing = _differing(runs)
    short = short_names(differing)
    labels = []
    for group in members.values():
        label = group[0].label
        if len(group) > 1:
            at = runs.index(group[0])
            told = [f"{short[name]} {option(name, values[at])}" for name, values in differing.items() if name != "seed"]
            is_told = 0 < len(told) <= _MOST_IN_LABEL
            label = f"{', '.join(told)} ({len(group)} seeds)" if is_told else f"{label} and {len(group) - 1} more seeds"
        labels.append(label)
    seen = Counter(labels)
    return [
        Series(label=f"{label}: {group[0].label}" if seen[label] > 1 else label, runs=tuple(group))
        for label, group in zip(labels, members.values(), strict=True)
    ]


def compare(runs: Sequence[ReportedRun], series: Sequence[Series]) -> Comparison:
    """Compare runs.

    Args:
        runs: the runs, at least one.
        series: their lines.
    """
    differing = _differing(runs)
    texts = {name: [option(name, value) for value in values] for name, values in differing.items()}
    cells = {id(run): [column[at] for column in texts.values()] for at, run in enumerate(runs)}
    finished = _finished(runs)
    measure, ranked_by = _measure(finished)
    losses = {line.number: _mean(_present(_loss(run, measure) for run in _finished(line.runs))) for line in series}
    ordered = sorted(series, key=lambda line: (losses[line.number] is None, losses[line.number]))
    if ranked_by is None:
        ordered = list(series)
    rows = []
    for line in ordered:
        own, rank = losses[line.number], None
        if ranked_by is not None and own is not None:
            rank = 1 + sum(other is not None and other < own for other in losses.values())
        options = [_joined([cells[id(run)][at] for run in line.runs]) for at in range(len(texts))]
        rows.append(
            Row(
                label=line.label,
                color=line.color,
                is_single=False,
                rank=rank,
                cells=[*options, *_results(line.runs)],
            )
        )
        if line.is_group:
            rows += [
                Row(
                    label=run.label,
                    color=run.color,
                    is_single=True,
                    rank=None,
                    cells=[*cells[id(run)], *_results([run])],
                )
                for run in line.runs
            ]
    kept = _different_columns(rows, first=len(texts))
    for row in rows:
        row.cells[len(texts) :] = [row.cells[len(texts) + at] for at in kept]
    return Comparison(
        options=short_names(differing),
        columns=[_RESULTS[at] for at in kept],
        rows=rows,
        ranked_by=ranked_by,
        has_finished=bool(finished),
        lines=ordered,
    )


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the last part of each dotted name, or all of it if another name ends with the same part.

    >>> short_names(["seed", "prepare.seed", "optimizer.learning_rate"])
    {'seed': 'seed', 'prepare.seed': 'prepare.seed', 'optimizer.learning_rate': 'learning_rate'}
    """
    names = list(names)
    ends = Counter(name.rpartition(".")[2] for name in names)
    return {name: end if ends[end := name.rpartition(".")[2]] == 1 else name for name in names}


def _differing(runs: Sequence[ReportedRun]) -> dict[str, list[object]]:
    return differing_options([run.history.description.config for run in runs])


def _measure(runs: Sequence[ReportedRun]) -> tuple[str, str | None]:
    """Return the loss that decides the rank of finished runs, and its name.

    The name is None if there are no runs, or the losses are those of different tokens.
    """
    has_all = all(run.result.full_val_loss is not None for run in runs)
    subsets = {run.history.description.config.train.eval_tokens for run in runs}
    is_same = len({_validation_tokens(run) for run in runs}) == 1 and (has_all or len(subsets) == 1)
    measure = "full_val_loss" if has_all else "best_val_loss"
    name = "the final loss on all validation tokens" if has_all else "the best validation loss"
    return measure, name if is_same else None


def _validation_tokens(run: ReportedRun) -> str:
    """Return a text that is equal for equal validation tokens: their digests, or all that is known of a stream."""
    data = run.history.description.data
    known = flatten(data.fingerprint)
    digests = {name: value for name, value in known.items() if name.endswith("val.bin")}
    return repr((data.tokenizer_kind, sorted((digests or known).items(), key=str)))


def _finished(runs: Iterable[ReportedRun]) -> list[ReportedRun]:
    return [run for run in runs if is_finished(run.history)]


def _loss(run: ReportedRun, measure: str) -> float | None:
    return getattr(run.result, measure)


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _results(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the losses and the steps of a run, or their means with the standard deviation over the finished seeds."""
    counted = _finished(runs) or runs
    full, best, last = (
        _spread(_present(_loss(run, measure) for run in counted), len(runs))
        for measure in ("full_val_loss", "best_val_loss", "last_val_loss")
    )
    if len(runs) == 1 and best:
        best += f" at {runs[0].result.best_val_step or 0:,}"
    return [full, best, last, _joined([_steps(run) for run in runs])]


def _different_columns(rows: Sequence[Row], first: int) -> list[int]:
    """Return the numbers of the results, without a loss that is that of an earlier column in all rows.

    Args:
        rows: the rows, with all results.
        first: the number of cells before the results.
    """
    columns = [[row.cells[first + at].partition(" at ")[0] for row in rows] for at in range(len(_RESULTS))]
    return [at for at, column in enumerate(columns) if column not in columns[:at] or _RESULTS[at] == "steps"]


def _spread(values: Sequence[float], num_runs: int) -> str:
    if not values:
        return ""
    if num_runs == 1:
        return loss(values[0])
    if len(values) == 1:
        return f"{loss(values[0])} (1 of {num_runs} runs)"
    some = "" if len(values) == num_runs else f" ({len(values)} of {num_runs} runs)"
    return f"{loss(mean(values))} \N{PLUS-MINUS SIGN} {loss(stdev(values))}{some}"


def _steps(run: ReportedRun) -> str:
    steps, end = run.result.steps or 0, run.history.description.config.train.max_steps
    return f"{steps:,}" if steps >= end else f"{steps:,} of {end:,}"


def _joined(texts: Sequence[str]) -> str:
    """Return the different texts, joined.

    >>> _joined(["3e-4", "3e-4"]), _joined(["0", "1"]), _joined(["0", "1", "2", "3", "4"])
    ('3e-4', '0, 1', '0, 1, ... 4')
    """
    different = list(dict.fromkeys(texts))
    if len(different) <= _MOST_SEEDS:
        return ", ".join(different)
    return f"{different[0]}, {different[1]}, ... {different[-1]}"
