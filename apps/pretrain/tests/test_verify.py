"""The command `verify`: two real runs, real kills, and what is left after them."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from many_runs import PLANTED, optimized, results
from rich.console import Console

from pretrain import main
from pretrain._audit import child_run, killed_run
from pretrain._audit.child_run import ChildRun
from pretrain._audit.killed_run import ChildFailedError, train_with_kills
from pretrain._audit.planned_kills import PlannedKill, plan_kills
from pretrain._commands import verify_run
from pretrain._commands.verify_run import MAX_STEPS, judge, progress
from pretrain._run.folder import locate
from pretrain._screen.kill_table import KillRow, KillTable
from pretrain._surroundings import process_tree
from pretrain._surroundings.process_tree import living, processes_below


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Temporary folders of the command are in a folder of the test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is that of the first test
    # The cluster's sockets have short paths.
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def started(*arguments):
    """The command in a process, and in the end all processes that were seen below it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pretrain", "verify", *arguments], env=optimized(os.environ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def finish(process, at=lambda line: None):
    """Read the output to its end. Return the exit code, the lines, and the processes that are left."""
    seen, lines = set[psutil.Process](), []
    assert process.stdout is not None
    for line in process.stdout:
        seen |= {*psutil.Process(process.pid).children(recursive=True)}
        lines.append(line.rstrip())
        at(line)
    code = process.wait()
    return code, lines, [one for one in seen if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("hardware", "killed", "continued"),
    [
        ("local", "the command", "the same command"),
        pytest.param("cpu:2", "a worker", "new workers", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_kill_is_equal_to_an_undisturbed_one(place, hardware, killed, continued):
    with started("--kills", "1", "--hardware", hardware, "--keep", "kept") as process:
        code, lines, left = finish(process)
    text = "\n".join(lines)
    assert (code, left) == (0, []), text
    assert re.search(rf"^kill 1: {killed} \(\d+\) at step \d+, while \w+$", text, re.M)
    assert re.search(rf"^kill 1: {continued} continued from the (start|checkpoint of step \d+)", text, re.M)
    digests = re.findall(r"params (\w{16})  optimizer (\w{16})", text)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert f"equal, to the bit: parameters and optimizer after {MAX_STEPS} steps with 1 kill" in text
    # The run was killed in fact: its workers started twice, and those of the other one once.
    starts = [len(Path("kept", name, "starts.jsonl").read_text().splitlines()) for name in ("undisturbed", "killed")]
    assert starts == [1, 2]
    assert [*Path("temporary").iterdir()] == []


@pytest.mark.slow
def test_a_run_with_another_loss_is_not_equal_and_the_step_is_named(place):
    changed = []

    def change(line):
        """Change a bit of the loss of step 6 of the first run, as soon as it is finished."""
        if line.startswith("the run killed"):
            path = Path("kept/undisturbed/step_losses.f32")
            content = bytearray(path.read_bytes())
            content[5 * 4] ^= 1
            path.write_bytes(content)
            changed.append(path)

    with started("--kills", "1", "--hardware", "local", "--keep", "kept") as process:
        code, lines, left = finish(process, change)
    text = "\n".join(lines)
    assert (code, left, len(changed)) == (1, [], 1), text
    assert re.search(r"^kill 1: the command \(\d+\) at step \d+", text, re.M)
    assert re.search(r"^kill 1: the same command continued from ", text, re.M)
    assert "equal, to the bit" not in text
    assert "The runs first differ at step 6: its loss is" in text


# Restores the checkpoint of step 8, adds one ulp to one element, saves it again, and ends there.
PLANT = """
for name in ("whole", "again", "planted"):
    train(changed(BASE, name=name, train__max_steps=8))
plant("planted", 8)
train(changed(BASE, name="short", train__max_steps=7))
"""


def test_the_answer_names_an_array_that_differs_in_one_bit(place):
    results(PLANT, place)

    def answer(name):
        out = io.StringIO()
        is_equal = judge(place / "runs" / "whole", place / "runs" / name, 3, Console(file=out, width=100))
        return is_equal, out.getvalue().splitlines()

    is_equal, lines = answer("again")
    assert is_equal
    assert lines[-2] == "equal, to the bit: parameters and optimizer after 8 steps with 3 kills,"
    is_equal, lines = answer("planted")
    assert not is_equal
    assert lines[2] == "not equal:"
    assert lines[-1].strip() == PLANTED
    # A run that ended before the other one has nothing that differs.
    is_equal, lines = answer("short")
    assert not is_equal
    assert not any(line.startswith("equal, to the bit") for line in lines)


def test_a_run_that_ends_before_its_kills_proves_nothing(place):
    run = ChildRun(locate(place / "run"), ["--help"], log=place / "log", variables={})
    kills = plan_kills(2, MAX_STEPS, has_workers=False, rng=random.Random(0))
    with contextlib.closing(run), pytest.raises(ChildFailedError, match="run ended before 2 of 2 kills"):
        train_with_kills(run, kills, random.Random(0), KillTable(Console(file=io.StringIO())))


# In place of a command: it starts a process, which waits as long as it does, and may ignore an interrupt.
WAITS = """
import os, signal, subprocess, sys, time
from pathlib import Path
if sys.argv[1] == "ignores":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path("ready").write_text(f"{os.environ.get('NEW')} {os.environ.get('GONE')}")
Path("ready").rename("is-ready")
try:
    time.sleep(600)
except KeyboardInterrupt:
    Path("saved").touch()
"""


@pytest.mark.parametrize("what", ["saves", "ignores"])
def test_a_command_that_still_runs_may_save_and_then_no_process_is_left(what, place, monkeypatch):
    monkeypatch.setattr(child_run, "CHILD", WAITS)
    monkeypatch.setattr(child_run, "_SAVE_WITHIN_S", 60.0 if what == "saves" else 0.1)
    monkeypatch.setattr(child_run, "_END_WITHIN_S", 0.1)
    monkeypatch.setenv("GONE", "1")
    run = ChildRun(locate(place / "run"), [what], log=place / "log", variables={"NEW": "2", "GONE": None})
    run.close()  # nothing has started
    run.start()
    try:
        until = time.monotonic() + 60
        while not Path("is-ready").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        seen = [one for one in processes_below(os.getpid()) if one.pid == run.pid] + run.processes()
        assert (len(seen), run.poll(), Path("is-ready").read_text()) == (2, None, "2 None")
        run.close()
        run.close()
    finally:
        for one in run.processes():
            one.kill()
    assert Path("saved").exists() == (what == "saves")
    while living(seen):
        assert time.monotonic() < until


@pytest.mark.parametrize("end", ["equal", "different", "failed"])
def test_the_runs_are_kept_if_they_are_not_equal(end, place, monkeypatch, capsys):
    def train_both(folder, *arguments):
        (folder / "undisturbed").mkdir()
        if end == "failed":
            raise ChildFailedError("the command of the run killed ended with code 1: the data is gone.")
        return 3

    monkeypatch.setattr(verify_run, "_train_both", train_both)
    monkeypatch.setattr(verify_run, "judge", lambda *arguments: end == "equal")
    assert main(["verify", "--hardware", "local"]) == (end != "equal")
    left, captured = [*Path("temporary").iterdir()], capsys.readouterr()
    assert [[path.name for path in folder.iterdir()] for folder in left] == [["undisturbed"]] * (end != "equal")
    place_of_runs = f"{place / 'temporary' / left[0].name}" if left else "temporary"
    assert (f"both runs are in {place_of_runs}\n" in captured.out) == (end == "different")
    sentence = "error: the command of the run killed ended with code 1: the data is gone. All output is in"
    assert (f"{sentence} {place_of_runs}\n" == captured.err) == (end == "failed")


class Scripted(ChildRun):
    """A run whose command ends as it is told: an exit code for each look, None while it goes on."""

    def __init__(self, place, codes, num_starts):
        super().__init__(locate(place / "run"), [], log=place / "log", variables={})
        (place / "log").write_text("a line\nerror: the data is gone\n")
        self.codes, self.num_starts, self.num_commands, self.killed = [*codes], [*num_starts], 0, 0
        self.victims: list[subprocess.Popen[bytes]] = []

    def start(self):
        self.num_commands += 1

    def poll(self):
        return self.codes.pop(0)

    def starts(self):
        number = self.num_starts.pop(0) if len(self.num_starts) > 1 else self.num_starts[0]
        return [{"step": 10 * index, "time_s": 1e12 + index} for index in range(number)]

    def step(self):
        return 25

    def phase(self):
        return "saving"

    def workers(self):
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.victims.append(victim)
        return [one for one in processes_below(os.getpid()) if one.pid == victim.pid]

    def kill_command(self):
        self.killed += 1

    @property
    def pid(self):
        return 7


WORKER, OF_COMMAND = (PlannedKill(step=20, delay_s=0.0, is_of_command=of) for of in (False, True))


@pytest.mark.parametrize(
    ("kills", "codes", "num_starts", "rows", "num_commands"),
    [
        ([], [None, 0], [1], [], 1),
        # New workers of the same command, and the command itself, which is started again.
        ([WORKER], [None, None, 0], [1, 1, 2], [("a worker", "new workers", 10)], 1),
        ([OF_COMMAND], [None, None, -9, None, 0], [1, 1, 1, 2], [("the command", "the same command", 10)], 2),
        # A command whose workers cannot go on may end.
        ([WORKER], [None, 1, None, 0], [1, 1, 2], [("a worker", "the same command", 10)], 2),
        # The second kill waits until the run has continued after the first one.
        (
            [WORKER, OF_COMMAND],
            [None, None, None, None, -9, None, 0],
            [1, 1, 2, 2, 2, 2, 3],
            [("a worker", "new workers", 10), ("the command", "the same command", 20)],
            2,
        ),
        (
            [OF_COMMAND, WORKER],
            [None, None, -9, None, None, None, 0],
            [1, 1, 1, 2, 2, 2, 3],
            [("the command", "the same command", 10), ("a worker", "new workers", 20)],
            2,
        ),
        # It fails without a kill, or again after one.
        ([], [None, 1], [1], None, 1),
        ([WORKER], [None, 1, 1], [1], None, 2),
    ],
)
def test_each_kill_has_what_continued_after_it_and_a_failure_is_one_that_no_kill_explains(
    kills, codes, num_starts, rows, num_commands, tmp_path, monkeypatch
):
    monkeypatch.setattr(killed_run, "_POLL_S", 0.0)
    run, table = Scripted(tmp_path, codes, num_starts), KillTable(Console(file=io.StringIO()))
    try:
        if rows is None:
            with pytest.raises(ChildFailedError, match="ended with code 1: the data is gone"):
                train_with_kills(run, kills, random.Random(0), table)
        else:
            train_with_kills(run, kills, random.Random(0), table)
            found = [(row.victim.partition(" (")[0], row.continued_by, row.checkpoint) for row in table.rows]
            assert (found, run.codes) == (rows, [])
            assert all((row.step, row.phase) == (25, "saving") for row in table.rows)
            # The start of the new workers, less the time of the kill.
            now_s = time.time()
            assert all(abs(row.after_s - (1e12 - now_s)) < 60 for row in table.rows)
            assert [row.number for row in table.rows] == [*range(1, len(rows) + 1)]
            assert run.killed == sum(kill.is_of_command for kill in kills)
        assert run.num_commands == num_commands
        assert all(victim.wait(60) == -9 for victim in run.victims)
    finally:
        for victim in run.victims:
            victim.kill()
            victim.wait()


def test_the_line_about_the_present_says_what_a_kill_has_left(place):
    results('train(changed(BASE, name="run", train__max_steps=8))', place)
    run = ChildRun(locate(place / "runs" / "run"), [], log=place / "log", variables={})
    # What a start has written that has no record yet: it continues from a checkpoint.
    phases = run.folder.phases.read_text().splitlines(keepends=True)
    run.folder.phases.write_text("".join(phases[: 1 + max(n for n, line in enumerate(phases) if "training" in line)]))
    start = json.loads(run.folder.starts.read_text().splitlines()[-1])
    run.folder.starts.write_text(json.dumps(start | {"step": 4, "time_s": time.time()}) + "\n")
    table = KillTable(Console(file=io.StringIO()))
    assert progress(run, table) == f"step 4 of {MAX_STEPS}"
    row = KillRow(number=1, victim="a worker (7)", step=5, phase="training")
    table.add(row)
    assert progress(run, table) == "starting again after the kill"
    row.continued_by = "new workers"
    assert progress(run, table) == f"step 4 of {MAX_STEPS}"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_after_ctrl_c_no_process_and_no_file_is_left(place, times):
    def interrupt(line):
        if line.startswith("kill 1"):
            process.send_signal(signal.SIGINT)
            if times == 2:
                time.sleep(1)
                process.send_signal(signal.SIGINT)

    with started("--kills", "1") as process:
        code, lines, left = finish(process, interrupt)
    assert (code, left) == (130, []), lines
    assert lines[-1] == "interrupted"
    assert [*Path("temporary").iterdir()] == []


@pytest.mark.slow
def test_a_killed_verification_leaves_no_process(place):
    with started("--kills", "1") as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("kill 1"))
        seen = psutil.Process(process.pid).children(recursive=True)
        assert len(seen) > 3
    _, left = psutil.wait_procs(seen, timeout=90)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kills", "0"], "--kills must be at least 1 and at most 20, got 0."),
        (["--kills", "21"], "--kills must be at least 1 and at most 20, got 21."),
        (["--seed", "-1"], "--seed must be at least 0, got -1."),
        (["--hardware", "tpu:v6e:4x4"], "--hardware must be local, cpu:WORKERS or gpu:WORKERS, got 'tpu:v6e:4x4'."),
        (["--hardware", "auto"], "--hardware must be local, cpu:WORKERS or gpu:WORKERS, got 'auto'."),
        (["--hardware", "cpu:3"], "--hardware must have a number of devices that divides train.num_shards, 4, got "),
        (["--hardware", "cpu:x"], "hardware must be "),
        (["--keep", "."], "--keep must be a new or empty folder, got '.'."),
        (["--keep", "file"], "must be a folder, got something else."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_rejected_before_anything_starts(arguments, sentence, capsys):
    Path("file").write_text("")
    assert main(["verify", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_absent_data_is_rejected_before_anything_starts(capsys):
    assert main(["verify", "--data", "absent.txt"]) == 2
    printed = capsys.readouterr()
    assert re.fullmatch(r"error: absent.txt .*\n", printed.err)
    assert printed.out == ""


def test_data_that_the_run_rejects_is_one_sentence_and_leaves_nothing(capsys):
    Path("short.txt").write_text("too short")
    assert main(["verify", "--data", "short.txt"]) == 2
    assert re.fullmatch(r"error: .*\n", capsys.readouterr().err)
    assert [*Path("temporary").iterdir()] == []


@pytest.mark.parametrize("number", [1, 3, 4, 20])
def test_kills_are_spread_over_the_run_and_half_of_them_are_workers(number):
    kills = plan_kills(number, MAX_STEPS, has_workers=True, rng=random.Random(5))
    steps = [kill.step for kill in kills]
    assert steps == sorted({*steps})
    assert 1 <= steps[0] <= 1 + MAX_STEPS / number
    assert MAX_STEPS * (0.88 - 1 / number) <= steps[-1] <= 0.9 * MAX_STEPS + 1
    assert sum(kill.is_of_command for kill in kills) == number // 2
    assert all(kill.is_of_command for kill in plan_kills(number, 120, has_workers=False, rng=random.Random(5)))


def test_the_seed_decides_the_places():
    plans = [plan_kills(4, MAX_STEPS, has_workers=True, rng=random.Random(seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_processes_are_found_below_a_process_until_they_end(platform, monkeypatch):
    """From /proc, or from `ps`."""
    if not Path("/proc" if platform == "linux" else shutil.which("ps") or "none").exists():
        pytest.skip("another system")
    monkeypatch.setattr(process_tree, "sys", SimpleNamespace(platform=platform))
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        until = time.monotonic() + 60
        while not (found := [one for one in processes_below(os.getpid()) if "-c input()" in one.command_line]):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert parent.pid in [one.pid for one in processes_below(os.getpid())]
        assert living(found) == found
        assert found[0].kill()
        while living(found):
            assert time.monotonic() < until
        assert not found[0].kill()
        parent.communicate()
    assert processes_below(parent.pid) == []


def test_the_table_of_a_terminal_has_a_row_for_each_kill():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, force_interactive=True, color_system=None)
    with KillTable(console) as table:
        table.present(lambda: "killed run: step 7")
        first = KillRow(number=1, victim="a worker (17)", step=23, phase="saving")
        table.add(first)
        first.continued_by, first.checkpoint, first.after_s = "new workers", 20, 7.2
        table.continued(first)
        table.add(KillRow(number=2, victim="the command (16)", step=41, phase="training"))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "1 a worker (17) 23 saving new workers 20 7 s" in lines
    assert "2 the command (16) 41 training" in lines
    assert "kill 1:" not in out.getvalue()
    assert "*" not in out.getvalue()


def test_a_checkpoint_that_the_old_workers_saved_has_an_asterisk():
    out = io.StringIO()
    rows = [
        KillRow(number=number, victim="the command (16)", step=23, phase="saving", continued_by="it", checkpoint=step)
        for number, step in enumerate((23, 24), 1)
    ]
    with KillTable(Console(file=out, width=100, force_interactive=True, color_system=None)) as table:
        for row in rows:
            table.add(row)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "1 the command (16) 23 saving it 23 0 s" in lines
    assert "2 the command (16) 23 saving it 24* 0 s" in lines
    assert "* saved by the workers of the killed command, before they ended" in lines
    assert rows[1].continued().endswith("the checkpoint of step 24, which the old workers had still saved, after 0 s")
