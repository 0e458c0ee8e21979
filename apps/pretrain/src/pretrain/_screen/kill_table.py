"""The table of the kills of a run: live on a terminal, plain lines elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pretrain._formats import duration
from pretrain._screen.printing import print_line

_REFRESHES_PER_S = 4
_COLUMNS = ("kill", "killed process", "at step", "phase", "continued by", "from step", "after")
_NUMBERS = ("kill", "at step", "from step", "after")


@dataclass(kw_only=True, slots=True)
class KillRow:
    """A kill, and what continued after it."""

    number: int
    """Its number, from 1."""

    victim: str
    """The killed process."""

    step: int
    """The last recorded step before it."""

    phase: str
    """The phase in which it came."""

    continued_by: str = ""
    """The command or the workers that continued; empty before that."""

    checkpoint: int = 0
    """The step of the checkpoint that it continued from; 0 if there was none."""

    after_s: float = 0.0
    """Seconds from the kill until it continued."""

    @property
    def is_saved_later(self) -> bool:
        """True for a checkpoint after the kill: workers train for a moment after their command was killed."""
        return self.checkpoint > self.step

    def happened(self) -> str:
        """Return the kill as a line."""
        return f"kill {self.number}: {self.victim} at step {self.step}, while {self.phase}"

    def continued(self) -> str:
        """Return what continued as a line."""
        source = f"the checkpoint of step {self.checkpoint}" if self.checkpoint else "the start, without a checkpoint"
        note = ", which the old workers had still saved" if self.is_saved_later else ""
        return f"kill {self.number}: {self.continued_by} continued from {source}{note}, after {duration(self.after_s)}"


class KillTable:
    """The kills of a run, and one line about the present, until the block ends.

    Args:
        console: the output.
    """

    def __init__(self, console: Console) -> None:
        self.rows: list[KillRow] = []
        self._console, self._present = console, lambda: ""
        self._live = Live(console=console, refresh_per_second=_REFRESHES_PER_S, get_renderable=self._render)

    def __enter__(self) -> "KillTable":
        if self._console.is_interactive:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._present = lambda: ""
        self._live.stop()

    def present(self, text: Callable[[], str]) -> None:
        """Show what a function returns in the last line, on a terminal."""
        self._present = text

    def add(self, row: KillRow) -> None:
        """Show a kill."""
        self.rows.append(row)
        self._print(row.happened())

    def continued(self, row: KillRow) -> None:
        """Show what continued after a kill."""
        self._print(row.continued())

    def _print(self, line: str) -> None:
        if not self._console.is_interactive:
            print_line(self._console, line)

    def _render(self) -> Group:
        lines: list[Table | Text] = [_table(self.rows)] if self.rows else []
        if any(row.is_saved_later for row in self.rows):
            lines.append(Text("* saved by the workers of the killed command, before they ended", style="dim"))
        if present := self._present():
            lines.append(Text(present, style="dim"))
        return Group(*lines)


def _table(rows: list[KillRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for row in rows:
        source = f"{row.checkpoint}{'*' if row.is_saved_later else ''}"
        end = [row.continued_by, source, duration(row.after_s)] if row.continued_by else []
        table.add_row(str(row.number), row.victim, str(row.step), row.phase, *end)
    return table
