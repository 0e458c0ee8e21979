"""The table of the command `runs`: its columns, and which of them a narrow terminal shows."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# The least width of columns whose texts may be wrapped. The name of a run is not, if it leaves room for the others.
_WRAPPED = {"run": 16, "state": 8, "device": 8}
_OTHERS = 28
# A column that is not in here is that of an option. An option that few runs have goes first, the others before "val".
_LEAST_IMPORTANT = ("device", "tokens", "age", "time", "loss")
_MOST_IMPORTANT = ("rank", "run", "runs", "state", "step")
_LAST_LEFT_OUT = ("spread", "val")
_TEXT_WIDTH = 12  # the least width of a text that is the value of an option
_GAP = 1


def runs_table(rows: Sequence[Mapping[str, str]], columns: Sequence[str], console: Console) -> Table:
    """Return a table. On a terminal that is too narrow, texts wrap and the least important columns are left out.

    Args:
        rows: the texts of each row, by the names of the columns. A missing text is unknown.
        columns: the columns to show, in this order.
        console: the output.
    """
    full = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in columns}
    options = [name for name in columns if name not in (*_LEAST_IMPORTANT, *_MOST_IMPORTANT, *_LAST_LEFT_OUT)]
    wrapped = _WRAPPED | {name: max(len(name), _TEXT_WIDTH) for name in options}
    wrapped["run"] = max(_WRAPPED["run"], console.width - _OTHERS)
    rare = [name for name in options if sum(row.get(name, "none") != "none" for row in rows) <= len(rows) / 2]
    common = [name for name in options if name not in rare]
    least = {name: min(width, wrapped.get(name, width)) for name, width in full.items()}
    spare = console.width + _GAP - sum(width + _GAP for width in least.values())
    for name in (*reversed(rare), *_LEAST_IMPORTANT, *reversed(common), *_LAST_LEFT_OUT) if console.is_terminal else ():
        if spare < 0 and name in least:
            spare += least.pop(name) + _GAP
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name, width in least.items():
        wanted = full[name] - width
        extra = max(0, min(wanted, spare)) if console.is_terminal else wanted
        spare -= extra
        table.add_column(name, width=width + extra, overflow="fold", justify="left" if name in _WRAPPED else "right")
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in least))
    return table
