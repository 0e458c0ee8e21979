"""Charts and time lines of the page: each point, tick, mark and bar in the place of its value."""

import base64
import dataclasses
import hashlib
import math
import re

import numpy as np
import pytest

from pretrain._report.curves import points, smooth
from pretrain._report.reported_run import reported_runs
from pretrain._report.svg_chart import Axis, Line, line_chart
from pretrain._report.timeline import draw_timeline
from pretrain._run.folder import RunFolder
from pretrain._run.history import Phase, read_history

BEGAN_S = 1_700_000_000.0
UNITS = {"": 1.0, "k": 1e3, "M": 1e6}


def drawn(*lines, is_log=False, **options):
    y_axis = Axis(label="nats", is_log=is_log)
    return line_chart(lines, title="Loss", x_axis=Axis(label="step"), y_axis=y_axis, **options)


def line(x, y, **options):
    return Line(label="a", x=np.array(x, float), y=np.array(y, float), **{"color": "color0", **options})


def corners(svg, look="line"):
    """The points of the first line of a look, as shares of the width from the left and of the height from above."""
    path = re.search(rf'<path class="{look}[^"]*" d="M([^"h]*)', svg)
    assert path is not None
    return [tuple(float(number) / 1000 for number in corner.split()) for corner in path[1].split("L")]


def attribute(svg, name):
    """The two numbers of an attribute, such as the lowest and the highest value of an axis."""
    low, high = re.findall(rf'{name}="(.*?),(.*?)"', svg)[0]
    return float(low), float(high)


def value(text):
    number, unit = re.findall(r"^(-?[\d.,]+(?:e-?\d+)?)([kM]?)$", text)[0]
    return float(number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize(
    ("options", "y", "low", "high"),
    [
        ({}, (1, 7, 4), 0.76, 7.24),
        ({"from_zero": True}, (1, 7, 4), 0.0, 7.24),
        ({"from_zero": True}, (-1, 7, 4), -1.0, 7.32),
        ({"is_robust": True}, (1, 7, 4), 0.76, 7.24),
        ({"is_log": True}, (1, 100, 10), 100**-0.04, 100**1.04),
    ],
)
def test_a_point_is_in_the_place_of_its_step_and_its_value(options, y, low, high):
    svg = drawn(line((300, 700, 900), y), **options)
    assert attribute(svg, "data-x") == (0, 900)
    assert attribute(svg, "data-y") == pytest.approx((low, high))
    is_log = "is_log" in options
    assert f'data-log="{is_log:d}"' in svg
    scale = math.log if is_log else float
    down = [(scale(high) - scale(one)) / (scale(high) - scale(low)) for one in y]
    expected = [*zip((1 / 3, 7 / 9, 1), down, strict=True)]
    assert np.array(corners(svg)) == pytest.approx(np.array(expected), abs=1e-4)


def test_a_logarithmic_axis_leaves_out_what_is_not_positive():
    svg = drawn(line((0, 3, 6, 9), (0, 1, -1, 100)), is_log=True)
    assert np.array(corners(svg))[:, 0] == pytest.approx([1 / 3, 1], abs=1e-4)
    assert drawn(line((0, 9), (0, -1)), is_log=True) == "<p>Nothing to draw on this axis.</p>"


@pytest.mark.parametrize(
    ("low", "high", "is_log"),
    [
        (0, 7, False), (2e-4, 7e-4, False), (1.4, 5.6, False), (-3, 123_456, False), (0.5, 70, True),
        (1e-3, 300, True), (2.5, 3.9, True), (1.3, 7, True),
    ],
)  # fmt: skip
def test_the_number_of_a_tick_stands_at_its_value(low, high, is_log):
    svg = drawn(line((0, high), (low, high)), is_log=is_log)
    ends = attribute(svg, "data-y")
    scale = math.log if is_log else float
    ticks = re.findall(r'y="(-?[\d.]+)%" dy="4" class="y">(.*?)<', svg)
    assert 3 <= len(ticks) <= 16
    assert len({text for _, text in ticks}) == len(ticks)
    assert all(0 <= float(place) <= 100 for place, _ in ticks)
    for place, text in ticks:
        share = (scale(ends[1]) - scale(value(text))) / (scale(ends[1]) - scale(ends[0]))
        assert float(place) == pytest.approx(100 * share, abs=0.01)
    ticks = re.findall(r'x="(-?[\d.]+)%" y="100%" dy="17" class="x">(.*?)<', svg)
    assert 3 <= len(ticks) <= 8
    assert all(0 <= float(place) <= 100 for place, _ in ticks)
    for place, text in ticks:
        assert float(place) == pytest.approx(100 * value(text) / high, abs=0.01)


def test_the_value_at_the_end_of_a_line_has_the_height_and_the_color_of_the_line():
    lines = line((0, 9), (9, 3), last=2.85), line((0, 9), (9, 6), last=6.5, color="color1"), line((0, 9), (9, 0))
    svg = drawn(*lines)
    low, high = attribute(svg, "data-y")
    ends = re.findall(r'y="([\d.]+)%" dy="4" class="end (\w+)">(.*?)<', svg)
    assert [(color, text) for _, color, text in ends] == [("color0", "2.850"), ("color1", "6.500")]
    places = [float(place) for place, _, _ in ends]
    assert places == pytest.approx([100 * (high - 3) / (high - low), 100 * (high - 6) / (high - low)], abs=0.01)


def test_a_value_far_above_the_others_is_cut_off_and_told():
    steps = np.arange(30.0)
    lines = line(steps, np.where(steps == 0, 11.0, 3 - steps / 30), last=2.0), line(steps, steps / 15 + 1)
    for is_robust in (True, False):
        svg = drawn(*lines, is_robust=is_robust)
        assert (attribute(svg, "data-y")[1] < 3.6) == is_robust
        assert ("above the axis: up to 11.00" in svg) == is_robust


def test_a_line_of_one_point_can_be_seen():
    svg = drawn(line((5,), (3,)))
    assert re.findall('<path class="line color0" d="(.*?)"', svg) == ["M1000.0 500.00h0"]


def test_marks_outside_of_the_axis_are_left_out():
    svg = drawn(line((0, 9), (9, 3)), marks=[(-1.0, "color0"), (3.0, "color1"), (9.0, "color2"), (12.0, "color3")])
    assert re.findall(r'class="mark (\w+)" x1="([\d.]+)%"', svg) == [("color1", "33.33"), ("color2", "100.00")]


def test_a_pale_line_is_behind_the_others_and_has_no_name():
    svg = drawn(line((0, 9), (9, 3)), line((0, 9), (8, 4), look="pale"))
    assert [text.split()[0] for text in re.findall('<path class="(.*?)"', svg)] == ["pale", "line"]
    assert svg.count("data-label") == 1
    assert svg.count("ends at 3.000") == 1
    assert "ends at 4.000" not in svg


@pytest.mark.parametrize(("num_points", "num_dots"), [(1, 1), (50, 50), (51, 26), (120, 40)])
def test_a_dotted_line_has_at_most_fifty_dots_each_on_a_point(num_points, num_dots):
    svg = drawn(line(range(num_points), range(num_points), look="dotted"), max_points=500)
    (path,) = re.findall(r'<path class="dots color0" d="(.*?)"', svg)
    dots = [tuple(float(number) / 1000 for number in dot.split()) for dot in re.findall("M(.*?)h0", path)]
    assert len(dots) == num_dots
    assert set(dots) <= set(corners(svg, "dotted"))


def test_a_line_has_at_most_the_points_that_are_asked_for():
    svg = drawn(line(range(1000), np.sin(np.arange(1000.0))), max_points=40)
    assert 30 < len(corners(svg)) <= 40


def test_a_smoothed_line_begins_at_its_first_value_and_ends_near_its_last():
    steps = np.arange(1000.0)
    values = 3 + 8 * np.exp(-steps / 5) - steps / 500
    smoothed = smooth(values)
    assert smoothed[:4] == pytest.approx(values[:4])
    assert abs(smoothed[-1] - values[-1]) < 5 / 500
    assert smooth(values[:20]).tolist() == values[:20].tolist()


def test_values_that_are_not_finite_or_absurdly_small_are_no_points():
    records = [{"step": step, "loss": loss} for step, loss in enumerate([1.5, math.nan, math.inf, 1e-305, -2.5])]
    steps, values = points([*records, {"step": 7}], "loss")
    assert (steps.tolist(), values.tolist()) == ([0, 3, 4], [1.5, 0.0, -2.5])


def variant(page, classes):
    """The chart of the loss on some axes."""
    return page.split(f'<div class="variant {classes}">')[1].split("</div>")[0]


def test_the_loss_of_a_record_is_above_its_place_on_each_axis(write_run, make_page):
    """A record without a time has no place on the axis of the time."""
    lines = [
        {"step": step, "loss": loss, "val_loss": loss + 0.5, "time_s": BEGAN_S + after_s}
        for step, loss, after_s in ((100, 4.0, 50), (300, 2.5, 60), (900, 2.0, 1100))
    ]
    lines.insert(2, {"step": 500, "loss": 2.25, "val_loss": 2.75})
    lines.insert(1, {"step": 200, "time_s": BEGAN_S + 55, "mfu": 0.5})
    phases = [("training", 0), ("stopped", 70), ("training", 1070)]
    page = make_page(
        write_run(
            records=lines,
            phases=[{"step": 0, "time_s": BEGAN_S + after_s, "phase": phase} for phase, after_s in phases],
        )
    )
    steps = {1 / 9: 4.0, 1 / 3: 2.5, 5 / 9: 2.25, 1: 2.0}
    for axis, losses in (("step", steps), ("tokens", steps), ("time", {0.5: 4.0, 0.6: 2.5, 1: 2.0})):
        for name, scale in (("linear", float), ("log", math.log)):
            svg = variant(page, f"{axis} {name}")
            low, high = map(scale, attribute(svg, "data-y"))
            for look, more in (("line color0", 0.0), ("pale color0", 0.0), ("dotted color1", 0.5)):
                expected = [(x, (high - scale(loss + more)) / (high - low)) for x, loss in losses.items()]
                assert np.array(corners(svg, look)) == pytest.approx(np.array(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("seconds", "unit", "end"),
    [
        (119, "seconds", 119),
        (7200, "hours", 2),
        (200_000, "days", 2.3148),
    ],
)
def test_the_time_of_work_has_the_largest_unit_of_which_it_has_two(seconds, unit, end, write_run, make_page):
    lines = [{"step": step, "loss": 3.0 - step, "time_s": BEGAN_S + step * seconds} for step in (0, 1)]
    svg = variant(make_page(write_run(records=lines)), "time linear")
    assert f'data-unit="{unit} of work"' in svg
    assert attribute(svg, "data-x") == pytest.approx((0, end), abs=1e-4)


def test_the_speed_begins_at_zero_and_the_loss_does_not(write_run, make_page, records):
    page = make_page(write_run(records=records(40)))
    titles = re.findall(r"<figcaption>([\w ]+?) <span", page)
    lowest = {
        title: attribute(chart, "data-y")[0]
        for title in titles
        for chart in re.findall('<svg class="chart".*?>', page)
        if f'aria-label="{title}' in chart and 'data-log="0"' in chart
    }
    assert {title for title, low in lowest.items() if low == 0} == {"Learning rate", "Throughput", "Wait for data"}
    assert lowest["Loss"] > 1


def test_the_validation_of_two_runs_has_the_color_of_its_run_and_the_end_of_its_line(write_run, make_page, records):
    page = make_page(write_run("a", records=records(20)), write_run("b", records=records(20, floor=3.0)))
    svg = variant(page, "step linear")
    looks = re.findall('<path class="(.*?)"', svg)
    assert sorted(looks) == sorted(
        f"{look} color{number} s{number}" for number in (0, 1) for look in ("light", "dotted", "dots")
    )
    last = dict(re.findall(r"([ab]), validation ends at ([\d.]+\d)", svg))
    shown = re.findall(r'class="end color(\d) s\1">(.*?)<', svg)
    assert shown == [("0", last["a"]), ("1", last["b"])]


def test_time_lines_of_several_runs_have_one_scale(write_run, make_page):
    folders = [
        write_run(
            name,
            phases=[
                {"step": 0, "time_s": BEGAN_S, "phase": "training"},
                {"step": 7, "time_s": BEGAN_S + seconds, "phase": "finished"},
            ],
        )
        for name, seconds in (("short", 10), ("long", 40))
    ]
    page = make_page(*folders)
    assert re.findall('<p class="above">(.*?)</p>', page) == ["short: 10.0 s", "long: 40.0 s"]
    assert re.findall(r'<rect class="training" x="([\d.]+)%" width="([\d.]+)%"', page) == [
        ("0.000", "25.000"), ("0.000", "100.000"),
    ]  # fmt: skip
    assert page.count("<title>training from step 0, 10.0 s</title>") == 1


def test_the_table_of_several_runs_has_the_phases_of_each(write_run, make_page):
    phases = {
        "whole": [("training", 0), ("finished", 10)],
        "killed": [("training", 0), ("restarting", 30), ("training", 40), ("finished", 80)],
    }
    page = make_page(
        *(
            write_run(name, phases=[{"step": 0, "time_s": BEGAN_S + s, "phase": phase} for phase, s in lines])
            for name, lines in phases.items()
        )
    )
    row = re.search(r'<th scope="row">(?:<[^>]*>)*restarting(?:</[^>]*>)*</th>(.*?)</tr>', page)
    assert row is not None
    assert re.findall("<td>(.*?)</td>", row[1]) == ["", "10.0 s (12.5%)"]


def test_the_runs_whose_records_have_no_time_are_named(write_run, make_page):
    """Some records of a run may have a time."""
    folders = [
        write_run(name, records=[{"step": step, "loss": 3.0 - step} | time for step, time in enumerate(times)])
        for name, times in (("timed", ({}, {"time_s": BEGAN_S})), ("untimed", ({}, {})), ("empty", ()))
    ]
    assert "On the axis of time, untimed is missing" in make_page(*folders)


def test_the_loss_is_smoothed_over_its_values_and_the_learning_rate_is_not(write_run, make_page, records):
    page = make_page(write_run(records=records(40)))
    svg = variant(page, "step linear")
    line, values = np.array(corners(svg, "line")), np.array(corners(svg, "pale"))
    assert (line[:, 0] == values[:, 0]).all()
    roughness = [np.abs(np.diff(curve[20:-3, 1], 2)).max() for curve in (line, values)]
    assert roughness[0] < roughness[1] / 2
    rate = page.split('aria-label="Learning rate')[1].split("</figure>")[0]
    assert "pale" not in rate


def test_a_time_line_of_many_phases_keeps_stops_and_long_phases():
    phases = [
        phase
        for step in range(700)
        for phase in (
            Phase(step=step, time_s=BEGAN_S + 10 * step, phase="training"),
            Phase(step=step, time_s=BEGAN_S + 10 * step + 9, phase="saving"),
        )
    ]
    phases.insert(9, Phase(step=4, time_s=BEGAN_S + 48.99, phase="stopped"))
    svg = draw_timeline(phases, label="a", end_s=BEGAN_S + 7000, scale_s=700.0)
    bars = re.findall(r'<rect class="(\w+)"', svg)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%"', svg)]
    assert widths == sorted(widths, reverse=True)  # short bars are above long ones
    assert len(bars) == 1000
    assert (bars.count("stopped"), bars.count("training")) == (1, 700)


def test_each_run_has_a_name_and_a_look_of_its_own(write_run):
    history = read_history(write_run("first"))
    uri = RunFolder(history.folder.path, "s3://bucket/runs/second/?region=eu-west-1")
    third = dataclasses.replace(history, folder=RunFolder(history.folder.path, "s3://bucket/runs/third/"))
    runs = reported_runs([history, dataclasses.replace(history, folder=uri), third, *[history] * 6])
    assert [run.label for run in runs[:4]] == ["first", "second", "third", "first (2)"]
    assert [run.color for run in runs[:2]] == ["color0", "color1"]
    assert len({run.color for run in runs}) == len({run.label for run in runs}) == 9
    assert runs[7].color == "color0 dash1"


def test_the_page_allows_its_own_script(write_run, make_page):
    page = make_page(write_run())
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    (allowed,) = re.findall("script-src 'sha256-(.*?)'", page)
    assert base64.b64decode(allowed) == hashlib.sha256(script.encode()).digest()
