"""The live view of a run: a few lines, whose fields have fixed widths. `display.plain_line` is its line elsewhere."""

from typing import NamedTuple

from rich.console import ConsoleOptions, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pretrain._formats import clock_time, count, duration, gibibytes, loss, sparkline
from pretrain._screen.run_view import RunView

_GAP = 2
_MAX_WIDTH = 120
_NARROW, _WIDE = 72, 110
_SHORTEST_PHASE_S = 1.0


class _Field(NamedTuple):
    """A field of fixed width: a label, and a value behind it or before it."""

    value: str
    width: int
    label: str = ""
    unit: str = ""
    style: str = ""

    def text(self) -> Text:
        """Return the field, filled up to its width."""
        before = f"{self.label} " if self.label else ""
        value = (self.value.rjust(self.width), self.style)
        return Text.assemble((before, "dim"), value, (self.unit, "dim"), no_wrap=True, overflow="ignore")

    def size(self) -> int:
        """Return the number of columns."""
        return self.text().cell_len


def live_screen(view: RunView, options: ConsoleOptions) -> Group:
    """Return the lines of the live view.

    A line that is too narrow for all of its fields lacks the least important ones; no field is cut.

    Args:
        view: the run.
        options: width and encoding of the terminal.
    """
    width = min(options.max_width, _MAX_WIDTH)
    sources = view.source_losses if view.has_validated else {}
    lines = [
        *_rows(_status(view), width, 1),
        _bar(view, width),
        *_rows(_losses(view, width, is_ascii=options.ascii_only), width, 2),
        *_rows([_Field(loss(value), 7, name) for name, value in sources.items()], width, 2),
        *_rows(_rates(view), width, 2),
    ]
    return Group(*lines)


def phase_text(view: RunView) -> str:
    """Return the phase, with its time if it is not the training."""
    seconds = view.phase_s()
    is_long = not view.notice and view.phase != "training" and seconds >= _SHORTEST_PHASE_S
    return f"{view.label()} {duration(seconds)}" if is_long else view.label()


def _status(view: RunView) -> list[_Field]:
    fields = [_Field(phase_text(view).ljust(16), 16, style="bold")]
    total = f"{view.max_steps:,}"
    fields.append(_Field(f"{view.step:>{len(total)},}/{total}", 0, "step"))
    if (elapsed_s := view.elapsed_s()) is not None:
        fields.append(_Field(clock_time(elapsed_s), 7, "elapsed"))
    if view.num_restarts:
        fields.append(_Field(str(view.num_restarts), 0, unit=" restart" + "s" * (view.num_restarts > 1)))
    return fields


def _bar(view: RunView, width: int) -> Table:
    left_s = view.left_s()
    left = "" if left_s is None else clock_time(left_s)
    line = Table.grid(padding=(0, _GAP, 0, 0))
    bar = ProgressBar(total=view.max_steps, completed=view.step, width=max(4, width - 4 - 12 - 2 * _GAP))
    share = _Field(f"{view.step / view.max_steps:.0%}", 4)
    line.add_row(bar, share.text(), _Field(left, 7, "left" if left else "").text())
    return line


def _losses(view: RunView, width: int, *, is_ascii: bool) -> list[_Field]:
    spark_width = 4 if width < _NARROW else 16 if width < _WIDE else 30
    fields = []
    for name, values in (("loss", view.losses.points), ("val loss", view.val_losses.points)):
        if values:
            # The first steps fall so far that nothing else would be visible.
            recent = [value for _, value in values[-max(len(values) // 2, min(len(values), spark_width)) :]]
            trend = "" if is_ascii else sparkline(recent, spark_width)
            is_shown = name == "loss" or view.has_validated
            fields.append(_Field(loss(values[-1][1]) if is_shown else "-", 7, name, f" {trend:{spark_width}}"))
    return fields


def _rates(view: RunView) -> list[_Field]:
    """Return the fields of the last lines, the most important first."""
    last = view.last
    fields = []
    if "tokens_per_s" in last:
        fields.append(_Field(count(last["tokens_per_s"]), 7, unit=" tokens/s"))
    if "mfu" in last:
        fields.append(_Field(f"{last['mfu']:.1%}", 5, "MFU"))
    if "data_wait_s" in last and last.get("step_s"):
        fields.append(_Field(f"{min(1.0, last['data_wait_s'] / last['step_s']):.0%}", 4, "data wait"))
    if view.tokenizing is not None and (tokenized := view.tokenizing.summary()):
        fields.append(_Field(tokenized, 0))
    if "memory_bytes" in last:
        fields.append(_Field(gibibytes(last["memory_bytes"]), 8, "memory"))
    if "epoch" in last:
        fields.append(_Field(f"{last['epoch']:.2f}", 5, "epoch"))
    return fields


def _rows(fields: list[_Field], width: int, max_rows: int) -> list[Text]:
    """Place fields in lines, the most important first, and leave out those that do not fit."""
    rows: list[list[_Field]] = [[] for _ in range(max_rows)]
    for field in fields:
        for row in rows:
            if sum(other.size() + _GAP for other in row) + field.size() <= width:
                row.append(field)
                break
    lines = []
    for row in filter(None, rows):
        line = Text(" " * _GAP, no_wrap=True).join([field.text() for field in row])
        line.rstrip()
        lines.append(line)
    return lines
