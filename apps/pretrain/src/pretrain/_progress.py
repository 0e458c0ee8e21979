"""What a person sees while a run trains: a live line on a terminal, plain lines elsewhere.

It follows `metrics.jsonl`, so that showing progress costs the workers nothing.
"""

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pretrain._metrics import Record, read_metrics
from pretrain._run import RunFolder

_POLL_S = 0.5


class ProgressDisplay:
    """Shows a run's metrics from its folder until the block ends.

    Args:
        folder: the run's.
        max_steps: the last step.
        console: where to.
    """

    def __init__(self, folder: RunFolder, max_steps: int, console: Console) -> None:
        self._folder, self._max_steps, self._console = folder, max_steps, console
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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        # Records shown already, in earlier commands too, are not shown again.
        self._shown_step = max((record["step"] for record in read_metrics(folder.metrics)), default=-1)
        self._since: tuple[float, int] | None = None

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._bar.stop()

    def _follow(self) -> None:
        size = -1
        while True:
            stopping = self._stop.wait(_POLL_S)
            path = self._folder.metrics
            if path.exists() and path.stat().st_size != size:
                size = path.stat().st_size
                self._show(read_metrics(path))
            if stopping:
                return

    def _show(self, records: list[Record]) -> None:
        if records and records[-1]["step"] < self._shown_step:
            self._shown_step = records[-1]["step"] - 1  # the run went back to a checkpoint
        for record in records:
            if record["step"] > self._shown_step:
                self._shown_step = record["step"]
                self._show_one(record)

    def _show_one(self, record: Record) -> None:
        step, now = record["step"], time.monotonic()
        if self._since is None:
            self._since = (now, step)
        words = [f"{name} {record[key]:.4f}" for name, key in (("loss", "loss"), ("val", "val_loss")) if key in record]
        if "tokens_per_s" in record:
            words.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in record:
            words.append(f"{record['mfu']:.1%} MFU")
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
