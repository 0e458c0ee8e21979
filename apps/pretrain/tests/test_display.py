"""The lines of a run where the output is no terminal, and outputs that cannot be written."""

import contextlib
import io
import logging
import os
import sys
import threading
import time

import pytest
from rich.console import Console

from owt_data import Progress
from pretrain._output import Output
from pretrain._run.history import Phase
from pretrain._screen.display import Display
from pretrain._screen.printing import waiting
from pretrain._screen.run_view import RunView, Tokenizing

BEGAN_S = 1_700_000_000.0


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.time_s = BEGAN_S

    def __call__(self):
        return self.time_s


def printed(feed, **arguments):
    """The lines that a display prints, while the function feeds it."""
    out, clock = io.StringIO(), Clock()
    view = RunView(1500, clock=clock, **arguments)
    view.enter("starting")
    with Display(view, Console(file=out, width=80)) as display:
        feed(display, clock)
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def phase(name, after_s, step=0):
    return {"step": step, "time_s": BEGAN_S + after_s, "phase": name}


def record(step, after_s, **metrics):
    return {"step": step, "time_s": BEGAN_S + after_s, "epoch": step / 1000} | metrics


RATES = {"tokens_per_s": 18432.4, "step_s": 0.1, "mfu": 0.3124}


def test_records_are_lines_whose_numbers_stand_below_each_other():
    def feed(display, clock):
        display.add(phase("compiling", 20))
        display.add(record(0, 22, val_loss=5.5521))
        display.add(phase("training", 22, 1))
        for step, loss in ((25, 3.4321), (250, 1.9321)):
            clock.time_s = BEGAN_S + 20 + step / 10
            val = {"val_loss": 1.8992} if step == 250 else {}
            display.add(record(step, 20 + step / 10, loss=loss, **RATES, **val))

    assert printed(feed) == [
        "starting the workers",
        "compiling",
        "step    0/1500  epoch 0.00               val loss 5.5521",
        "step   25/1500  epoch 0.03  loss 3.4321                    18,432 tokens/s  MFU 31.2%  left 2:27",
        "about 2:27 for the other 1,475 steps, 100 ms each",
        "step  250/1500  epoch 0.25  loss 1.9321  val loss 1.8992   18,432 tokens/s  MFU 31.2%  left 2:05",
    ]


def test_the_losses_of_a_mixture_stand_at_the_end_of_a_line():
    def feed(display, clock):
        display.add(record(0, 22, val_loss=5.5521) | {"val_loss/web": 5.5, "val_loss/code": 5.61234})
        display.add(record(25, 23, loss=3.4321))

    assert printed(feed)[1:] == [
        "step    0/1500  epoch 0.00               val loss 5.5521  web 5.5000  code 5.6123",
        "step   25/1500  epoch 0.03  loss 3.4321",
    ]


def test_a_spike_and_a_skipped_step_get_a_line_with_the_command_that_looks_into_them():
    def feed(display, clock):
        display.add(record(300, 1, loss=2.0, spike_step=288, spike_score=12.345))
        display.add(record(325, 2, loss=2.0, skipped_step=301))
        display.add(record(300, 3, loss=2.0, spike_step=288, spike_score=12.345))  # of a restart from its checkpoint
        display.add(record(325, 4, loss=2.0, skipped_step=301))
        display.add(record(350, 5, loss=2.0))

    lines = [line for line in printed(feed, blame="pretrain blame first") if "blame" in line]
    assert lines == [
        "the loss of step 288 is 12 deviations above the median before it: pretrain blame first --step 288",
        "step 301 was skipped, because its loss or gradient is not finite: pretrain blame first --step 301",
    ]


@pytest.fixture
def utc(monkeypatch):
    """The local time is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_line_begins_with_the_time_where_the_output_is_no_terminal(utc, is_terminal):
    out, clock = io.StringIO(), Clock()
    view = RunView(1500, clock=clock)
    view.enter("starting")
    console = Console(file=out, width=120, force_terminal=is_terminal, force_interactive=is_terminal)
    with Display(view, console, with_time=True) as display:
        display.add(phase("training", 10))
        clock.time_s += 59
        display.add(record(25, 59, loss=3.4321, val_loss=3.5, **RATES))
        clock.time_s += 3600
        display.print("a line", "another")
    lines = out.getvalue().splitlines()
    if is_terminal:
        assert not any("22:14:19  " in line for line in lines)
        return
    assert lines == [
        "22:13:20  starting the workers",
        "22:14:19  step   25/1500  epoch 0.03  loss 3.4321  val loss 3.5000   18,432 tokens/s  MFU 31.2%  left 2:27",
        "22:14:19  about 2:27 for the other 1,475 steps, 100 ms each",
        "23:14:19  a line",
        "23:14:19  another",
    ]


def test_a_phase_has_a_line_if_it_takes_long():
    def feed(display, clock):
        display.add(phase("starting", -9))  # worker 0 tells the start of the command
        display.add(phase("training", 10))
        display.add(phase("evaluating", 20, 250))
        clock.time_s = BEGAN_S + 21
        display.refresh()  # a second is no news
        display.add(phase("saving", 21, 250))
        clock.time_s = BEGAN_S + 30
        display.refresh()
        display.refresh()
        display.add(phase("training", 30, 250))
        clock.time_s = BEGAN_S + 60
        display.refresh()

    assert printed(feed, is_local=True) == ["starting", "saving"]


def test_a_restart_tells_the_step_from_which_the_run_continues():
    def feed(display, clock):
        display.add(phase("compiling", 1))
        display.add(record(40, 2, loss=2.0))
        display.add(phase("restarting", 3, 40))
        display.add(phase("starting", 8, 40))
        display.add(phase("loading", 9, 20))
        display.add(phase("compiling", 10, 20))
        display.add(record(30, 11, loss=2.5))

    assert printed(feed) == [
        "starting the workers",
        "compiling",
        "step   40/1500  epoch 0.04  loss 2.0000",
        "restarting",
        "starting the workers",
        "continuing from step 20",
        "compiling",
        "step   30/1500  epoch 0.03  loss 2.5000",
    ]


def test_the_time_left_is_that_of_the_steps_since_the_start():
    """A run that continues at step 1000 does not know how long the steps before it took."""
    clock = Clock()
    view = RunView(1500, clock=clock)
    view.add_record(record(990, -5000, loss=2.0, **RATES))
    view.enter("starting")
    assert view.left_s() is None
    view.add_record(record(1000, 10, loss=2.0, **RATES))
    clock.time_s = BEGAN_S + 10
    assert view.left_s() == pytest.approx(50.0)  # 500 steps of 0.1 s
    view.add_record(record(1100, 30, loss=2.0, **RATES))  # with an evaluation
    clock.time_s = BEGAN_S + 32
    assert view.left_s() == pytest.approx(78.0)  # 400 steps of 0.2 s, less 2 s


def test_the_time_of_a_restart_does_not_count_for_the_steps():
    clock = Clock()
    view = RunView(1500, clock=clock)
    view.add_phase(Phase(step=20, time_s=BEGAN_S + 100, phase="restarting"))
    view.add_phase(Phase(step=20, time_s=BEGAN_S + 130, phase="loading"))
    view.add_record(record(20, 90, loss=2.0, **RATES))  # of the checkpoint
    assert view.left_s() is None
    view.add_record(record(30, 140, loss=2.0, **RATES))
    clock.time_s = BEGAN_S + 140
    assert view.left_s() == pytest.approx(147.0)


def test_the_losses_of_steps_that_are_done_again_replace_the_former_ones():
    view = RunView(1500, clock=Clock())
    for step, loss in ((10, 3.0), (20, 2.5), (30, 2.0), (20, 2.25)):
        view.add_record(record(step, step, loss=loss, val_loss=loss + 1))
    assert view.losses.points == [(10, 3.0), (20, 2.25)]
    assert view.val_losses.points == [(10, 4.0), (20, 3.25)]


def test_a_stream_shows_how_much_text_is_tokenized():
    tokenizing = Tokenizing()

    def feed(display, clock):
        tokenizing(Progress(stage="tokenizing", num_documents=1, num_tokens=10, num_bytes=10, fraction=0.45))
        display.add(record(25, 1, loss=2.0))

    assert (
        printed(feed, tokenizing=tokenizing)[-1]
        == "step   25/1500  epoch 0.03  loss 2.0000" + " " * 19 + "45% tokenized"
    )


def full():
    return open("/dev/full", "w")  # noqa: PTH123


def without_reader():
    read_end, write_end = os.pipe()
    os.close(read_end)
    return os.fdopen(write_end, "w")


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
@pytest.mark.parametrize("output", [full, without_reader])
def test_a_run_goes_on_without_standard_output(output, caplog, record_property):
    record_property("fault", f"standard output is {output.__name__.replace('_', ' a ')} while a run trains")
    record_property("lost", "the lines that the command prints")
    file = output()
    with Display(RunView(10), Output(file=file)) as display:
        display.add({"step": 1, "loss": 2.0})
        display.add({"step": 2, "loss": 2.0})
    (warning,) = caplog.messages
    assert warning.startswith("standard output cannot be written (")
    assert warning.endswith("); the run goes on without it")
    with contextlib.suppress(OSError):  # the file tries once more to write
        file.close()


def test_a_phase_that_takes_long_again_has_a_line_again():
    def feed(display, clock):
        for began_s in (10, 40):
            display.add(phase("training", began_s - 5))
            display.add(phase("saving", began_s, 250))
            clock.time_s = BEGAN_S + began_s + 3
            display.refresh()
        display.add(phase("finished", 50, 1500))
        clock.time_s = BEGAN_S + 99
        display.refresh()  # the end has lines of its own

    assert printed(feed, is_local=True) == ["starting", "saving", "saving"]


def test_a_line_of_another_program_is_shown_as_it_is():
    line = "worker 0 of 2: node 10.0.0.1, 1 device ([red]) " + "x" * 90

    def feed(display, clock):
        display.print(line, "a second [bold]line[/bold]")

    assert printed(feed)[1:] == [line, "a second [bold]line[/bold]"]


def test_the_last_step_has_no_estimate_of_further_steps():
    def feed(display, clock):
        display.add(phase("training", 1, 1490))
        display.add(record(1500, 2, loss=2.0, **RATES))

    assert printed(feed)[1:] == [
        "continuing from step 1490",
        "step 1500/1500  epoch 1.50  loss 2.0000                    18,432 tokens/s  MFU 31.2%  left 0:00",
    ]


def test_a_display_reads_no_log_and_leaves_no_thread():
    logger = logging.getLogger("ray_jax_launch")
    before = [*logger.filters], [*logger.handlers]
    for _ in range(2):
        with Display(RunView(10), Console(file=io.StringIO())):
            assert ([*logger.filters], [*logger.handlers]) == before
            assert [thread.name for thread in threading.enumerate()].count("display") == 1
        assert ([*logger.filters], [*logger.handlers]) == before
        assert "display" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("steps", "now_s", "left_s"),
    [
        ((990, 1000), 20, 50),  # 500 steps of 0.1 s
        ((990, 1000), 15, 50),  # the clock of worker 0 is ahead
        ((990, 1000), 99, 0),
        ((1490, 1500), 20, 0),
    ],
)
def test_the_time_left_is_never_below_zero_nor_above_that_of_the_steps(steps, now_s, left_s):
    clock = Clock()
    view = RunView(1500, clock=clock)
    for step, after_s in zip(steps, (19, 20), strict=True):
        view.add_record(record(step, after_s, loss=2.0, **RATES))
    clock.time_s = BEGAN_S + now_s
    assert view.left_s() == pytest.approx(left_s)


def test_a_start_began_when_the_command_did():
    """Worker 0 tells the start of the command once more, with an earlier time."""
    clock = Clock()
    view = RunView(10, clock=clock)
    view.enter("starting")
    view.add_phase(Phase(step=0, time_s=BEGAN_S - 9, phase="starting"))
    clock.time_s = BEGAN_S + 1
    assert view.phase_s() == 10
    view.add_phase(Phase(step=0, time_s=BEGAN_S + 1, phase="loading"))
    assert (view.phase_s(), view.label()) == (0, "loading the model")


def test_damaged_files_without_phases_are_those_of_a_training():
    view = RunView(10, clock=Clock())
    assert (view.label(), view.elapsed_s()) == ("starting the workers", None)
    view.add_record({"step": 3, "loss": 2.0})
    assert (view.label(), view.phase_s(), view.elapsed_s(), view.step) == ("training", 0, None, 3)


@pytest.mark.parametrize(
    ("stage", "fraction", "text"),
    [
        ("reading", 0.5, ""),
        ("checking", 0.07, "7% tokenized"),
        ("tokenizing", 0.998, "100% tokenized"),
        ("tokenizing", None, "12,345 tokens tokenized"),
        ("tokenizing", 1.0, ""),
        ("assembling", 0.5, ""),
    ],
)
def test_the_share_that_is_tokenized_is_told_until_the_end(stage, fraction, text):
    tokenizing = Tokenizing()
    assert tokenizing.summary() == ""
    tokenizing(Progress(stage=stage, num_documents=3, num_tokens=12_345, num_bytes=99_999, fraction=fraction))
    assert tokenizing.summary() == text


def test_a_wait_without_a_terminal_has_a_line():
    out = io.StringIO()
    with waiting(Console(file=out, width=20), "starting Ray on [two] machines"):
        assert out.getvalue() == "starting Ray on [two] machines\n"
    assert out.getvalue() == "starting Ray on [two] machines\n"


def test_a_run_that_continues_counts_the_work_of_both_commands():
    """The second command began before it could tell it, and long after the end of the first."""
    clock = Clock()
    view = RunView(1500, clock=clock)
    view.add_phase(Phase(step=0, time_s=BEGAN_S - 900, phase="training"))
    view.enter("stopped", BEGAN_S - 870)
    view.enter("starting", BEGAN_S - 5)
    clock.time_s = BEGAN_S + 2
    assert (view.elapsed_s(), view.phase_s()) == (37, 7)


def test_steps_that_are_done_again_are_timed_again():
    """Damaged files may have no phase of the restart."""
    clock = Clock()
    view = RunView(1500, clock=clock)
    for step, after_s in ((10, 1), (500, 2), (100, 600), (200, 620)):
        view.add_record(record(step, after_s, loss=2.0, **RATES))
    clock.time_s = BEGAN_S + 620
    assert view.left_s() == pytest.approx(1300 * 0.2)


def test_records_without_a_time_tell_the_time_left_by_the_time_of_a_step():
    view = RunView(1500, clock=Clock())
    for step in (100, 500):
        view.add_record({"step": step, "step_s": 0.5})
    assert view.left_s() == 500
