"""A wait before the run, with its time."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from pretrain._formats import duration


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
