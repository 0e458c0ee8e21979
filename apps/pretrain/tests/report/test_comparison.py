"""The comparison of runs: what differs, ranks, means over seeds, forked runs, and pages of many runs."""

import dataclasses
import itertools
import json
import re
import time
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from rich.console import Console

from pretrain import PRESETS, train
from pretrain._commands.report import report
from pretrain._report import run_charts
from pretrain._report.page import render_page
from pretrain._report.reported_run import Fork, reported_runs
from pretrain._run.files import write_json
from pretrain._run.folder import RunFolder
from pretrain._run.history import read_history
from pretrain._run.result import RunResult, write_result

QUICKSTART = PRESETS["quickstart"]()
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def optimizer(**options):
    return dataclasses.replace(QUICKSTART.optimizer, **options)


def interval(**options):
    return dataclasses.replace(QUICKSTART.train, **options)


@pytest.fixture
def rate(write_run):
    """Writes a run with a learning rate, a seed, and its validation losses by step."""

    def write(name, rate, seed, losses, *, every=1, is_finished=True, **options):
        records = [
            {"step": step, "loss": value - 0.5, "val_loss": value}
            for step, value in losses.items()
            if step % every == 0
        ]
        chosen = optimizer(learning_rate=rate, min_learning_rate=1e-5)
        phases = [{"step": max(losses), "time_s": 1.7e9, "phase": "finished"}] if is_finished else []
        return write_run(name, records=records, phases=phases, seed=seed, optimizer=chosen, **options)

    return write


def finish(folder, **losses):
    write_result(folder, RunResult(steps=1500, metrics={}, restarts=0, workers=1, **losses))


def table(page):
    """Headings and rows of the comparison, as texts; a row is marked if it is that of a single run of a mean."""
    found = page.split('<table class="comparison">')[1].split("</table>")[0]
    *_, head = re.findall("<tr>(.*?)</tr>", found.split("</thead>")[0])
    rows = [
        ("single" in classes, [re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)])
        for classes, row in re.findall("<tr(.*?)>(.*?)</tr>", found.split("<tbody>")[1])
    ]
    return re.findall("<th.*?>(.*?)</th>", head), rows


def chart(page, classes="step linear"):
    """The chart of the loss on some axes."""
    return page.split(f'<div class="variant {classes}">')[1].split("</div>")[0]


def drawn(svg, classes, *, is_log=False):
    """Positions and values of each path with exactly these classes, from its places in the chart."""
    (left, right), (low, high) = (
        [float(number) for number in re.findall(rf'{name}="(.*?),(.*?)"', svg)[0]] for name in ("data-x", "data-y")
    )
    return [
        [
            (left + float(x) / 1000 * (right - left), high - float(y) / 1000 * (high - low))
            for x, y in (corner.split() for corner in path.removesuffix("h0").split("L"))
        ]
        for path in re.findall(rf'<path class="{classes}" d="M(.*?)"', svg)
    ]


def close_to(points):
    widest = max(1.0, *(x for x, _ in points))
    return [(pytest.approx(x, abs=2e-4 * widest), pytest.approx(y, abs=0.002)) for x, y in points]


def test_the_table_has_what_differs_as_people_write_it_and_the_best_run_first(write_run, make_page):
    folders = [
        write_run(
            name, records=[{"step": 250, "val_loss": best}, {"step": 1500, "val_loss": last}],
            optimizer=optimizer(learning_rate=rate, min_learning_rate=0.0, warmup_steps=warmup, decay_steps=decay),
            train=interval(max_steps=1500, log_every=every), seed=seed,
        )
        for name, rate, warmup, decay, every, seed, best, last in (
            ("a", 0.0003 * 1.0000000000000002, 50, None, 25, 2357, 2.5, 2.75),
            ("b", 1e-3, 50, 1200, 10, 2357, 2.25, 2.5),
            ("c", 0.02, 50, 1200, 10, 123456, 2.5, 2.625),
        )
    ]  # fmt: skip
    for folder, full in zip(folders, (2.0625, 1.875, 2.0625), strict=True):
        finish(folder, full_val_loss=full)
    headings, rows = table(make_page(*folders))
    assert headings == [
        "rank", "run", "final, all validation tokens", "best", "last", "steps", "seed", "learning_rate", "decay_steps",
    ]  # fmt: skip
    assert rows == [
        (False, ["1", "b", "1.8750", "2.2500 at 250", "2.5000", "1,500", "2357", "1e-3", "1,200"]),
        (False, ["2", "a", "2.0625", "2.5000 at 250", "2.7500", "1,500", "2357", "3e-4", "none"]),
        (False, ["2", "c", "2.0625", "2.5000 at 250", "2.6250", "1,500", "123456", "0.02", "1,200"]),
    ]


@pytest.mark.parametrize(
    ("full", "losses", "expected"),
    [
        (1.5, {250: 2.5, 1500: 2.25}, {"final, all validation tokens": "1.5000", "best": "2.2500 at 1,500"}),
        (2.5, {250: 2.25, 1500: 2.5}, {"final, all validation tokens": "2.5000", "best": "2.2500 at 250"}),
        (2.25, {250: 2.5, 1500: 2.25}, {"final, all validation tokens": "2.2500"}),
    ],
)
def test_a_loss_that_is_an_earlier_one_in_all_rows_has_no_column(rate, make_page, full, losses, expected):
    folders = [rate("a", 1e-3, 1, losses), rate("b", 2e-3, 1, losses)]
    for folder in folders:
        finish(folder, full_val_loss=full)
    headings, rows = table(make_page(*folders))
    first = dict(zip(headings, rows[0][1], strict=True))
    assert {name: value for name, value in first.items() if name not in ("rank", "run", "learning_rate")} == {
        **expected,
        "steps": "1,500",
    }
    other = rate("c", 3e-3, 1, {250: 2.0, 1500: 3.0})
    finish(other, full_val_loss=1.0)
    assert table(make_page(*folders, other))[0][2:6] == ["final, all validation tokens", "best", "last", "steps"]


def test_options_of_one_short_name_have_their_full_names(write_run, make_page):
    prepare = dataclasses.replace(QUICKSTART.prepare, split_seed=7)
    model = dataclasses.replace(QUICKSTART.model, vocab_size=300)
    page = make_page(write_run("a"), write_run("b", prepare=prepare, model=model))
    assert table(page)[0][-2:] == ["split_seed", "vocab_size"]
    assert 'title="model.vocab_size"' in page


def test_a_run_that_is_not_finished_has_no_rank(rate, write_run, make_page):
    finished = rate("finished", 1e-3, 1, {500: 3.0, 1500: 2.5})
    finish(finished, full_val_loss=1.0)
    new = rate("new", 2e-3, 1, {}, is_finished=False)
    running = rate("running", 3e-3, 1, {500: 0.5, 750: 0.75}, is_finished=False)
    # It was extended, and has the final loss of its former end.
    records = [{"step": 500, "loss": 0.5, "val_loss": 0.5, "full_val_loss": 0.5}, {"step": 600, "loss": 0.25}]
    chosen = optimizer(learning_rate=4e-3, min_learning_rate=1e-5)
    extended = write_run("extended", records=records, phases=[], seed=1, optimizer=chosen)
    page = make_page(new, finished, running, extended)
    assert "The rank is that of the final loss on all validation tokens, of finished runs." in page
    assert [row[:-1] for _, row in table(page)[1]] == [
        ["1", "finished", "1.0000", "2.5000 at 1,500", "2.5000", "1,500"],
        ["", "new", "", "", "", "0 of 1,500"],
        ["", "running", "", "0.5000 at 500", "0.7500", "750 of 1,500"],
        ["", "extended", "0.5000", "0.5000 at 500", "0.5000", "600 of 1,500"],
    ]
    assert "There is no rank: no run is finished." in make_page(new, running)


def test_the_loss_of_the_untrained_model_is_not_that_of_a_run(write_run, make_page):
    records = [{"step": 0, "val_loss": 5.5}, {"step": 10, "loss": 5.0}]
    page = make_page(write_run("untrained", records=records[:1]), write_run("running", records=records))
    assert [row[2:] for _, row in table(page)[1]] == [
        ["5.5000 at 0", "0 of 1,500"], ["", "10 of 1,500"],
    ]  # fmt: skip


@pytest.mark.parametrize("difference", [{"val": "ef56"}, {"train": interval(eval_tokens=1024)}])
def test_losses_on_different_tokens_have_no_rank(rate, make_page, difference):
    page = make_page(rate("a", 1e-3, 1, {500: 3.0}), rate("b", 2e-3, 1, {500: 2.0}, **difference))
    assert "There is no rank: the runs have different validation tokens" in page
    headings, rows = table(page)
    assert headings[0] == "run"
    assert [row[0] for _, row in rows] == ["a", "b"]


def test_losses_on_all_tokens_have_a_rank_whatever_the_number_of_tokens_before(rate, make_page):
    folders = [
        rate("a", 1e-3, 1, {500: 3.0}), rate("b", 2e-3, 1, {500: 2.0}, train=interval(eval_tokens=1024)),
    ]  # fmt: skip
    for folder, full in zip(folders, (2.5, 2.75), strict=True):
        finish(folder, full_val_loss=full)
    assert [row[:2] for _, row in table(make_page(*folders))[1]] == [["1", "a"], ["2", "b"]]


def test_runs_that_differ_in_their_seed_alone_are_one_row_with_mean_and_deviation(rate, make_page):
    lasts = {("slow", 1): 3.0, ("fast", 1): 2.0, ("slow", 2): 3.25, ("fast", 2): 2.5, ("fast", 3): 2.25}
    folders = [
        rate(f"{name}-{seed}", {"slow": 1e-4, "fast": 1e-3}[name], seed, {0: 5.5, 1500: last})
        for (name, seed), last in lasts.items()
    ]
    headings, rows = table(make_page(*folders))
    assert (headings[1], headings[-2:]) == ("run", ["seed", "learning_rate"])
    fast, slow = ([last for (name, _), last in lasts.items() if name == of] for of in ("fast", "slow"))
    spread = [f"{mean(values):.4f} {PLUS_MINUS} {stdev(values):.4f}" for values in (fast, slow)]
    assert rows == [
        (False, ["1", "learning_rate 1e-3 (3 seeds)", "", spread[0], "1,500", "1, 2, 3", "1e-3"]),
        *(
            (True, ["", f"fast-{seed}", "", f"{last:.4f} at 1,500", "1,500", str(seed), "1e-3"])
            for seed, last in zip((1, 2, 3), fast, strict=True)
        ),
        (False, ["2", "learning_rate 1e-4 (2 seeds)", "", spread[1], "1,500", "1, 2", "1e-4"]),
        *(
            (True, ["", f"slow-{seed}", "", f"{last:.4f} at 1,500", "1,500", str(seed), "1e-4"])
            for seed, last in zip((1, 2), slow, strict=True)
        ),
    ]


def test_a_mean_says_how_many_of_its_runs_have_finished(rate, make_page):
    lasts = {("fast", 1): 2.0, ("fast", 2): 2.5, ("fast", 3): 1.5, ("slow", 1): 3.0, ("slow", 2): 2.0}
    folders = [
        rate(
            f"{name}-{seed}", {"slow": 1e-4, "fast": 1e-3}[name], seed, {0: 5.5, 1500: last},
            is_finished=(name, seed) not in (("fast", 3), ("slow", 2)),
        )
        for (name, seed), last in lasts.items()
    ]  # fmt: skip
    means = [cells[3] for is_of_mean, cells in table(make_page(*folders))[1] if not is_of_mean]
    assert means == [f"2.2500 {PLUS_MINUS} {stdev((2.0, 2.5)):.4f} (2 of 3 runs)", "3.0000 (1 of 2 runs)"]


@pytest.mark.parametrize(
    ("difference", "num_lines"),
    [
        ({"seed": 2}, 1),
        ({"seed": 2, "hardware": "cpu:4", "train": interval(eval_every=7)}, 1),  # no part of the result
        ({"seed": 2, "data": "a copy of the tokens"}, 1),
        ({"seed": 1}, 2),  # the same run again
        ({"seed": 2, "val": "ef56"}, 2),
        ({"seed": 2, "train": interval(max_steps=1501)}, 2),
    ],
)
def test_only_runs_that_differ_in_their_seed_share_a_line(write_run, difference, num_lines):
    folders = [write_run("a", seed=1), write_run("b", **difference)]
    runs = reported_runs([read_history(folder) for folder in folders])
    assert len({run.series for run in runs}) == len({run.color for run in runs}) == num_lines


def test_a_forked_run_shares_no_line(write_run):
    first, second, parent = (read_history(write_run(name, seed=seed)) for seed, name in enumerate("abc"))
    assert [run.series for run in reported_runs([first, second], [None, None])] == [0, 0]
    assert [run.series for run in reported_runs([first, second], [None, Fork(parent=parent, step=5)])] == [0, 1]


def test_a_line_of_several_seeds_has_the_mean_and_the_range_of_the_steps_that_all_have(rate, make_page):
    """One run validates at every second step, and another one has not ended."""
    losses = {
        "a-1": {0: 5.0, 100: 4.0, 200: 3.0, 300: 2.75, 400: 2.5},
        "a-2": {0: 5.5, 100: 9.0, 200: 3.5, 300: 9.0, 400: 2.25},
        "a-3": {0: 5.25, 100: 4.5, 200: 2.5},
    }
    folders = [
        rate(name, 1e-3, seed, values, every=200 if name == "a-2" else 100)
        for seed, (name, values) in enumerate(losses.items())
    ]
    page = make_page(*folders, rate("b", 2e-3, 0, {0: 5.5, 400: 4.0}))
    common = {step: [values[step] for values in losses.values()] for step in (0, 200)}
    for name, scale in (("step", 1), ("tokens", 1024)):
        svg = chart(page, f"{name} linear")
        (line,) = drawn(svg, "dotted color0 s0")
        assert line == close_to([(scale * step, mean(values)) for step, values in common.items()])
        (band,) = drawn(svg, "band color0 s0")
        assert band == close_to(
            [(0, 5.5), (scale * 200, 3.5), (scale * 200, 2.5), (0, 5.0)]  # the upper edge, and the lower one back
        )
        singles = drawn(svg, "light color0 s0 single")
        assert [[value for _, value in run] for run in singles] == [
            close_to_values([5.0, 4.0, 3.0, 2.75, 2.5]), close_to_values([5.5, 3.5, 2.25]),
            close_to_values([5.25, 4.5, 2.5]),
        ]  # fmt: skip
        (training,) = drawn(svg, "light color0 s0")
        assert training == close_to([(scale * step, mean(values) - 0.5) for step, values in common.items()])
    assert 'class="end color0 s0">3.000<' in chart(page)
    assert "at the steps that all of them have recorded; its band goes from the lowest to the highest" in page
    assert 'id="singles"' in page


def close_to_values(values):
    return [pytest.approx(value, abs=0.005) for value in values]


def test_seeds_without_a_common_step_are_drawn_one_by_one(rate, make_page):
    page = make_page(rate("a", 1e-3, 1, {100: 4.0, 300: 3.0}), rate("b", 1e-3, 2, {200: 4.5, 400: 3.5}))
    svg = chart(page)
    assert "band" not in svg
    assert drawn(svg, "dotted color0 s0") == [close_to([(100, 4), (300, 3)]), close_to([(200, 4.5), (400, 3.5)])]


def test_the_mean_over_the_time_is_at_the_mean_of_the_times(write_run, make_page):
    def timed(name, seed, seconds):
        times = {0: 0, 100: seconds}
        records = [{"step": step, "val_loss": 5 - step / 100, "time_s": 1e9 + at} for step, at in times.items()]
        return write_run(name, seed=seed, records=records)

    page = make_page(timed("a", 1, 20), timed("b", 2, 40))
    (line,) = drawn(chart(page, "time linear"), "dotted color0 s0")
    assert line == close_to([(0, 5.0), (30, 4.0)])


def test_a_log_axis_has_the_band_too(rate, make_page):
    page = make_page(rate("a", 1e-3, 1, {0: 5.0, 100: 3.0}), rate("b", 1e-3, 2, {0: 5.5, 100: 2.5}))
    assert chart(page, "step log").count('<path class="band color0 s0"') == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The histories of two short runs, with batches of 4 and 8 windows."""
    storage = tmp_path_factory.mktemp("trained")
    corpus = storage / "corpus.txt"
    corpus.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(2_000)))
    histories = []
    for name, batch in (("first", 4), ("second", 8)):
        config = dataclasses.replace(
            QUICKSTART, data=str(corpus), name=name, storage_path=str(storage), hardware="local", trackers=(),
            model=dataclasses.replace(QUICKSTART.model, seq_len=16, num_layers=1, num_heads=1, embed_dim=16),
            train=interval(
                global_batch_size=batch, max_steps=60, log_every=5, eval_every=10, eval_tokens=256, sample_tokens=0
            ),
        )  # fmt: skip
        result = train(config)
        assert result.error is None
        histories.append(read_history(RunFolder(Path(result.folder))))
    return histories


def recorded(history, metric, first, last):
    return [(r["step"], r[metric]) for r in history.records if metric in r and first <= r["step"] <= last]


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_beginning_of_a_forked_run_is_its_parents_in_grey(trained, is_alone):
    parent, run = trained
    histories, forks = [run, parent], [Fork(parent=parent, step=30), None]
    if is_alone:
        histories, forks = histories[:1], forks[:1]
    page = render_page(histories, forks=forks, now_s=time.time())
    for name, scales in (("step", (1, 1)), ("tokens", (4 * 16, 8 * 16))):
        svg = chart(page, f"{name} linear")
        inherited = [(scales[0] * step, loss) for step, loss in recorded(parent, "val_loss", 0, 30)]
        before = 30 * (scales[0] - scales[1])
        own = [(before + scales[1] * step, loss) for step, loss in recorded(run, "val_loss", 30, 60)]
        assert drawn(svg, "dotted grey s0") == [close_to(inherited)]
        assert drawn(svg, "dotted color1" if is_alone else "dotted color0 s0") == [close_to(own)]
        (training,) = drawn(svg, "light grey s0")
        assert training == close_to([(scales[0] * step, loss) for step, loss in recorded(parent, "loss", 0, 30)])
    assert "grey" not in chart(page, "time linear")
    assert "The grey line before step 30 is the part of first, from which second was forked" in page


@pytest.mark.parametrize("metric", ["loss", "learning_rate", "grad_norm_max", "tokens_per_s", "mfu", "data_wait_s"])
def test_the_parents_part_is_the_line_that_its_own_report_has(metric, write_run):
    parent, run = (
        read_history(write_run(name, records=[{"step": step, metric: 1 + step % 7} for step in range(50)]))
        for name in ("parent", "fork")
    )
    (own,), (forked,) = reported_runs([parent], [None]), reported_runs([run], [Fork(parent=parent, step=49)])
    (chart,) = (one for one in (run_charts._LOSS, *run_charts._CHARTS) if one.metric == metric)
    *_, line = run_charts._lines_of_one_run(chart, own, "step")
    (inherited,) = run_charts._inherited(chart, forked, "step")
    np.testing.assert_allclose(inherited.y, line.y, rtol=1e-12)


def test_a_fork_of_a_fork_begins_with_the_part_of_its_grandparent(trained):
    grandparent, parent = trained
    run = grandparent  # its own steps follow those of its parents
    fork = Fork(parent=parent, step=40, of_parent=Fork(parent=grandparent, step=20))
    page = render_page([run], forks=[fork], now_s=time.time())
    expected = recorded(grandparent, "val_loss", 0, 20) + recorded(parent, "val_loss", 20, 40)
    assert drawn(chart(page), "dotted grey s0") == [close_to(expected)]
    early = dataclasses.replace(fork, step=10)  # a step that the parent has from the grandparent
    page = render_page([run], forks=[early], now_s=time.time())
    assert drawn(chart(page), "dotted grey s0") == [close_to(recorded(grandparent, "val_loss", 0, 10))]


@pytest.mark.slow
def test_a_page_of_thirty_long_runs_stays_readable_and_small(write_run, make_page, records):
    folders = [
        write_run(
            f"run-{number:02}", records=records(1500, every=1, floor=1 + number / 30), seed=number,
            optimizer=optimizer(learning_rate=1e-3 * (1 + number), min_learning_rate=1e-5),
            phases=[
                {"step": step, "time_s": 1.7e9 + step, "phase": phase}
                for step in range(300)
                for phase in ("training", "saving")
            ],
            samples=[{"step": step, "prompt": "def ", "text": "def " + 200 * "x"} for step in range(50)],
        )
        for number in range(30)
    ]  # fmt: skip
    for folder in folders:
        finish(folder)
    page = make_page(*folders)
    assert len(page.encode()) < 2_000_000
    assert "<h1>Comparison of 30 runs</h1>" in page
    _, rows = table(page)
    assert [row[0] for _, row in rows] == [str(rank) for rank in range(1, 31)]
    looks = re.findall(r'<input type="checkbox" id="show-(\d+)" checked><svg[^>]*><path class="(.*?)"', page)
    assert len({look for _, look in looks}) == len({number for number, _ in looks}) == 30
    assert "<details open>" not in page
    assert page.count("<pre>") == 60  # two samples of each run
    assert len(re.findall(r'<path class="dotted (?:[\w ]+) s\d+"', chart(page))) == 30


def test_samples_of_several_runs_are_folded(write_run, make_page):
    samples = [{"step": 0, "prompt": "a", "text": "ab"}]
    one, two = write_run("one", samples=samples), write_run("two", samples=samples)
    assert "<details open>" in make_page(one)
    page = make_page(one, two)
    assert "<details open>" not in page
    assert page.count("<details>") == 3  # a sample of each run, and all options


@pytest.mark.parametrize("pattern", ["runs/lr-*", "lr-*", "{absolute}/lr-*", "runs/lr-[12]"])
def test_a_pattern_stands_for_the_runs_that_it_matches(write_run, tmp_path, monkeypatch, pattern):
    for name in ("lr-1", "lr-2", "other"):
        write_run(name)
    (tmp_path / "runs" / "lr-nothing").mkdir()
    (tmp_path / "runs" / "lr-3").write_text("a file")
    monkeypatch.chdir(tmp_path)
    pattern = pattern.format(absolute=tmp_path / "runs")
    page = report([pattern], out="page.html", console=Console(quiet=True)).read_text()
    assert "<h1>lr-1, lr-2</h1>" in page


def test_a_name_with_a_bracket_is_a_name(write_run, tmp_path, monkeypatch):
    folder = write_run("lr-[1]")
    monkeypatch.chdir(tmp_path)
    assert "<h1>lr-[1]</h1>" in report(["lr-[1]"], out="page.html", console=Console(quiet=True)).read_text()
    assert folder.path.is_dir()


def test_numbers_have_no_noise_and_no_padded_exponent(write_run, make_page):
    folder = write_run(
        records=[{"step": 1500, "loss": 123456.0, "val_loss": 2e7, "learning_rate": 3e-5, "grad_norm_max": 4e-7}],
        optimizer=optimizer(learning_rate=0.1 * 3e-3, min_learning_rate=3e-5 * 1.0000000000000002),
    )
    config = json.loads(folder.config.read_text())
    config["config"]["optimizer"]["learning_rate"] = 0.00030000000000000003
    write_json(folder.config, config)
    page = make_page(folder)
    body = page.split("<body>")[1].split("<script>")[0]
    texts = re.sub(r' (?:d|data-[xy]|x|y|x1|x2|y1|y2|width)="[^"]*"', "", body)
    assert re.findall(r"\de[+-]0\d|\d\.\d*(?:0{6}|9{6})\d*", texts) == []
    for name, value in (("optimizer.learning_rate", "3e-4"), ("optimizer.min_learning_rate", "3e-5")):
        assert f"<code>{name}</code></th><td>{value}</td>" in page
    assert "<code>train.max_steps</code></th><td>1,500</td>" in page
    assert "<code>optimizer.decay_steps</code></th><td>none</td>" in page
    assert "<code>prompts</code></th><td>&#34;def &#34;, &#34;import &#34;</td>" in page


# How color-blind people see linear sRGB: Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    values = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """The color in CIE L*a*b*, in which 2.3 is a difference that one just sees."""
    x, y, z = np.cbrt(XYZ @ np.clip(rgb, 1e-6, 1) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_colors_of_lines_are_different_for_color_blind_people(write_run, make_page, scheme, vision):
    page = make_page(write_run())
    blocks = re.findall(r":root \{.*?--back: (#\w+);(.*?)\}", page, re.DOTALL)
    back, block = blocks[scheme]
    colors = [linear(color) for color in re.findall(r"--color\d: (#\w+)", block)]
    assert len(colors) == 7
    seen = [lab(VISION[vision] @ color) for color in colors]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 18
    luminance = [float(XYZ[1] @ color) for color in (linear(back), *colors)]
    contrasts = [(max(luminance[0], y) + 0.05) / (min(luminance[0], y) + 0.05) for y in luminance[1:]]
    assert min(contrasts) > 2.8
