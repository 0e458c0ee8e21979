"""Line charts as inline SVG that fit any width: the lines stretch, and the texts keep their size.

The page is one file below 1 MB, with a read-out of values, and runs no script but its own. No library gives that (tried
with one line of 1,000 points): plotly 7.1 inlines 4.8 MB of script, Bokeh 3.9 1.3 MB, and Altair 6.3 0.9 MB, which
compiles code from texts. The read-outs of pygal 3.1 and mpld3 0.5 load scripts from elsewhere; matplotlib writes an SVG
without one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from pretrain._formats import axis_number, four_digits, plain
from pretrain._report.curves import Array, robust_range, spread

_SIZE = 1000  # of the plot, in its own coordinates, in both directions
_LABEL_GAP = 0.08  # of two labels at the lines' ends, as a share of the height
_MARGIN = 0.04  # above and below the values, as a share of the height
_X_TICKS, _Y_TICKS = 6, 8  # about so many; more would not fit a phone
_MOST_DOTS = 50
_MOST_LABELS = 12  # at the lines' ends; more would not fit

Look = Literal["band", "pale", "light", "line", "dotted"]
_DEPTHS = get_args(Look)  # the background first


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a chart."""

    label: str
    """Name in the read-out; an empty one has none."""

    x: Array
    """Positions."""

    y: Array
    """Values, as many as positions."""

    color: str
    """CSS classes: one that sets the property `color`, and others."""

    look: Look = "line"
    """`pale` is a background for another line, and `band` the area from `low` to `y`: both have no read-out. `light` is
    a thin line; `dotted` has a dot at each point."""

    low: Array | None = None
    """The lower edge of a band, as many values as positions."""

    last: float | None = None
    """The value to write at the line's end; None writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis of a chart."""

    label: str
    """Name and unit."""

    is_log: bool = False
    """Logarithmic; values of 0 and below are left out."""


def line_chart(
    lines: Sequence[Line], *, title: str, x_axis: Axis, y_axis: Axis, marks: Sequence[tuple[float, str]] = (),
    max_points: int = 600, is_robust: bool = False, from_zero: bool = False,
) -> Markup:  # fmt: skip
    """Draw a chart.

    Args:
        lines: the lines, at least one with a point.
        title: accessible name.
        x_axis: the horizontal axis.
        y_axis: the vertical axis.
        marks: positions of ticks at the lower edge, each with the CSS class of its color.
        max_points: points of a line, at least 4; `thin` removes the others.
        is_robust: cut off the first values and outliers that are far above the others: see `robust_range`.
        from_zero: begin a linear vertical axis at 0.
    """
    if y_axis.is_log:
        lines = [_positive(line) for line in lines]
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Markup("<p>Nothing to draw on this axis.</p>")
    x_low, x_high = _limits(np.concatenate([[0.0], *(line.x for line in lines)]), False)
    y_low, y_high = _vertical_range(lines, is_log=y_axis.is_log, is_robust=is_robust, from_zero=from_zero)

    def across(x: float) -> float:
        return (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        if y_axis.is_log:
            return math.log(y_high / y) / math.log(y_high / y_low)
        return (y_high - y) / (y_high - y_low)

    opening = (
        '<svg class="chart" role="img" aria-label="{}" data-unit="{}" data-x="{},{}" data-y="{},{}" data-log="{}">'
    )
    summary = _summary(title, lines, y_axis)
    parts = [Markup(opening).format(summary, x_axis.label, x_low, x_high, y_low, y_high, int(y_axis.is_log))]
    for tick, text in _ticks(y_low, y_high, _Y_TICKS, y_axis.is_log):
        at = _percent(down(tick))
        parts.append(Markup('<line class="grid" x2="100%" y1="{0}" y2="{0}"/>').format(at))
        parts.append(Markup('<text x="-6" y="{}" dy="4" class="y">{}</text>').format(at, text))
    for tick, text in _ticks(x_low, x_high, _X_TICKS):
        at = _percent(across(tick))
        parts.append(Markup('<line class="grid" x1="{0}" x2="{0}" y2="100%"/>').format(at))
        parts.append(Markup('<text x="{}" y="100%" dy="17" class="x">{}</text>').format(at, text))
    parts.append(Markup('<text x="50%" y="100%" dy="35" class="x">{}</text>').format(x_axis.label))
    parts.append(
        Markup('<svg viewBox="0 0 {0} {0}" width="100%" height="100%" preserveAspectRatio="none">').format(_SIZE)
    )
    for line in sorted(lines, key=lambda line: _DEPTHS.index(line.look)):
        corners = [
            f"{_SIZE * across(a):.1f} {_SIZE * down(b):.2f}"
            for a, b in zip(*thin(line.x, line.y, max_points), strict=True)
        ]
        if line.low is not None:
            edge = zip(*thin(line.x, line.low, max_points), strict=True)
            corners += [f"{_SIZE * across(a):.1f} {_SIZE * down(b):.2f}" for a, b in edge][::-1]
        path = "M" + "L".join(corners) + ("h0" if len(corners) == 1 else "")
        name = Markup(' data-label="{}"').format(line.label) if _is_named(line) else ""
        parts.append(Markup('<path class="{} {}" d="{}"{}/>').format(line.look, line.color, path, name))
        if line.look == "dotted":
            dots = "".join(f"M{corner}h0" for corner in corners[:: math.ceil(len(corners) / _MOST_DOTS)])
            parts.append(Markup('<path class="dots {}" d="{}"/>').format(line.color, dots))
    parts.append(Markup("</svg>"))
    for x, color in marks:
        if x_low <= x <= x_high:
            at = _percent(across(x))
            parts.append(Markup('<line class="mark {1}" x1="{0}" x2="{0}" y1="94%" y2="100%"/>').format(at, color))
    ended = [line for line in lines if line.last is not None]
    ended = ended if len(ended) <= _MOST_LABELS else []
    places = spread([min(max(down(line.y[-1]), 0.0), 1.0) for line in ended], _LABEL_GAP)
    below = max(0.0, max(places, default=0.0) - (1 - _LABEL_GAP / 2))  # the horizontal axis has its numbers there
    for line, at in zip(ended, places, strict=True):
        parts.append(
            Markup('<text x="100%" dx="6" y="{}" dy="4" class="end {}">{}</text>').format(
                _percent(at - below), line.color, four_digits(line.last or 0.0)
            )
        )
    highest = max(float(line.y.max()) for line in lines)
    if highest > y_high:
        note = f"\N{BLACK UP-POINTING TRIANGLE} above the axis: up to {four_digits(highest)}"
        parts.append(Markup('<text x="100%" dx="-8" y="14" class="note">{}</text>').format(note))
    return Markup("").join([*parts, Markup("</svg>")])


def _is_named(line: Line) -> bool:
    return bool(line.label) and line.look not in ("pale", "band")


def _summary(title: str, lines: Sequence[Line], y_axis: Axis) -> str:
    ends = [f"{line.label} ends at {four_digits(float(line.y[-1]))}" for line in lines if _is_named(line)]
    return f"{title}, {y_axis.label}. {'; '.join(ends)}."


def _positive(line: Line) -> Line:
    kept = line.y > 0 if line.low is None else line.low > 0
    return replace(line, x=line.x[kept], y=line.y[kept], low=None if line.low is None else line.low[kept])


def _limits(values: Array, is_log: bool) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if low < high:
        return low, high
    return (low / 2, high * 2) if is_log else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def _vertical_range(lines: Sequence[Line], *, is_log: bool, is_robust: bool, from_zero: bool) -> tuple[float, float]:
    curves = [(line.x, line.y) for line in lines] + [(line.x, line.low) for line in lines if line.low is not None]
    values = np.concatenate([y for _, y in curves])
    low, high = _limits(values, is_log)
    if is_log:
        factor = (high / low) ** _MARGIN
        return low / factor, high * factor
    if is_robust:
        return robust_range(curves)
    margin = _MARGIN * (high - low)
    return (min(0.0, float(values.min())) if from_zero else low - margin), high + margin


def _ticks(low: float, high: float, count: int, is_log: bool = False) -> list[tuple[float, str]]:
    """Return round values between two values, with their texts.

    On a logarithmic axis that is long enough, the values are powers of ten, with round multiples where there is room.
    """
    if is_log and high / low > 3:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        decades = math.log10(high / low)
        factors = (1, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
        values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        return [(value, axis_number(value)) for value in values if low <= value <= high]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    decimals = max(0, -math.floor(math.log10(step * 1.001)))
    values = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    highest = max(abs(low), abs(high))
    if highest >= 10_000:
        return [(value, axis_number(value)) for value in values]
    return [(value, plain(value) if highest < 0.01 else f"{value:,.{decimals}f}") for value in values]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


Points = tuple[NDArray[np.float64], NDArray[np.float64]]


def thin(x: NDArray[np.float64], y: NDArray[np.float64], max_points: int) -> Points:
    """Return at most `max_points` of the points: the first, the last, and the lowest and highest of each piece.

    All pieces have about the same number of points. No peak is lost, unlike with every n-th point or with means.

    >>> x, y = thin(np.arange(8.0), np.array([0.0, 1.0, 9.0, 1.0, 1.0, -9.0, 1.0, 0.0]), 6)
    >>> x.tolist(), y.tolist()
    ([0.0, 1.0, 2.0, 4.0, 5.0, 7.0], [0.0, 1.0, 9.0, 1.0, -9.0, 0.0])

    Args:
        x: positions, in any order.
        y: values.
        max_points: at least 4.
    """
    if len(x) <= max_points:
        return x, y
    kept = {0, len(y) - 1}
    pieces = np.array_split(np.arange(1, len(y) - 1), (max_points - 2) // 2)
    extremes: tuple[Callable[[NDArray[np.float64]], np.intp], ...] = (np.argmin, np.argmax)
    kept |= {int(piece[extreme(y[piece])]) for piece in pieces for extreme in extremes}
    chosen = sorted(kept)
    return x[chosen], y[chosen]
