"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

import logging
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from owt_data import Progress as Preparation
from pretrain._run.metrics import Record

_logger = logging.getLogger("pretrain")


class Tokenizing:
    """The last progress of a preparation in another thread."""

    def __init__(self) -> None:
        self.last: Preparation | None = None

    def __call__(self, progress: Preparation) -> None:
        """Note the progress."""
        self.last = progress

    def summary(self) -> str:
        """Return the share of the text that is tokenized; an empty text after the end."""
        if self.last is None or self.last.stage != "tokenizing" or self.last.fraction == 1:
            return ""
        if self.last.fraction is None:
            return f"{self.last.num_tokens:,} tokens tokenized"
        return f"{self.last.fraction:.0%} tokenized"


class ProgressDisplay:
    """A display of the records of a run, until the block ends.

    Args:
        max_steps: the last step.
        console: the output.
        tokenizing: the preparation of the tokens, if it goes on during the run.
    """

    def __init__(self, max_steps: int, console: Console, tokenizing: "Tokenizing | None" = None) -> None:
        self._max_steps, self._console, self._tokenizing = max_steps, console, tokenizing
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting the workers", total=max_steps)
        self._since: tuple[float, int] | None = None

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, record: Record) -> None:
        """Show a record. After a restart from a checkpoint, the step may be an earlier one.

        If standard output cannot be written any more, the run goes on without it.
        """
        if self._console.quiet:
            return
        try:
            self._show(record)
        except OSError as error:
            _logger.warning("standard output cannot be written (%s); the run goes on without it", error.strerror)
            self._console.quiet = True

    def _show(self, record: Record) -> None:
        step, now = record["step"], time.monotonic()
        if self._since is None or step < self._since[1]:
            self._since = (now, step)
        words = [f"{name} {record[key]:.4f}" for name, key in (("loss", "loss"), ("val", "val_loss")) if key in record]
        if "epoch" in record:
            words.insert(0, f"epoch {record['epoch']:.2f}")
        if "tokens_per_s" in record:
            words.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in record:
            words.append(f"{record['mfu']:.1%} MFU")
        if self._tokenizing is not None and (tokenized := self._tokenizing.summary()):
            words.append(tokenized)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description="  ".join(words))
            if "val_loss" in record:
                self._console.print(f"step {step}: validation loss {record['val_loss']:.4f}", highlight=False)
            return
        started, first = self._since
        if step > first:
            left_s = (now - started) / (step - first) * (self._max_steps - step)
            words.append(f"left {int(left_s) // 60}:{int(left_s) % 60:02d}")
        self._console.print(f"step {step}/{self._max_steps}  {'  '.join(words)}", highlight=False, soft_wrap=True)
