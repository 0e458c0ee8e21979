"""The charts of runs: which metrics, in which units, on which axes."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from markupsafe import Markup

from pretrain._report.comparison import Series
from pretrain._report.curves import Array, smooth
from pretrain._report.reported_run import ReportedRun
from pretrain._report.svg_chart import Axis, Line, Look, line_chart
from pretrain._run.history import SCORED_STEP, TASKS
from pretrain._run.metrics import of_sources

_POINTS_OF_CHART = 2400  # of all lines together; the page of many long runs stays below 2 MB
_POINTS_OF_LINE, _FEWEST_POINTS = 500, 24
_MOST_NAMED = 6  # runs whose training losses are in the read-out too
_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))

Curve = tuple[Array, Array, Array]
"""Steps, positions and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A metric as a chart."""

    title: str
    unit: str
    metric: str
    scale: float = 1.0
    from_zero: bool = False
    has_log: bool = False
    is_smoothed: bool = True


_LOSS = Chart(title="Loss", unit="nats per token", metric="loss", has_log=True)
_CHARTS = (
    Chart(title="Learning rate", unit="", metric="learning_rate", from_zero=True, is_smoothed=False),
    Chart(title="Gradient norm", unit="before clipping", metric="grad_norm_max", has_log=True),
    Chart(title="Throughput", unit="tokens per second", metric="tokens_per_s", from_zero=True),
    Chart(title="MFU", unit="% of the peak of all devices", metric="mfu", scale=100, from_zero=True),
    Chart(title="Wait for data", unit="ms per step", metric="data_wait_s", scale=1000, from_zero=True),
)


def draw_charts(series: Sequence[Series]) -> list[tuple[Chart, list[tuple[str, Markup]]]]:
    """Return the charts that have a line, each on every axis with the CSS classes of the axis.

    Args:
        series: the lines, at least one. A line has the CSS class `s` and its number, a run of a mean also `single`.
    """
    charts = (_LOSS, *_charts_of_sources(series), *_CHARTS, *_task_charts(series))
    return [(chart, variants) for chart in charts if (variants := list(_variants(chart, series)))]


def _charts_of_sources(series: Sequence[Series]) -> Iterator[Chart]:
    """Yield a chart of the validation loss of each name of the mixtures."""
    runs = [run for one in series for run in one.runs]
    for name in dict.fromkeys(name for run in runs for name in of_sources(run.result.metrics)):
        yield Chart(
            title=f"Validation loss, {name}",
            unit="nats per token",
            metric=f"val_loss/{name}",
            has_log=True,
            is_smoothed=False,
        )


def _task_charts(series: Sequence[Series]) -> list[Chart]:
    """Return a chart for each score on tasks, in the order of their names."""
    scores = (record for one in series for run in one.runs for record in run.history.scores)
    names = sorted({name for record in scores for name in record if name.startswith(TASKS)})
    return [
        Chart(title=name.removeprefix(TASKS).replace("/", ", "), unit="", metric=name, is_smoothed=False)
        for name in names
        if name != SCORED_STEP and not name.endswith("_stderr")
    ]


def _variants(chart: Chart, series: Sequence[Series]) -> Iterator[tuple[str, Markup]]:
    for x_name in ("step", "tokens", "time"):
        lines = [line for one in series for line in _lines(chart, one, x_name, len(series))]
        if not lines:
            if x_name == "step":
                return
            yield f"{x_name} linear log", Markup("<p>The records of these runs have no time.</p>")
            continue
        x_axis = Axis(label={"step": "step", "tokens": "training tokens"}.get(x_name, ""))
        marks = [mark for one in series for mark in _restarts(one, x_name)]
        if x_name == "time":
            last = max(float(line.x.max()) for line in lines)
            size, unit = next((size, unit) for size, unit in _UNITS if last >= 2 * size or size == 1)
            x_axis = Axis(label=f"{unit} of work")
            lines = [dataclasses.replace(line, x=line.x / size) for line in lines]
        scales = (("linear", False), ("log", True)) if chart.has_log else (("linear log", False),)
        for classes, is_log in scales:
            yield (
                f"{x_name} {classes}",
                line_chart(
                    lines,
                    title=chart.title,
                    x_axis=x_axis,
                    y_axis=Axis(label=chart.unit, is_log=is_log),
                    marks=marks,
                    max_points=max(_FEWEST_POINTS, min(_POINTS_OF_LINE, _POINTS_OF_CHART // len(lines))),
                    is_robust=not chart.from_zero,
                    from_zero=chart.from_zero,
                ),
            )


def _restarts(series: Series, x_name: str) -> Iterator[tuple[float, str]]:
    """Yield the positions of restarts with their CSS classes."""
    if x_name == "time":  # the time line has these restarts
        return
    for run in series.runs:
        for start in run.history.starts[1:]:
            x = run.tokens_at(start["step"]) if x_name == "tokens" else float(start["step"])
            yield x, f"{run.color} s{run.series}" + " single" * series.is_group


def _lines(chart: Chart, series: Series, x_name: str, num_series: int) -> Iterator[Line]:
    """Yield the lines of a chart for one run, or for the mean of several."""
    if num_series == 1 and not series.is_group:
        yield from _lines_of_one_run(chart, series.runs[0], x_name)
        return
    training = [_scaled(run.curve(chart.metric, x_name), chart) for run in series.runs]
    validation = [run.curve("val_loss", x_name) for run in series.runs] if chart is _LOSS else []
    has_validation = any(len(x) for x, _, _ in validation)
    for run in series.runs:
        yield from _inherited(chart, run, x_name)
    names = [f"{label}, training" if chart is _LOSS else label for label in (series.label, *_labels(series))]
    if has_validation and num_series > _MOST_NAMED:
        names = [""] * len(names)
    yield from _lines_of_series(
        names, series, training, "light" if has_validation else "line", has_details=not has_validation
    )
    if has_validation:
        names = [f"{label}, validation" for label in (series.label, *_labels(series))]
        yield from _lines_of_series(names, series, validation, "dotted", has_details=True)


def _lines_of_one_run(chart: Chart, run: ReportedRun, x_name: str) -> Iterator[Line]:
    yield from _inherited(chart, run, x_name)
    name = f"{run.label}, training" if chart is _LOSS else run.label
    x, y = run.points(chart.metric, x_name)
    if len(x):
        y = y * chart.scale
        if chart.is_smoothed:
            yield Line(label="", x=x, y=y, color=run.color, look="pale")
        smoothed = smooth(y) if chart.is_smoothed else y
        yield Line(label=name, x=x, y=smoothed, color=run.color, last=float(y[-1]))
    if chart is _LOSS:
        x, y = run.points("val_loss", x_name)
        if len(x):
            name = f"{run.label}, validation"
            yield Line(label=name, x=x, y=y, color="color1", look="dotted", last=float(y[-1]))


def _lines_of_series(
    names: Sequence[str], series: Series, curves: Sequence[Curve], look: Look, *, has_details: bool
) -> Iterator[Line]:
    """Yield the line of a run, or the mean of several with its band and the single runs.

    Args:
        names: names in the read-out: of the mean or the run, and of each run of a mean.
        series: the run or the runs.
        curves: a curve of each run.
        look: look of the line.
        has_details: draw the band and the single runs, and write the last value.
    """
    color = f"{series.color} s{series.number}"
    joined = mean_curve(curves) if series.is_group else None
    if joined is None:  # one run, or runs without a step that all have
        for name, (_, x, y) in zip(names[-len(curves) :], curves, strict=True):
            if len(x):
                last = float(y[-1]) if has_details else None
                yield Line(label=name, x=x, y=y, color=color, look=look, last=last)
        return
    if has_details:
        for name, (_, x, y) in zip(names[1:], curves, strict=True):
            yield Line(label=name, x=x, y=y, color=f"{color} single", look="light")
        if (joined.high > joined.low).any():
            yield Line(label="", x=joined.x, y=joined.high, low=joined.low, color=color, look="band")
    last = float(joined.mean[-1]) if has_details else None
    yield Line(label=names[0], x=joined.x, y=joined.mean, color=color, look=look, last=last)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanCurve:
    """The mean of several curves, at the steps that all of them have."""

    steps: Array
    x: Array
    mean: Array
    low: Array
    high: Array


def mean_curve(curves: Sequence[Curve]) -> MeanCurve | None:
    """Return the mean, the lowest and the highest value at the steps that all curves have; None without such a step.

    >>> steps, other = np.array([0.0, 10.0, 20.0]), np.array([0.0, 15.0, 20.0])
    >>> found = mean_curve([(steps, steps, np.array([5.0, 4.0, 3.0])), (other, other, np.array([5.0, 3.5, 2.0]))])
    >>> found.steps.tolist(), found.mean.tolist(), found.low.tolist(), found.high.tolist()
    ([0.0, 20.0], [5.0, 2.5], [5.0, 2.0], [5.0, 3.0])

    Args:
        curves: steps, positions and values of each. The positions are averaged too: runs differ in their time.
    """
    steps: Array = reduce(np.intersect1d, (curve[0] for curve in curves))
    if not len(steps):
        return None
    at = [np.searchsorted(curve[0], steps) for curve in curves]
    x = np.stack([curve[1][chosen] for curve, chosen in zip(curves, at, strict=True)])
    y = np.stack([curve[2][chosen] for curve, chosen in zip(curves, at, strict=True)])
    return MeanCurve(steps=steps, x=x.mean(0), mean=y.mean(0), low=y.min(0), high=y.max(0))


def _scaled(curve: Curve, chart: Chart) -> Curve:
    steps, x, y = curve
    return steps, x, (smooth(y) if chart.is_smoothed else y) * chart.scale


def _inherited(chart: Chart, run: ReportedRun, x_name: str) -> Iterator[Line]:
    """Yield the part of a run that its parents have trained, in grey. A forked run is never part of a mean."""
    color = f"grey s{run.series}"
    _, x, y = _scaled(run.inherited(chart.metric, x_name), chart)
    if len(x):
        yield Line(label="", x=x, y=y, color=color, look="light")
    if chart is _LOSS:
        _, x, y = run.inherited("val_loss", x_name)
        if len(x):
            yield Line(label="", x=x, y=y, color=color, look="dotted")


def _labels(series: Series) -> list[str]:
    return [run.label for run in series.runs] if series.is_group else []
