"""The command `watch`: what it shows of a run from the run's files alone, without a terminal."""

import contextlib
import dataclasses
import errno
import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from pretrain import PRESETS
from pretrain._commands.watch import _changes, watch
from pretrain._errors import UsageError
from pretrain._output import Output
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history, read_starts, summarize
from pretrain._run.metrics import cut_lines
from pretrain._run.result import write_result
from pretrain._screen.run_view import RunView

BEGAN_S = 1_700_000_000.0


@pytest.fixture
def folder(tmp_path):
    """A run of 1 500 steps, whose workers have just started."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = PRESETS["quickstart"]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=257))
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
    write_description(run, describe(config, data, "local"))
    append_line(run.starts, {"step": 0, "time_s": BEGAN_S, "workers": 1, "devices": 2, "device": "TPU v4"})
    phase(run, "starting", 0)
    return run


def phase(run, name, after_s, step=0):
    append_line(run.phases, {"step": step, "time_s": BEGAN_S + after_s, "phase": name})


def record(run, step, after_s, **metrics):
    append_line(run.metrics, {"step": step, "time_s": BEGAN_S + after_s, **metrics})


def watched(run, *events):
    """The lines of `watch` without a terminal. Each event changes the files, and returns the time after it."""
    out, events, now_s = io.StringIO(), list(events), BEGAN_S

    def sleep(interval_s):
        nonlocal now_s
        if not events:
            raise KeyboardInterrupt
        now_s = BEGAN_S + events.pop(0)()

    try:
        watch(str(run), console=Console(file=out, width=200), clock=lambda: now_s, sleep=sleep)
        code = 0
    except KeyboardInterrupt:
        code = 130
    assert "\x1b" not in out.getvalue()
    return code, out.getvalue().splitlines()


def test_a_run_is_shown_from_its_files_until_it_stops(folder):
    def train():
        phase(folder, "compiling", 10)
        record(folder, 0, 11, val_loss=5.5)
        phase(folder, "training", 12)
        record(folder, 25, 14, loss=3.0, step_s=0.1, tokens_per_s=1024.0)
        return 14

    def stop():
        record(folder, 50, 17, loss=2.0, step_s=0.1, tokens_per_s=1024.0)
        phase(folder, "stopped", 17, 50)
        return 17

    assert watched(folder, train, stop) == (
        0,
        [
            "starting",
            f"watching {folder}, started on local",
            "compiling",
            "step    0/1500               val loss 5.5000",
            "step   25/1500  loss 3.0000                     1,024 tokens/s  left 2:27",
            "about 2:27 for the other 1,475 steps, 100 ms each",
            "step   50/1500  loss 2.0000                     1,024 tokens/s  left 2:54",
            "the run is stopped at step 50: run the same command again to continue",
        ],
    )


def test_a_view_counts_the_restarts_and_the_time_of_work_of_all_commands(folder):
    append_line(folder.starts, {"step": 20, "time_s": BEGAN_S + 100, "workers": 1, "devices": 2, "device": "TPU v4"})
    for name, after_s in (("training", 10), ("stopped", 30), ("training", 100)):
        phase(folder, name, after_s, 20)
    view = RunView.of(read_history(folder), is_local=True, clock=lambda: BEGAN_S + 105)
    assert (view.num_restarts, view.elapsed_s(), view.phase_s()) == (1, 35.0, 5.0)


def test_a_failed_run_ends_with_the_advice_to_continue(folder):
    def fail():
        phase(folder, "failed", 17)
        return 17

    _, lines = watched(folder, fail)
    assert lines[-1] == "the run has failed at step 0: run the same command again to continue"


def test_a_finished_run_ends_with_its_numbers(folder):
    def finish():
        record(folder, 1500, 200, loss=1.6, val_loss=1.62, full_val_loss=1.5117, full_val_bits_per_byte=2.1809)
        phase(folder, "finished", 200, 1500)
        write_result(folder, summarize(read_history(folder)))
        return 200

    code, lines = watched(folder, lambda: 10, finish)
    assert code == 0
    assert "val loss       1.5117 on all validation tokens, as `eval` prints" in lines
    assert lines[-4].split()[-2] == "sample"


def test_a_finished_run_is_not_waited_for_forever(folder):
    """A driver that was killed writes no result."""
    record(folder, 1500, 200, loss=1.6)
    phase(folder, "finished", 200, 1500)
    code, lines = watched(folder, lambda: 210, lambda: 231)
    assert (code, lines[-1]) == (0, "the run is finished at step 1500: run the same command again for its result")


def test_a_silent_run_is_told_and_watched_until_it_lives_again(folder):
    def live_again():
        phase(folder, "restarting", 300)
        phase(folder, "compiling", 420)
        return 421

    code, lines = watched(folder, lambda: 299, lambda: 301, live_again)
    assert code == 130  # Ctrl-C
    assert lines[-2:] == ["no sign of life for 5 min", "compiling"]


def test_a_restarted_run_shows_the_repeated_steps(folder):
    for step in (10, 20, 30):
        record(folder, step, step, loss=3.0)

    def restart():
        phase(folder, "restarting", 30, 30)
        phase(folder, "compiling", 40, 20)
        cut_lines(folder.metrics, 19)
        record(folder, 20, 41, loss=3.0)
        record(folder, 30, 42, loss=3.0)
        return 42

    _, lines = watched(folder, restart)
    assert lines[2:] == [
        "step   30/1500  loss 3.0000",
        "restarting",
        "continuing from step 20",
        "compiling",
        "step   20/1500  loss 3.0000",
        "step   30/1500  loss 3.0000",
    ]


def test_a_run_that_cannot_be_read_for_a_while_is_read_later(folder):
    def fail():
        phase(folder, "stopped", 4, 10)
        folder.metrics.mkdir()
        return 5

    def recover():
        folder.metrics.rmdir()
        record(folder, 10, 4, loss=3.0)
        return 10

    code, lines = watched(folder, fail, recover)
    assert lines[2].startswith(f"{folder} cannot be read, the next attempt follows: [Errno 21] Is a directory")
    stopped = "the run is stopped at step 10: run the same command again to continue"
    assert (code, lines[3:]) == (0, ["step   10/1500  loss 3.0000", stopped])


def test_a_change_that_could_not_be_read_is_read_later_without_another_change(folder, monkeypatch):
    """As over a network that fails for a moment."""
    failures = []

    def read_or_fail(run):
        if failures:
            raise OSError(errno.EIO, "Input/output error")
        return read_starts(run)

    def change():
        record(folder, 10, 4, loss=3.0)
        failures.append(True)
        return 5

    def recover():
        failures.clear()
        return 10

    monkeypatch.setattr("pretrain._commands.watch.read_starts", read_or_fail)
    _, lines = watched(folder, change, recover)
    assert lines[2:] == [
        f"{folder} cannot be read, the next attempt follows: [Errno 5] Input/output error",
        "step   10/1500  loss 3.0000",
    ]


def test_a_watch_ends_when_the_reader_of_its_output_has_closed_it(folder):
    """As `pretrain watch RUN | head -1`. The run is in training, and was killed."""
    phase(folder, "training", 12)
    read_end, write_end = os.pipe()
    waited = []

    def sleep(interval_s):
        assert len(waited) < 3, "the watch goes on"
        waited.append(interval_s)
        with contextlib.suppress(OSError):
            os.close(read_end)

    file = os.fdopen(write_end, "w")
    with pytest.raises(BrokenPipeError):
        watch(str(folder.path), console=Output(file=file), clock=lambda: BEGAN_S + 400 + 60 * len(waited), sleep=sleep)
    with contextlib.suppress(OSError):  # the file tries once more to write
        file.close()


def test_a_silent_training_is_told_each_minute(folder):
    phase(folder, "training", 12)
    _, lines = watched(folder, lambda: 301, lambda: 320, lambda: 373)
    assert lines == [f"watching {folder}, started on local", "no sign of life for 5 min", "no sign of life for 6 min"]


@pytest.mark.parametrize("name", ["config", "metrics", "starts", "phases", "samples", "scores", "result"])
def test_a_change_of_any_file_of_the_run_is_seen_once(name: str, folder: RunFolder) -> None:
    has_changed = _changes(folder)
    assert not has_changed()
    with getattr(folder, name).open("a") as file:
        file.write("\n")
    assert [has_changed(), has_changed()] == [True, False]


def test_a_run_that_does_not_exist_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="run must be the folder or URI of a run"):
        watch(str(tmp_path / "absent"), console=Console(quiet=True))


def test_the_time_left_of_a_run_that_another_command_continues_is_that_of_its_steps(folder):
    """The hours in which no command ran, and the steps before them, do not count."""
    for name, after_s, step in (
        ("training", 1, 0),
        ("stopped", 31, 30),
        ("starting", 9000, 30),
        ("training", 9010, 30),
    ):
        phase(folder, name, after_s, step)
    for step, after_s in ((20, 21), (30, 31), (40, 9020), (50, 9029)):
        record(folder, step, after_s, loss=3.0, step_s=1.0)
    view = RunView.of(read_history(folder), is_local=True, clock=lambda: BEGAN_S + 9029)
    assert view.left_s() == pytest.approx(1450 * 0.9)
    assert view.start_step == 30


def test_a_watch_that_begins_later_does_not_tell_the_earlier_start(folder):
    for name, after_s in (("restarting", 5), ("loading", 9), ("training", 12)):
        phase(folder, name, after_s, 20)
    record(folder, 25, 14, loss=3.0)

    def train():
        record(folder, 50, 16, loss=2.0)
        return 16

    _, lines = watched(folder, train)
    assert lines[1:] == ["step   25/1500  loss 3.0000", "step   50/1500  loss 2.0000"]


def test_a_change_that_keeps_the_size_of_a_file_is_seen(folder):
    record(folder, 10, 4, loss=3.0)
    os.utime(folder.metrics, ns=(0, 10**18))

    def rewrite():
        folder.metrics.write_text(folder.metrics.read_text().replace("3.0", "2.0"))
        os.utime(folder.metrics, ns=(0, 10**18 + 10**6))
        return 5

    _, lines = watched(folder, rewrite)
    assert lines[2:] == ["step   10/1500  loss 3.0000", "step   10/1500  loss 2.0000"]


def test_the_files_are_looked_at_as_often_as_asked(folder):
    waited = []

    def sleep(interval_s):
        waited.append(interval_s)
        phase(folder, "stopped", 5)

    watch(str(folder), console=Console(quiet=True), interval_s=0.3, clock=lambda: BEGAN_S + 6, sleep=sleep)
    assert waited == [0.3]


def test_a_run_whose_workers_have_not_started_has_no_restart(folder):
    folder.starts.unlink()
    assert RunView.of(read_history(folder), is_local=False).num_restarts == 0


def test_ctrl_c_ends_a_watch_with_its_own_exit_code(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "pretrain", "watch", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert any(line.startswith("watching ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "interrupted\n")
