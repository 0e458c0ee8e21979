"""A progress bar for `prepare`."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from owt_data._prepare import Progress as ReportProgress


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[ReportProgress]:
    """Show documents, tokens and time left while `prepare` runs.

    Args:
        console: where to; where it is no terminal, nothing is shown until the end.
    """
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents  {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, tokens=0)

        def report(done: int, total: int, tokens: int) -> None:
            bar.update(task, completed=done, total=total, tokens=tokens)

        yield report
