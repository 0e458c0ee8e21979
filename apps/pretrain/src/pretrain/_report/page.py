"""`report.html`: one page about one or several runs, without any other file."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pretrain._formats import duration, show_utc
from pretrain._report.comparison import compare, series_of
from pretrain._report.reported_run import Fork, ReportedRun, reported_runs
from pretrain._report.run_charts import draw_charts
from pretrain._report.timeline import draw_timeline
from pretrain._run.history import RunHistory, seconds_by_phase
from pretrain._run.result import as_utc

_MANY = 4  # runs; the tables and the time lines of more are folded
_MOST_SAMPLES, _SAMPLES_OF_PAGE = 10, 60
_BARS_OF_PAGE = 2000  # of all time lines together
# Control characters, which HTML forbids: a byte tokenizer may sample them.
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    name: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def render_page(histories: Sequence[RunHistory], *, now_s: float, forks: Sequence[Fork | None] = ()) -> str:
    """Return the page as HTML.

    Args:
        histories: the runs, at least one. A run may occur twice, or be in training.
        now_s: Unix time of the page.
        forks: the beginning of each run that another run has trained, None for the others. Without any, all have
            trained by themselves.
    """
    runs = reported_runs(histories, forks)
    comparison = compare(runs, series_of(runs))
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
        comparison=comparison,
        is_many=len(runs) > _MANY,
        most_samples=max(2, min(_MOST_SAMPLES, _SAMPLES_OF_PAGE // len(runs))),
        charts=draw_charts(comparison.lines),
        untimed=[run.label for run in runs if run.history.records and not _has_times(run)],
        timelines=_timelines(runs),
        phases=list(_phase_rows(runs)),
        config=config,
        differing=[row for row in config if row.differs and row.name not in comparison.options],
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


def _timelines(runs: Sequence[ReportedRun]) -> list[tuple[str, Markup]]:
    """Return the time line of each run that has phases, all in one scale."""
    lengths = {run.label: sum(seconds_by_phase(run.history.phases, run.end_s or 0.0).values()) for run in runs}
    scale_s = max(lengths.values()) or 1.0
    return [
        (
            f"{run.label}: {duration(lengths[run.label], decimals=1)}",
            draw_timeline(
                run.history.phases,
                label=run.label,
                end_s=run.end_s or 0.0,
                scale_s=scale_s,
                max_bars=min(1000, _BARS_OF_PAGE // len(runs)),
            ),
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
