"""The display of a run while it goes on: a live view on a terminal, plain lines elsewhere."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from pretrain._best_effort import best_effort
from pretrain._formats import clock_time, count, duration, loss
from pretrain._run.history import ENDS, Phase, PhaseName
from pretrain._run.metrics import Record, of_sources
from pretrain._screen.live_screen import live_screen
from pretrain._screen.run_view import RunView
from ray_jax_launch import Event, Restarting

_REFRESH_EVERY_S = 0.25
# Without a terminal, these phases get a line at once, and others after some seconds.
_LINES_AT_ONCE: tuple[PhaseName, ...] = ("starting", "compiling", "restarting")
_LINE_AFTER_S = 2.0
_NO_LINES: tuple[PhaseName, ...] = ("training", *ENDS)

_LOSSES = (("loss", "loss"), ("val loss", "val_loss"))

_logger = logging.getLogger("pretrain")


def _go_on(error: OSError) -> None:
    _logger.warning("standard output cannot be written (%s); the run goes on without it", error.strerror)


class Display:
    """A display of a run, until the block ends. Any thread can feed it.

    Args:
        view: the run.
        console: the output.
        on_lost: gets the error, once, when the output cannot be written any more. The display then shows nothing.
        with_time: begin each line with the local time, if the output is no terminal.
    """

    def __init__(
        self,
        view: RunView,
        console: Console,
        *,
        on_lost: Callable[[OSError], None] = _go_on,
        with_time: bool = False,
    ) -> None:
        self.view = view
        self._console = console
        self._on_lost = on_lost
        self._with_time = with_time and not console.is_interactive
        # Standard error on a terminal is shown above the live view. In a file, it stays there.
        is_shown = sys.stderr.isatty()
        self._live = Live(Group(), console=console, auto_refresh=False, transient=True, redirect_stderr=is_shown)
        # Guards the view. No line is printed under this lock, because the console has locks of its own.
        self._lock = threading.Lock()
        # rich computes the height of the live view, and then writes: two threads must not do that at once.
        self._writing = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh_until_stop, name="display", daemon=True)
        self._announced: tuple[str, float | None] | None = None
        self._told_start = view.start_step
        self._told_estimate = False
        self._told_step = view.step  # steps up to this one are not told again

    def __enter__(self) -> "Display":
        self._write(self._live.start if self._console.is_interactive else lambda: None)
        self.refresh()
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._write(self._live.stop)

    def add(self, metrics: dict[str, Any]) -> None:
        """Show a record or a phase, as worker 0 logs them. After a restart, the step may be an earlier one."""
        if "phase" in metrics:
            with self._lock:
                self.view.add_phase(Phase(**metrics))
                lines = self._start_lines()
        else:
            with self._lock:
                self.view.add_record(metrics)
                lines = [*self._start_lines(), *self._record_lines()]
        self.print(*lines)
        self.refresh()

    def add_event(self, event: Event) -> None:
        """Show a restart of the workers, which can tell it themselves only afterwards."""
        if isinstance(event, Restarting):
            with self._lock:
                self.view.enter("restarting")
            self.refresh()

    def show_newest(self) -> None:
        """Print the newest record, if the output is no terminal."""
        if self.view.last and not self._console.is_interactive:
            self.print(plain_line(self.view))

    def notice(self, text: str) -> None:
        """Show a text in place of the phase; an empty text shows the phase."""
        with self._lock:
            self.view.notice = text
        self.refresh()

    def print(self, *lines: str) -> None:
        """Print lines above the live view."""
        wraps = self._console.is_terminal  # between words; elsewhere a line stays whole
        now = time.strftime("%H:%M:%S  ", time.localtime(self.view.clock())) if self._with_time else ""
        for line in (now + line for line in lines):
            self._write(lambda line=line: self._console.print(line, markup=False, highlight=False, soft_wrap=not wraps))

    def refresh(self) -> None:
        """Draw the live view again. Without a terminal, print the phase if it is new and takes long."""
        if self._console.is_interactive:
            with self._lock:
                screen = live_screen(self.view, self._console.options)
            self._write(lambda: self._live.update(screen, refresh=True))
        else:
            with self._lock:
                lines = self._phase_lines()
            self.print(*lines)

    def _start_lines(self) -> list[str]:
        """Return a line if the workers have continued from a checkpoint since the last call."""
        before, self._told_start = self._told_start, self.view.start_step
        return [f"continuing from step {self._told_start}"] if self._told_start and self._told_start != before else []

    def _record_lines(self) -> list[str]:
        view, lines = self.view, []
        if not self._console.is_interactive:
            lines.append(plain_line(view))
        elif "val_loss" in view.last:
            losses = [f"{name} {loss(view.last[key])}" for name, key in _LOSSES if key in view.last]
            lines.append("  ".join((f"step {view.step}", *losses, *_source_losses(view.last))))
        lines += self._bad_step_lines()
        if not self._told_estimate and "step_s" in view.last and (left_s := view.left_s()) is not None:
            self._told_estimate = True
            num_left, step_ms = view.max_steps - view.step, 1000 * view.last["step_s"]
            if num_left:
                lines.append(f"about {duration(left_s)} for the other {num_left:,} steps, {step_ms:,.0f} ms each")
        return lines

    def _bad_step_lines(self) -> list[str]:
        """Return a line for a spike of the loss, and one for a skipped step, with the command that looks into it."""
        last, lines = self.view.last, []
        if (step := last.get("spike_step", 0)) > self._told_step:
            found = f"the loss of step {step} is {last['spike_score']:.0f} deviations above the median before it"
            lines.append(f"{found}: {self.view.blame} --step {step}")
        if (step := last.get("skipped_step", 0)) > self._told_step:
            found = f"step {step} was skipped, because its loss or gradient is not finite"
            lines.append(f"{found}: {self.view.blame} --step {step}")
        self._told_step = max(self._told_step, last["step"])
        return lines

    def _phase_lines(self) -> list[str]:
        label, is_at_once = self.view.label(), bool(self.view.notice) or self.view.phase in _LINES_AT_ONCE
        # The workers tell the start of the command once more, with an earlier time.
        phase = (label, None if is_at_once else self.view.phase_began_s)
        is_notable = is_at_once or self.view.phase_s() >= _LINE_AFTER_S
        if phase == self._announced or not is_notable or (not self.view.notice and self.view.phase in _NO_LINES):
            return []
        self._announced = phase
        return [label]

    def _refresh_until_stop(self) -> None:
        with best_effort("its live view"):
            while not self._stop.wait(_REFRESH_EVERY_S):
                self.refresh()

    def _write(self, action: Any) -> None:
        if self._console.quiet:
            return
        try:
            with self._writing:
                action()
        except OSError as error:
            with self._writing:
                is_first, self._console.quiet = not self._console.quiet, True
            if is_first:
                self._on_lost(error)


def plain_line(view: RunView) -> str:
    """Return the newest record as a line. Its fields align with the line before."""
    last, total = view.last, str(view.max_steps)
    fields = [f"step {last['step']:>{len(total)}}/{total}"]
    if "epoch" in last:
        fields.append(f"epoch {last['epoch']:.2f}")
    fields += [_loss(last, "loss", "loss"), _loss(last, "val_loss", "val loss")]
    if "tokens_per_s" in last:
        fields.append(f"{count(last['tokens_per_s']):>7} tokens/s")
    if "mfu" in last:
        fields.append(f"MFU {last['mfu']:5.1%}")
    if view.tokenizing is not None and (tokenized := view.tokenizing.summary()):
        fields.append(tokenized)
    if "step_s" in last and (left_s := view.left_s()) is not None:
        fields.append(f"left {clock_time(left_s)}")
    return "  ".join([*fields, *_source_losses(last)]).rstrip()


def _source_losses(last: Record) -> list[str]:
    """Return the validation loss of each name of a mixture."""
    return [f"{name} {loss(value)}" for name, value in of_sources(last).items()]


def _loss(last: Record, key: str, name: str) -> str:
    return f"{name} {loss(last[key])}" if key in last else " " * (len(name) + 7)
