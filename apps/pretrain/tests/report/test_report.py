import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pretrain._commands.report import report
from pretrain._errors import UsageError
from pretrain._report.svg_chart import Axis, Line, line_chart, thin
from pretrain._report.timeline import WorkTime, draw_timeline
from pretrain._run.files import append_line
from pretrain._run.history import Phase
from pretrain._run.result import RunResult, write_result

BEGAN_S = 1_700_000_000.0
ATTACK = "<script>alert(1)</script>"


def cells(page, row):
    """The cells of the first table row with this heading."""
    found = re.search(rf'<th scope="row">(?:<[^>]*>)*{re.escape(row)}(?:</[^>]*>)*</th>(.*?)</tr>', page)
    return re.findall("<td>(.*?)</td>", found[1]) if found else None


@pytest.mark.parametrize("place", ["name", "prompt", "text", "data", "device"])
def test_text_of_a_run_cannot_become_a_script(write_run, make_page, records, place):
    texts = dict.fromkeys(("prompt", "text", "device"), "def ") | {place: f'"{ATTACK}'}
    name = f'"{ATTACK}'.replace("/", "\\") if place == "name" else "run"
    folder = write_run(
        name,
        records=records(3),
        starts=[{"step": 0, "time_s": BEGAN_S, "workers": 1, "devices": 1, "device": texts["device"]}],
        phases=[{"step": 0, "time_s": BEGAN_S, "phase": "training"}],
        samples=[{"step": 0, "prompt": texts["prompt"], "text": texts["text"]}],
        data=f'"{ATTACK}' if place == "data" else "builtin",
    )
    page = make_page(folder)
    assert "&lt;script&gt;alert" in page
    assert "<script>alert" not in page
    assert page.count("<script>") == 1


def test_the_page_has_no_character_that_html_forbids(write_run, make_page):
    folder = write_run(samples=[{"step": 0, "prompt": "a", "text": "a\x00\x1b[31m\ud800\x85b\tc"}])
    assert "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m?\N{REPLACEMENT CHARACTER}b\tc" in make_page(folder)


def test_a_run_that_has_just_begun_has_a_page(write_run, make_page):
    page = make_page(write_run())
    assert cells(page, "state") == ["training, step 0 of 1,500"]
    assert 'class="chart"' not in page


def test_a_run_without_phases_and_times_has_its_curves(write_run, make_page):
    lines = [{"step": step, "loss": 3.0 - step / 100, "grad_norm_max": 1.5, "tokens_per_s": 9e3} for step in range(40)]
    page = make_page(write_run(records=lines))
    titles = re.findall(r"<figcaption>([\w ]+?) <span", page)
    assert titles == ["Loss", "Gradient norm", "Throughput"]
    assert "tell no phases" in page
    assert "have no time" in page


def test_each_name_of_a_mixture_has_a_number_and_a_chart(write_run, make_page, records):
    lines = records(20)
    for number in (10, 20):
        lines[number] |= {"val_loss/web": 2.5 - number / 100, "val_loss/my-code": 1.5}
    lines[20] |= {"full_val_loss/web": 2.25}
    mixed, other = write_run(records=lines), write_run("other", records=records(20))
    page = make_page(mixed)
    assert cells(page, "validation loss, web") == ["2.2500"]
    assert cells(page, "validation loss, my-code") == ["1.5000"]
    assert "Validation loss, web, nats per token. run ends at 2.300." in page
    assert page.index(">Loss <") < page.index(">Validation loss, web <") < page.index(">Gradient norm <")
    page = make_page(mixed, other)
    assert cells(page, "validation loss, web") == ["2.2500", ""]
    assert "Validation loss, my-code, nats per token" in page


def test_the_numbers_of_a_running_training_are_those_of_its_files(write_run, make_page, records):
    lines = records(20)
    lines[10] |= {"val_loss": 1.25}
    lines[20] |= {"val_loss": 1.75}
    phases = [("starting", 0.0), ("training", 3.0), ("stopped", 4.0), ("starting", 1000.0), ("training", 1005.5)]
    folder = write_run(
        records=[line | {"time_s": BEGAN_S + 1000 + index} for index, line in enumerate(lines)],
        starts=[{"step": 0, "time_s": BEGAN_S}, {"step": 1, "time_s": BEGAN_S + 1000}],
        phases=[{"step": 0, "time_s": BEGAN_S + s, "phase": phase} for phase, s in phases],
    )
    killed = make_page(folder, clock=lambda: BEGAN_S + 1400)
    assert cells(killed, "state") == ["no sign of life, step 500 of 1,500"]
    page = make_page(folder, clock=lambda: BEGAN_S + 1030)
    assert cells(page, "state") == ["training, step 500 of 1,500"]
    assert cells(page, "best validation loss, on train.eval_tokens") == ["1.2500 at step 250"]
    assert cells(page, "last validation loss, on train.eval_tokens") == ["1.7500 at step 500"]
    assert cells(page, "parameters") == ["834,432"]
    assert cells(page, "restarts") == ["1"]
    assert cells(page, "starting") == ["8.5 s (35.4%)"]
    assert cells(page, "time of work") == ["24.0 s"]
    assert cells(page, "fingerprint: train.bin") == ["ab12"]
    assert 'class="stopped"' in page


@pytest.fixture
def finished(write_run):
    """A run of two starts, each of whose numbers is another one."""
    validation = {"val_loss": 1.6, "val_bits_per_byte": 2.3}
    speed = {"tokens_per_s": 18_432.4, "data_wait_s": 0.0042}
    last = {"tokens": 1_536_000, "epoch": 1.25, "loss": 1.8, "learning_rate": 2e-4, "grad_norm_max": 0.75}
    last |= {"mfu": 0.3124, "memory_bytes": 3 * 2**29, "full_val_loss": 1.5, "full_val_bits_per_byte": 2.2}
    return write_run(
        records=[
            {"step": 500, "time_s": BEGAN_S + 60, "step_s": 0.05, "loss": 3.0, **speed, **validation},
            {"step": 1000, "time_s": BEGAN_S + 120, "loss": 2.0},
            {"step": 1500, "time_s": BEGAN_S + 360, "step_s": 0.1, **speed, **last, "val_loss": 1.7},
        ],
        starts=[
            {"step": 0, "time_s": BEGAN_S + 5, "workers": 1, "devices": 4, "device": "TPU v4"},
            {"step": 600, "time_s": BEGAN_S + 205, "workers": 2, "devices": 8, "device": "NVIDIA H100"},
        ],
        phases=[
            {"step": step, "time_s": BEGAN_S + after_s, "phase": phase}
            for step, after_s, phase in (
                (0, 0, "starting"), (0, 12, "training"), (600, 120, "stopped"), (600, 300, "training"),
                (1500, 360, "finished"),
            )
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("state", "finished"),
        ("validation loss, all tokens (nats per token)", "1.5000"),
        ("bits per byte, all validation tokens", "2.2000"),
        ("best validation loss, on train.eval_tokens", "1.6000 at step 500"),
        ("last validation loss, on train.eval_tokens", "1.7000 at step 1,500"),
        ("last bits per byte, on train.eval_tokens", "2.3000"),
        ("last training loss", "1.8000"),
        ("parameters", "834,432"),
        ("training tokens", "1,536,000"),
        ("epochs", "1.25"),
        ("steps", "1,500"),
        ("time of work", "3:00"),
        ("tokens per second", "13,653"),  # 1 000 timed steps of 1 024 tokens, in 500 * 0.05 + 500 * 0.1 seconds
        ("MFU, at the end", "31.2%"),
        ("device memory", "1.5 GiB"),
        ("restarts", "1"),
        ("began", "2023-11-14 22:13:20 UTC"),
        ("last sign of life", "2023-11-14 22:19:20 UTC"),
        ("starting", "12.0 s (6.7%)"),
        ("training", "2:48 (93.3%)"),
        ("devices", "8 x NVIDIA H100"),
        ("workers", "2"),
        ("tokenizer", "bytes"),
    ],
)
def test_a_table_of_the_page_has_the_value_of_the_files(finished, make_page, row, value):
    assert cells(make_page(finished), row) == [value]


@pytest.mark.parametrize(
    "summary",
    [
        "Loss, nats per token. run, training ends at 1.800; run, validation ends at 1.700.",
        "run ends at 2e-4.",  # the learning rate, which has no unit
        "Gradient norm, before clipping. run ends at 0.7500.",
        "Throughput, tokens per second. run ends at 18.43k.",
        "MFU, % of the peak of all devices. run ends at 31.24.",
        "Wait for data, ms per step. run ends at 4.200.",
    ],
)
def test_a_chart_has_the_values_of_the_records_in_its_unit(finished, make_page, summary):
    assert f'{summary}"' in make_page(finished)


def test_the_charts_of_several_runs_have_the_units_of_that_of_one(finished, write_run, make_page):
    last = {"loss": 2.0, "mfu": 0.25, "data_wait_s": 0.002, "val_loss": 2.5}
    others = [write_run(f"other{n}", records=[{"step": 750, **last}]) for n in range(1, 7)]
    page = make_page(finished, *others[:1])
    assert '"MFU, % of the peak of all devices. run ends at 31.24; other1 ends at 25.00."' in page
    assert '"Wait for data, ms per step. run ends at 4.200; other1 ends at 2.000."' in page
    assert "other1, training ends at 2.000" in page
    # The read-out of many runs has their validations alone.
    page = make_page(finished, *others)
    assert "other6, validation ends at 2.500" in page
    assert "training ends at" not in page


def test_scores_on_tasks_have_a_number_and_a_chart_with_the_steps_of_their_checkpoints(write_run, make_page, records):
    folder = write_run(records=records(20))
    for step, of, score in ((500, 500, 0.5), (300, 250, 0.25)):
        scores = {"tasks/piqa/acc": score, "tasks/piqa/acc_stderr": 0.01}
        append_line(folder.scores, {"step": step, "tasks/step": of, **scores})
    page = make_page(folder)
    assert cells(page, "last piqa/acc") == ["0.5000"]
    assert cells(page, "last step") is None
    chart = page.split('aria-label="piqa, acc, . run ends at 0.5000."')[1].split("</svg>")[0]
    assert 'data-x="0.0,500.0"' in chart
    assert 'd="M500.0 ' in chart
    assert "piqa, acc_stderr" not in page
    assert "tasks/" not in page


def variant(page, classes):
    """The loss chart on some axes."""
    return page.split(f'<div class="variant {classes}">')[1].split("</div>")[0]


@pytest.mark.parametrize(
    ("x_axis", "label", "end", "marks"),
    [
        ("step", "step", 1500, ["40.00%"]),
        ("tokens", "training tokens", 1_536_000, ["40.00%"]),
        ("time", "minutes of work", 3, []),
    ],
)
def test_restarts_are_marked_on_their_axis(finished, make_page, x_axis, label, end, marks):
    chart = variant(make_page(finished), f"{x_axis} linear")
    assert f'data-unit="{label}" data-x="0.0,{float(end)}"' in chart
    assert re.findall('class="mark color0 s0" x1="([0-9.]+%)" x2', chart) == marks


@pytest.mark.parametrize(
    ("work_s", "unit", "end"),
    [(119, "seconds", 119.0), (120, "minutes", 2.0), (7_200, "hours", 2.0), (172_800, "days", 2.0)],
)
def test_the_axis_of_time_has_a_unit_that_fits(write_run, make_page, work_s, unit, end):
    records = [{"step": step, "time_s": BEGAN_S + work_s * step, "loss": 2.0} for step in range(2)]
    assert f'data-unit="{unit} of work" data-x="0.0,{end}"' in make_page(write_run(records=records))


def test_runs_of_one_name_and_one_run_twice_are_told_apart(write_run, make_page, records, tmp_path):
    folder = write_run(records=records(3))
    other = shutil.copytree(folder.path, tmp_path / "copies" / "run")
    page = make_page(folder, other, folder)
    assert "<h1>run, run (2), run (3)</h1>" in page
    assert cells(page, "state") == ["no sign of life, step 75 of 1,500"] * 3
    assert "All options that change the result are equal." in page


def test_only_options_that_differ_stand_before_the_whole_configuration(write_run, make_page):
    page = make_page(write_run("a", seed=1, dashboard=True, records=[{"step": 7, "loss": 1.5}]), write_run("b", seed=2))
    assert cells(page, "last training loss") == ["1.5000", ""]
    configuration = page.split("<h2>Configuration</h2>")[1].split("<h2>")[0]
    differing, whole = configuration.split("<summary>All")
    assert re.findall("<code>(.*?)</code>", differing) == ["dashboard"]  # the comparison has the seed
    assert cells(differing, "dashboard") == ["true", "false"]
    assert {"seed", "train.max_steps", "model.vocab_size"} <= set(re.findall("<code>(.*?)</code>", whole))


def test_samples_show_the_first_and_the_last_step(write_run, make_page):
    samples = [{"step": 10 * n, "prompt": "def ", "text": f"def text{n}"} for n in range(101)]
    page = make_page(write_run(samples=samples))
    shown = [int(number) for number in re.findall(r"<pre><b>def </b>text(\d+)</pre>", page)]
    assert len(shown) == 10
    assert (shown[0], shown[-1]) == (0, 100)
    assert shown == sorted(shown)


def test_a_page_of_30_000_records_stays_small(write_run, make_page):
    losses = 3 + np.random.default_rng(0).normal(size=30_000) / 50
    lines = [
        {"step": step, "loss": loss, "grad_norm_max": loss, "tokens_per_s": 1e6 * loss, "time_s": BEGAN_S + step}
        for step, loss in enumerate(losses.round(5).tolist())
    ]
    phases = [
        {"step": step, "time_s": BEGAN_S + step, "phase": phase}
        for step in range(0, 30_000, 10)
        for phase in ("training", "saving")
    ]
    assert len(make_page(write_run(records=lines, phases=phases))) < 500_000


def test_thinning_keeps_peaks_and_ends():
    values = np.zeros(100_001)
    values[[7_777, 50_000]] = 9, -9
    x, y = thin(np.arange(100_001.0), values, 100)
    assert len(x) <= 100
    assert {0.0, 7_777.0, 50_000.0, 100_000.0} <= set(x)
    assert (np.diff(x) > 0).all()
    assert (y == values[x.astype(int)]).all()


def test_the_page_of_one_run_is_in_its_folder(write_run, tmp_path, monkeypatch, capsys):
    folder = write_run()
    monkeypatch.chdir(tmp_path)
    assert report([str(folder)], out=None, console=Console()) == folder.path / "report.html"
    assert capsys.readouterr().out.startswith(f"wrote {folder.path / 'report.html'} (0.0")


def test_a_page_is_written_through_a_link(write_run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    report([str(write_run())], out=str(tmp_path / "link"), console=Console(quiet=True))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!doctype html>")


def test_a_foreign_file_in_the_place_of_the_page_stays(write_run):
    folder = write_run()
    (folder.path / "report.html").write_text("another program's")
    with pytest.raises(UsageError, match=r"--out must be a new file or a page that it can replace, got .*another file"):
        report([str(folder)], out=None, console=Console(quiet=True))
    assert (folder.path / "report.html").read_text() == "another program's"


def test_the_page_of_two_runs_is_in_the_working_folder(write_run, tmp_path, monkeypatch):
    folders = [str(write_run("a")), str(write_run("b"))]
    monkeypatch.chdir(tmp_path)
    report(folders, out=None, console=Console(quiet=True))
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("out", "constraint"),
    [
        ("missing/page.html", "--out must be a file in a folder that exists, got missing/page.html"),
        (".", "--out must be a file, got ., a folder"),
        ("s3://bucket/page.html", "--out must be a file on this machine, got s3://bucket/page.html"),
        ("socket", "--out must be a file, got socket, a disk or a socket. Give another."),
        ("loop", "--out must be a file that can be written, got loop .Too many levels of symbolic links"),
        ("x" * 300, "--out must be a file that can be written, got x+\N{HORIZONTAL ELLIPSIS}x+ .File name too long"),
    ],
)
def test_an_out_that_cannot_be_written_is_rejected(write_run, tmp_path, monkeypatch, out, constraint):
    folder = str(write_run())
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    with pytest.raises(UsageError, match=constraint):
        report([folder], out=out, console=Console(quiet=True))
    assert sorted(path.name for path in Path().iterdir()) == ["loop", "runs", "socket"]


def test_a_run_that_does_not_exist_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="must be the folder or URI of a run"):
        report([str(tmp_path / "nothing")], out=None, console=Console(quiet=True))


@pytest.mark.parametrize("num_lines", [1, 8, 12])
def test_the_values_at_the_ends_of_lines_stay_above_the_numbers_of_the_axis(num_lines):
    steps = np.arange(10.0)
    lines = [Line(label=str(n), x=steps, y=9 - steps, color=f"run-{n}", last=0.0) for n in range(num_lines)]
    chart = line_chart(lines, title="Loss", x_axis=Axis(label="step"), y_axis=Axis(label="loss"))
    heights = sorted(float(height) for height in re.findall(r'y="([-0-9.]+)%" dy="4" class="end', chart))
    assert len(heights) == num_lines
    assert heights[0] >= 0
    assert heights[-1] <= 96
    assert all(np.diff(heights) >= 7.9)


def test_more_lines_than_fit_have_no_values_at_their_ends():
    lines = [Line(label=str(n), x=np.arange(9.0), y=np.arange(9.0), color="c", last=8.0) for n in range(13)]
    chart = line_chart(lines, title="Loss", x_axis=Axis(label="step"), y_axis=Axis(label="loss"))
    assert "end c" not in chart
    assert "12 ends at 8.000" in chart


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_time_in_which_no_command_ran_has_no_place_in_the_time_line(end):
    phases = [
        Phase(step=0, time_s=100.0, phase="training"),
        Phase(step=5, time_s=110.0, phase=end),
        Phase(step=5, time_s=900.0, phase="training"),
    ]
    svg = draw_timeline(phases, label="a", end_s=930.0, scale_s=40.0)
    bars = re.findall(r'class="(\w+)" x="([\d.]+)%" width="([\d.]+)%"', svg)
    assert {(name, float(x), float(width)) for name, x, width in bars} == {
        ("training", 0.0, 25.0), ("stopped", 25.0, 0.15), ("training", 25.0, 75.0),
    }  # fmt: skip
    work_time = WorkTime(phases, 100.0)
    assert work_time(np.array([105.0, 110.0, 500.0, 900.0, 910.0])).tolist() == [5.0, 10.0, 10.0, 10.0, 20.0]


def test_the_page_has_the_origin_of_a_run_and_what_only_its_result_has(write_run, make_page):
    lines = [{"step": step, "loss": 3.0 - step, "time_s": BEGAN_S + 60 * step} for step in (0, 1)]
    folder = write_run(records=lines)
    known: dict[str, Any] = {"full_val_loss": 1.25, "num_params": 7, "devices": 6, "device": "TPU v4"}
    write_result(
        folder,
        RunResult(
            steps=1500, metrics={"mfu": 0.5}, restarts=0, workers=3, seconds={"training": 208.0},
            began_at="2023-11-14T22:00:00+00:00", ended_at="2023-11-14T22:03:28+00:00", **known,
        ),
    )  # fmt: skip
    page = make_page(folder, clock=lambda: BEGAN_S + 86_400)
    expected = {
        "state": "finished", "validation loss, all tokens (nats per token)": "1.2500", "parameters": "7",
        "steps": "1,500", "time of work": "3:28", "MFU, at the end": "50.0%", "restarts": "0",
        "last training loss": None, "began": "2023-11-14 22:00:00 UTC", "ended": "2023-11-14 22:03:28 UTC",
    }  # fmt: skip
    origin = {
        "folder": str(folder), "hardware": "cpu:1", "devices": "6 x TPU v4", "workers": "3", "tokens": "tokens",
        "tokenizer": "bytes", "fingerprint: train.bin": "ab12",
        **{name: version(name) for name in ("jax", "ray")},
    }  # fmt: skip
    numbers, rest = page.split("<h2>Origin</h2>")
    assert {row: (cells(numbers, row) or [None])[0] for row in expected} == expected
    assert {row: (cells(rest, row) or [None])[0] for row in origin} == origin
    assert "Training report of 1 run, 2023-11-15 22:13:20 UTC" in page


def test_samples_of_each_prompt_are_apart(write_run, make_page):
    samples = [
        {"step": step, "prompt": prompt, "text": f"{prompt}words {step}{prompt.strip()}"}
        for step in (0, 1250)
        for prompt in ("def ", "import ")
    ]
    page = make_page(write_run(samples=samples))
    for prompt, details in zip(("def ", "import "), page.split("<details")[1:], strict=False):
        assert f"prompt <code>{prompt}</code>" in details
        found = re.findall(
            r'<th scope="row">(.*?)</th><td><pre><b>(.*?)</b>(.*?)</pre>', details.split("</details>")[0]
        )
        assert found == [(step, prompt, f"words {step.replace(',', '')}{prompt.strip()}") for step in ("0", "1,250")]


def test_standard_output_is_the_page_alone(write_run, tmp_path):
    with (tmp_path / "page.html").open("wb") as file:
        command = [sys.executable, "-m", "pretrain", "report", str(write_run()), "--out", "/dev/stdout"]
        subprocess.run(command, check=True, stdout=file, timeout=300)
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
