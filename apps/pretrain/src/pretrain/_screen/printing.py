"""Lines, tables and waits before a run, without styles where the output is no terminal."""

import contextlib
import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from pretrain._formats import duration

# Wider than any table.
_UNLIMITED = 10_000
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print labels, and a text beside each; an empty label continues the one before.

    Control characters of a text, such as the name of a file, are visible.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        table.add_row(label, Text(text.translate(_VISIBLE)))
    print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """Print a table: on a terminal in its width, elsewhere in the width of the content and without styles."""
    if console.is_terminal:
        console.print(table, highlight=False)
        return
    text = Console(file=io.StringIO(), width=_UNLIMITED, force_terminal=False, no_color=True, emoji=False)
    text.print(table, highlight=False)
    assert isinstance(text.file, io.StringIO)
    for line in text.file.getvalue().splitlines():
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def print_line(console: Console, text: str) -> None:
    """Print a text as it is. The terminal wraps it, so that a path in it can be copied.

    A terminal gets control characters in a visible form: the text of a model could change its colors or its title.
    """
    if console.is_terminal:
        console.print(text.translate(_VISIBLE), markup=False, highlight=False, soft_wrap=True)
    else:  # rich would leave some control characters out of a text
        console.print(Segments([Segment(f"{text}\n")]), soft_wrap=True)


class TextWriter:
    """Texts that appear as they are generated, with a rule between two. A text is printed as by `print_line`."""

    def __init__(self, console: Console) -> None:
        self._console, self._num_ended, self._is_begun = console, 0, False

    def write(self, piece: str) -> None:
        """Print a piece of a text, at once."""
        if not self._is_begun and self._num_ended:
            self._console.rule()
        self._is_begun = True
        self._console.file.write(piece.translate(_VISIBLE) if self._console.is_terminal else piece)
        self._console.file.flush()

    def end(self) -> None:
        """End the text. An empty text is an empty line."""
        self.write("\n")
        self._num_ended, self._is_begun = self._num_ended + 1, False


class _Elapsed(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return the time of the wait."""
        return Text(duration(task.elapsed or 0.0), style="dim")


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show a text while the block runs: with its time on a terminal, as a plain line elsewhere."""
    if not console.is_interactive:
        console.print(what, markup=False, highlight=False, soft_wrap=True)
        yield
        return
    with Progress(TextColumn("{task.description}", markup=False), _Elapsed(), console=console, transient=True) as bar:
        bar.add_task(what, total=None)
        yield
