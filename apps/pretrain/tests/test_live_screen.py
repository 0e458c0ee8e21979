"""The live view on a real terminal: a pseudo terminal, whose output an emulator draws."""

import contextlib
import fcntl
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time

import pyte
import pytest
from rich.console import Console

from owt_data import Progress
from pretrain._output import log_lines
from pretrain._run.history import Phase
from pretrain._screen.display import Display
from pretrain._screen.live_screen import live_screen
from pretrain._screen.printing import waiting
from pretrain._screen.run_view import RunView, Tokenizing
from ray_jax_launch import Restarting, WaitingForNodes

BEGAN_S = 1_700_000_000.0
WITHIN_S = 30.0


class Terminal:
    """A pseudo terminal. A thread reads it and feeds the emulator."""

    def __init__(self, columns, lines):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        size = os.get_terminal_size(self.file.fileno())
        self.console = Console(file=self.file, width=size.columns, height=size.lines)
        self._screen = pyte.Screen(columns, lines)
        self._changed = threading.Condition()
        self._num_titles, self._is_open = 0, True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        stream = pyte.ByteStream(self._screen)
        while self._is_open:
            try:
                output = os.read(self.master, 65536)
            except OSError:  # Linux's end of a pseudo terminal
                output = b""
            if not output:
                return
            with self._changed:
                stream.feed(output)
                self._changed.notify_all()

    def lines(self):
        """The lines of the screen, without the empty ones at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")

    def wait_for(self, text):
        """Wait until a text is on the screen, and return its lines."""
        with self._changed:
            shown = self._changed.wait_for(lambda: any(text in line for line in self.lines()), WITHIN_S)
            assert shown, "\n".join(self.lines())
            return self.lines()

    def settled(self):
        """Return the lines after all output up to now. The title, which no line shows, marks the end of the output."""
        self._num_titles += 1
        title = f"{self._num_titles}"
        self.file.write(f"\x1b]2;{title}\x07")
        self.file.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: self._screen.title == title, WITHIN_S)
            return self.lines()

    def hang_up(self):
        """Close the window. The thread must have left its system call before."""
        self._is_open = False
        self.file.write("\a")
        self.file.flush()
        self._reader.join()
        os.close(self.master)

    def end(self):
        """Close the terminal as its programs do, and return its last lines."""
        self.file.close()
        self._reader.join()
        return self.lines()


@contextlib.contextmanager
def terminal(columns, lines):
    opened = Terminal(columns, lines)
    try:
        yield opened
    finally:
        opened.end()  # the thread must not read the next terminal, which may get the same number
        os.close(opened.master)


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.time_s = BEGAN_S

    def __call__(self):
        return self.time_s


def phase(name, after_s, step=0):
    return {"step": step, "time_s": BEGAN_S + after_s, "phase": name}


def record(step, after_s, **metrics):
    return {"step": step, "time_s": BEGAN_S + after_s, "tokens": step * 1024, "epoch": step / 1000} | metrics


def feed(display, clock):
    """Metrics of a run of 1 500 steps up to step 625."""
    display.add(phase("starting", 0))
    display.add(phase("loading", 30))
    display.add(phase("evaluating", 32))
    display.add(record(0, 35, val_loss=5.5521))
    display.add(phase("compiling", 35))
    display.add(phase("training", 40, 1))
    for step in range(25, 650, 25):
        metrics = {"loss": 1.8 + 100 / step, "tokens_per_s": 18432.4, "step_s": 0.1, "data_wait_s": 0.0042}
        metrics |= {"mfu": 0.3124, "memory_bytes": 3 * 2**29}
        if step % 250 == 0:
            metrics["val_loss"] = 1.7543 + 50 / step
        display.add(record(step, 40 + 0.1 * step, **metrics))
    display.add(phase("restarting", 105, 625))
    display.add(phase("starting", 110, 625))
    display.add(phase("training", 115, 625))
    clock.time_s = BEGAN_S + 125


def test_the_loss_of_the_untrained_model_is_not_that_of_a_run():
    view = RunView(1500, clock=Clock())
    view.add_record(record(0, 1, **{"val_loss": 5.5, "val_loss/web": 5.25}))
    assert shown_losses(view) == ["val loss  5.5000", "web  5.2500"]
    view.add_record(record(25, 2, loss=4.5))
    assert shown_losses(view) == ["loss  4.5000                   val loss       -"]
    view.add_record(record(50, 2, loss=4.25, **{"val_loss": 4.5, "val_loss/web": 4.75}))
    assert shown_losses(view)[1:] == ["web  4.7500"]


def shown_losses(view):
    """The lines of the live view that have a loss."""
    console = Console(file=io.StringIO(), width=80, legacy_windows=False)
    console.print(live_screen(view, console.options))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.startswith(("loss", "val", "web"))]


SCREENS = {
    (40, 20): """
step 0  val loss 5.5521
about 2:27 for the other 1,475 steps,
100 ms each
step 250  loss 2.2000  val loss 1.9543
step 500  loss 2.0000  val loss 1.8543
continuing from step 625
training          step   625/1,500
━━━━━━━━╺━━━━━━━━━━━   42%
loss  1.9600 █▅▃▁  val loss  1.8543 █▁▁
 18,432 tokens/s  MFU 31.2%  epoch  0.62
data wait   4%  memory  1.5 GiB""",
    (80, 24): """
step 0  val loss 5.5521
about 2:27 for the other 1,475 steps, 100 ms each
step 250  loss 2.2000  val loss 1.9543
step 500  loss 2.0000  val loss 1.8543
continuing from step 625
training          step   625/1,500  elapsed    2:05  1 restart
━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━   42%
loss  1.9600 █▇▆▅▅▄▄▃▃▂▂▂▂▁▁▁  val loss  1.8543 █▁▁
 18,432 tokens/s  MFU 31.2%  data wait   4%  memory  1.5 GiB  epoch  0.62""",
    (130, 24): """
step 0  val loss 5.5521
about 2:27 for the other 1,475 steps, 100 ms each
step 250  loss 2.2000  val loss 1.9543
step 500  loss 2.0000  val loss 1.8543
continuing from step 625
training          step   625/1,500  elapsed    2:05  1 restart
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━   42%
loss  1.9600 █▄▃▃▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁       val loss  1.8543 █▁▁
 18,432 tokens/s  MFU 31.2%  data wait   4%  memory  1.5 GiB  epoch  0.62""",
}


@pytest.mark.parametrize("size", SCREENS)
def test_a_terminal_of_any_width_shows_whole_numbers(size):
    clock = Clock()
    with terminal(*size) as opened:
        with Display(RunView(1500, clock=clock), opened.console) as display:
            feed(display, clock)
            expected, end_s = SCREENS[size].strip("\n").split("\n"), time.monotonic() + WITHIN_S
            display.refresh()
            # The thread of the view may write a frame of an earlier time after this one.
            while (shown := opened.settled()) != expected and time.monotonic() < end_s:
                display.refresh()
        assert shown == expected


def test_the_time_of_a_phase_runs_on_without_any_news():
    clock = Clock()
    view = RunView(1500, clock=clock)
    view.enter("starting")
    with terminal(80, 24) as opened, Display(view, opened.console):
        clock.time_s += 12
        opened.wait_for("starting the workers 12 s")
        clock.time_s += 60
        opened.wait_for("starting the workers 1:12")


def test_the_live_view_leaves_no_trace():
    clock = Clock()
    with terminal(80, 24) as opened:
        with Display(RunView(1500, clock=clock), opened.console) as display:
            feed(display, clock)
            assert "18,432 tokens/s" in opened.settled()[-1]
        opened.console.print("the end")
        assert opened.end() == [
            "step 0  val loss 5.5521",
            "about 2:27 for the other 1,475 steps, 100 ms each",
            "step 250  loss 2.2000  val loss 1.9543",
            "step 500  loss 2.0000  val loss 1.8543",
            "continuing from step 625",
            "the end",
        ]


def test_lines_of_the_launcher_stand_above_the_live_view():
    with terminal(80, 24) as opened, Display(RunView(10), opened.console) as display, log_lines(display.print):
        logging.getLogger("ray_jax_launch").info("worker 0 of 1: node 10.0.0.1")
        first, second, *_ = opened.settled()
    assert first == "worker 0 of 1: node 10.0.0.1"
    assert second.startswith("starting the workers")


WARN = """
import logging, sys
from rich.console import Console
from pretrain._output import show_warnings
from pretrain._screen.display import Display
from pretrain._screen.live_screen import live_screen
from pretrain._screen.run_view import RunView

show_warnings()
with Display(RunView(10), Console()):
    logging.getLogger("pretrain").warning("the run goes on without a tracker")
    logging.getLogger("ray_jax_launch").warning("worker 0 died")
    logging.getLogger("pretrain").warning("a last warning")
    sys.stdout.flush()
    sys.stdin.readline()
"""


@pytest.mark.parametrize("is_in_file", [False, True])
def test_warnings_stand_above_the_live_view_or_in_their_file(is_in_file, tmp_path):
    warnings = ["the run goes on without a tracker", "worker 0 died", "a last warning"]
    errors = tmp_path / "errors"
    with terminal(80, 24) as opened, errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", WARN], text=True, stdin=subprocess.PIPE, stdout=opened.file,
            stderr=file if is_in_file else opened.file, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )  # fmt: skip
        try:
            opened.wait_for("step  0/10" if is_in_file else "a last warning")
            opened.wait_for("step  0/10")
        finally:
            process.communicate("\n", timeout=WITHIN_S)
        lines = opened.settled()
    assert errors.read_text().splitlines() == (warnings if is_in_file else [])
    assert lines == ([""] if is_in_file else warnings)


def test_a_run_goes_on_when_its_terminal_is_closed():
    opened = Terminal(80, 24)
    with Display(RunView(10), opened.console) as display:
        opened.wait_for("step  0/10")
        opened.hang_up()
        display.add({"step": 1, "loss": 2.0})
        display.add({"step": 2, "loss": 2.0, "val_loss": 2.0})
    assert display.view.step == 2
    with contextlib.suppress(OSError):  # the file tries once more to write
        opened.file.close()


def test_a_failure_of_the_view_is_a_warning_and_the_run_goes_on(caplog):
    def broken_clock():
        raise RuntimeError("no time")

    view = RunView(10)
    with terminal(80, 24) as opened, Display(view, opened.console) as display:
        view.enter("starting")
        view.clock = broken_clock
        display._thread.join(WITHIN_S)
        view.clock = Clock()
        display.add({"step": 1, "loss": 2.0})
        opened.wait_for("loss  2.0000")
    assert caplog.messages == ["the run goes on without its live view: no time"]


@pytest.mark.parametrize(("columns", "line"), [(80, "web  1.9000  code  1.2500"), (20, "web  1.9000")])
def test_the_last_losses_of_a_mixture_have_a_line_of_their_own(columns, line):
    view = RunView(1500, clock=Clock())
    view.add_record(record(630, 126, loss=1.75, val_loss=1.6) | {"val_loss/web": 1.9, "val_loss/code": 1.25})
    view.add_record(record(640, 128, loss=1.7))
    console = Console(file=io.StringIO(), width=columns)
    console.print(live_screen(view, console.options))
    assert isinstance(console.file, io.StringIO)
    assert line in [one.strip() for one in console.file.getvalue().splitlines()]


def test_a_terminal_without_the_characters_gets_no_sparkline():
    clock = Clock()
    with terminal(80, 24) as opened:
        opened.file.reconfigure(encoding="ascii")
        with Display(RunView(1500, clock=clock), opened.console) as display:
            feed(display, clock)
            display.refresh()
            shown = opened.settled()
    assert shown[-2] == "loss  1.9600                   val loss  1.8543"
    assert all(line.isascii() for line in shown)


def test_a_wait_before_the_run_has_its_time():
    with terminal(80, 24) as opened:
        with waiting(opened.console, "starting Ray"):
            opened.wait_for("starting Ray 0 s")
        assert opened.end() == [""]


def test_a_restart_is_shown_while_no_worker_can_tell_it():
    clock = Clock()
    with terminal(80, 24) as opened, Display(RunView(1500, clock=clock), opened.console) as display:
        feed(display, clock)
        display.add_event(Restarting("failure", "worker 0 died", 1))
        clock.time_s += 7
        opened.wait_for("restarting 7 s")


def test_a_wait_for_nodes_is_no_restart():
    clock = Clock()
    with terminal(80, 24) as opened, Display(RunView(1500, clock=clock), opened.console) as display:
        feed(display, clock)
        phase = display.view.phase
        display.add_event(WaitingForNodes(240.0))
        assert display.view.phase == phase


def test_a_phase_of_another_clock_does_not_last_less_than_no_time():
    clock = Clock()
    view = RunView(10, clock=clock)
    view.add_phase(Phase(step=0, time_s=BEGAN_S + 5, phase="compiling"))
    assert view.phase_s() == 0.0


def test_a_long_time_left_and_the_text_that_is_tokenized_are_shown():
    clock, tokenizing = Clock(), Tokenizing()
    tokenizing(Progress(stage="tokenizing", fraction=0.45))
    view = RunView(15_000, clock=clock, tokenizing=tokenizing)
    for began_s in (0, 50):
        view.add_phase(Phase(step=7, time_s=BEGAN_S + began_s, phase="restarting"))
    view.add_phase(Phase(step=7, time_s=BEGAN_S + 60, phase="training"))
    for step in (1500, 3000):
        view.add_record(record(step, step, loss=2.0, tokens_per_s=1e9, step_s=1.0, data_wait_s=1.5))
    clock.time_s = BEGAN_S + 3001
    with terminal(100, 24) as opened, Display(view, opened.console) as display:
        display.show_newest()  # the live view has it already
        lines = opened.settled()
    assert lines == [
        "training          step  3,000/15,000  elapsed   50:01  2 restarts",
        "━" * 16 + "╺" + "━" * 63 + "   20%  left 3:19:59",
        "loss  2.0000 ▁▁",
        "     1B tokens/s  data wait 100%  45% tokenized  epoch  3.00",
    ]


def test_a_notice_stands_in_the_place_of_the_phase_and_its_time():
    clock = Clock()
    view = RunView(10, clock=clock)
    view.add_phase(Phase(step=0, time_s=BEGAN_S - 300, phase="compiling"))
    with terminal(80, 24) as opened, Display(view, opened.console) as display:
        assert opened.settled()[0].split("  ")[0] == "compiling 5:00"
        display.notice("no sign of life for 5 min")
        assert opened.settled()[0].split("  ")[0] == "no sign of life for 5 min"
        display.notice("")
        assert opened.settled()[0].split("  ")[0] == "compiling 5:00"
