"""Progress bars of `prepare` and `verify`, or log lines without a terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from owt_data._errors import check_type
from owt_data._prepare.progress import Progress, Report

# Interval of the log lines that replace the bar without a terminal.
_SECONDS_PER_LINE = 30.0


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """Show documents, tokens, MB/s and time left while `prepare` runs.

    Args:
        console: the output. Without a terminal, one line is printed every 30 s.
    """
    with _bar(console) as (bar, task):
        stage, began, bytes_before, last_line = "", 0.0, 0, time.monotonic()

        def report(progress: Progress) -> None:
            nonlocal stage, began, bytes_before, last_line
            now = time.monotonic()
            if progress.stage != stage:
                # What earlier starts have tokenized was reported before, and does not count for the speed.
                stage, began, bytes_before = progress.stage, now, progress.num_bytes
                bar.reset(task, description=stage)
            rate = (progress.num_bytes - bytes_before) / 1e6 / max(now - began, 1e-3)
            counts = f"{progress.num_documents:,} documents  {progress.num_tokens:,} tokens"
            counts += f"  {rate:.1f} MB/s" if stage == "tokenizing" else ""
            done = None if progress.fraction is None else 100 * progress.fraction
            bar.update(task, completed=done or 0, total=None if done is None else 100, counts=counts)
            if not console.is_terminal and now - last_line > _SECONDS_PER_LINE:
                last_line = now
                console.print(f"{stage}  {'' if done is None else f'{done:.0f} %  '}{counts}")

        yield report


@contextlib.contextmanager
def share_bar(console: Console, description: str) -> Iterator[Callable[[float], None]]:
    """Show a bar; the yielded function takes the share done, from 0 to 1."""
    with _bar(console) as (bar, task):
        bar.reset(task, description=description, total=1.0)
        yield lambda share: bar.update(task, completed=share)


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[tuple[Bar, TaskID]]:
    check_type("console", console, Console, "a rich.console.Console", "Make one with Console().")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield bar, bar.add_task("", total=None, counts="")
