"""`report.html`: one page about one or several runs, without any other file."""

import base64
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pretrain._formats import duration, show_utc
from pretrain._report.curves import Array, smooth
from pretrain._report.reported_run import ReportedRun, reported_runs
from pretrain._report.svg_chart import Axis, Line, line_chart
from pretrain._report.timeline import draw_timeline
from pretrain._run.history import RunHistory, seconds_by_phase
from pretrain._run.result import as_utc

_POINTS_OF_CHART = 2400  # of all lines together; the page of many long runs stays below 2 MB
_POINTS_OF_LINE = 500
_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
# Control characters, which HTML forbids: a byte tokenizer may sample them.
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chart:
    title: str
    unit: str
    metrics: tuple[str, ...]  # the first that a run has
    scale: float = 1.0
    from_zero: bool = False
    has_log: bool = False
    is_smoothed: bool = True


_LOSS = _Chart(title="Loss", unit="nats per token", metrics=("loss",), has_log=True)
_CHARTS = (
    _LOSS,
    _Chart(title="Learning rate", unit="", metrics=("learning_rate",), from_zero=True, is_smoothed=False),
    _Chart(title="Gradient norm", unit="before clipping", metrics=("grad_norm_max",), has_log=True),
    _Chart(title="Throughput", unit="tokens per second", metrics=("tokens_per_s",), from_zero=True),
    _Chart(title="MFU", unit="% of the peak of all devices", metrics=("mfu",), scale=100, from_zero=True),
    _Chart(title="Wait for data", unit="ms per step", metrics=("data_wait_s",), scale=1000, from_zero=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    name: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def render_page(histories: Sequence[RunHistory], *, now_s: float) -> str:
    """Return the page as HTML.

    Args:
        histories: the runs, at least one. A run may occur twice, or be in training.
        now_s: Unix time of the page.
    """
    runs = reported_runs(histories)
    loader = PackageLoader("pretrain._report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = loader.get_source(environment, "page.js")[0]
    config = list(_rows(run.config() for run in runs))
    html = environment.get_template("page.html.jinja").render(
        runs=runs,
        made_at=show_utc(as_utc(now_s)),
        numbers=[row for row in _rows(run.numbers(now_s) for run in runs) if any(row.values)],
        charts=[(chart, variants) for chart in _CHARTS if (variants := list(_variants(chart, runs)))],
        untimed=[run.label for run in runs if run.history.records and not _has_times(run)],
        timelines=_timelines(runs),
        phases=list(_phase_rows(runs)),
        config=config,
        differing=[row for row in config if row.differs],
        origin=[row for row in _rows(run.origin() for run in runs) if any(row.values)],
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    # Half of a surrogate pair, which JSON can hold, has no UTF-8.
    return html.encode("utf-8", "replace").decode().translate(_CONTROLS)


def _has_times(run: ReportedRun) -> bool:
    return any("time_s" in record for record in run.history.records)


def _rows(columns: Iterable[dict[str, str]]) -> Iterable[_Row]:
    columns = list(columns)
    for name in dict.fromkeys(name for column in columns for name in column):
        yield _Row(name=name, values=[column.get(name, "") for column in columns])


def _variants(chart: _Chart, runs: Sequence[ReportedRun]) -> Iterable[tuple[str, Markup]]:
    """Yield the chart on each axis, with the CSS classes of the axis."""
    for x_name in ("step", "tokens", "time"):
        lines = [line for run in runs for line in _lines(chart, run, x_name, has_one_run=len(runs) == 1)]
        if not lines:
            if x_name == "step":
                return
            yield f"{x_name} linear log", Markup("<p>The records of these runs have no time.</p>")
            continue
        x_axis = Axis(label={"step": "step", "tokens": "training tokens"}.get(x_name, ""))
        marks = [
            (start["step"] * (run.tokens_per_step if x_name == "tokens" else 1.0), run.color)
            for run in runs
            for start in run.history.starts[1:]
            if x_name != "time"  # the time line has these restarts
        ]
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
                    max_points=max(40, min(_POINTS_OF_LINE, _POINTS_OF_CHART // len(lines))),
                    is_robust=not chart.from_zero,
                    from_zero=chart.from_zero,
                ),
            )


def _lines(chart: _Chart, run: ReportedRun, x_name: str, *, has_one_run: bool) -> Iterable[Line]:
    validation = run.points("val_loss", x_name) if chart is _LOSS else (np.empty(0), np.empty(0))
    for metric in chart.metrics:
        x, y = run.points(metric, x_name)
        if len(x):
            name = f"{run.label}, training" if chart is _LOSS else run.label
            is_labelled = has_one_run or not len(validation[0])
            yield from _curve(name, x, y * chart.scale, run.color, chart.is_smoothed, is_labelled)
            break
    x, y = validation
    if len(x):
        color = "color1" if has_one_run else run.color
        yield Line(label=f"{run.label}, validation", x=x, y=y, color=color, look="dotted", last=float(y[-1]))


def _curve(label: str, x: Array, y: Array, color: str, is_smoothed: bool, is_labelled: bool) -> Iterable[Line]:
    line = Line(
        label=label, x=x, y=smooth(y) if is_smoothed else y, color=color, last=float(y[-1]) if is_labelled else None
    )
    if is_smoothed:
        yield Line(label=label, x=x, y=y, color=color, look="pale")
    yield line


def _timelines(runs: Sequence[ReportedRun]) -> list[tuple[str, Markup]]:
    """Return the time line of each run that has phases, all in one scale."""
    lengths = {run.label: sum(seconds_by_phase(run.history.phases, run.end_s or 0.0).values()) for run in runs}
    scale_s = max(lengths.values()) or 1.0
    return [
        (
            f"{run.label}: {duration(lengths[run.label], decimals=1)}",
            draw_timeline(run.history.phases, label=run.label, end_s=run.end_s or 0.0, scale_s=scale_s),
        )
        for run in runs
        if run.history.phases
    ]


def _phase_rows(runs: Sequence[ReportedRun]) -> Iterable[_Row]:
    columns = [seconds_by_phase(run.history.phases, run.end_s or 0.0) for run in runs]
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [
            f"{duration(column[name], decimals=1)} ({column[name] / (sum(column.values()) or 1.0):.1%})"
            if name in column
            else ""
            for column in columns
        ]
        yield _Row(name=name, values=values)
