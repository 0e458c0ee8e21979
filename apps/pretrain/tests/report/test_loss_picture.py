import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from pretrain._report.curves import robust_range, smooth, spread
from pretrain._report.loss_picture import draw_losses, loss_figure
from pretrain._report.reported_run import Fork
from pretrain._run.history import read_history

POINT = {"step": 25, "loss": 3.0}


def words(figure):
    """All texts of a figure."""
    upper, *_ = figure.axes
    return [text.get_text() for text in (*upper.texts, *figure.texts)]


@pytest.mark.parametrize(
    ("records", "starts"),
    [
        pytest.param([], [], id="nothing yet"),
        pytest.param([POINT], [], id="one point"),
        pytest.param([{"step": 0, "val_loss": 5.6}], [], id="validation only"),
        pytest.param([POINT, {"step": 50}, {"step": 75, "loss": 2.5}], [], id="a gap"),
        pytest.param([POINT, {"step": 50, "loss": 3.0}], [{"step": 0}, {"step": 30}], id="a restart, equal losses"),
    ],
)
def test_a_picture_of_any_run_is_drawn(write_run, records, starts):
    folder = write_run(records=records, starts=starts)
    draw_losses(read_history(folder), "run")
    picture = imread(folder.loss_picture)
    assert picture.shape == (750, 1200, 4)
    assert (picture[..., :3] < 0.5).any()
    assert [path.name for path in folder.path.glob("*.p*")] == ["loss.png"]


def test_the_picture_says_last_values_restarts_sizes_and_the_value_that_it_cuts_off(write_run, records):
    lines = records(40)
    lines[0]["val_loss"] = 10.9
    lines[-1] |= {"loss": 1.5111, "val_loss": 1.6222, "full_val_loss": 1.6333}
    folder = write_run(records=lines, starts=[{"step": 0}, {"step": 301}, {"step": 501}])
    figure = loss_figure(read_history(folder), "a run, $x_1$")
    assert words(figure) == [
        "training 1.5111",
        "validation 1.6222",
        "\N{BLACK UP-POINTING TRIANGLE} above the axis: up to 10.90, at step 0\n| 2 restarts",
        "a run, $x_1$",
        "834,432 parameters  ·  1.02M tokens (0.40 epochs) of builtin  ·  loss on all validation tokens 1.6333",
    ]


def test_the_label_at_the_end_of_a_line_is_the_last_loss_and_not_the_smoothed_one(write_run):
    noise = np.random.default_rng(0).normal(0, 0.2, 400)
    lines = [{"step": 10 * n, "loss": 3.0 + noise[n]} for n in range(1, 400)]
    lines[-1]["loss"] = 2.5
    assert smooth(np.array([line["loss"] for line in lines]))[-1] > 2.6
    assert words(loss_figure(read_history(write_run(records=lines)), "run"))[0] == "training 2.5000"


def test_the_picture_has_the_curves_of_the_records_and_a_tick_at_each_restart(write_run):
    lines = [
        {"step": 0, "val_loss": 5.0},
        {"step": 25, "loss": 4.0, "learning_rate": 0.25},
        {"step": 50, "loss": 3.0, "learning_rate": 0.5, "val_loss": 3.5},
    ]
    figure = loss_figure(read_history(write_run(records=lines, starts=[{"step": 0}, {"step": 26}])), "run")
    upper, lower = figure.axes
    curves = [np.asarray(line.get_xydata()).tolist() for axes in (upper, lower) for line in axes.get_lines()]
    assert curves == [[[25, 4.0], [50, 3.0]], [[0, 5.0], [50, 3.5]], [[25, 0.25], [50, 0.5]]]
    points, restarts = upper.collections
    assert np.asarray(points.get_offsets()).tolist() == [[25, 4.0], [50, 3.0]]
    assert [np.asarray(path.vertices)[:, 0].tolist() for path in restarts.get_paths()] == [[26, 26]]


def test_the_picture_of_a_fork_begins_with_its_parents_part_in_grey(write_run):
    def lines(steps):
        return [{"step": step, "loss": 5.0 - step / 50, "val_loss": 6.0 - step / 50} for step in steps]

    parent = read_history(write_run("parent", records=lines((0, 25, 50, 75))))
    history = read_history(write_run(records=lines((50, 75, 100))))
    upper, _ = loss_figure(history, "run", Fork(parent=parent, step=50)).axes
    curves = [(line.get_color(), np.asarray(line.get_xydata()).tolist()) for line in upper.get_lines()]
    grey, (training, validation) = curves[:2], [curve for _, curve in curves[2:]]
    assert [color for color, _ in grey] == ["#999999", "#999999"]
    assert [[point[0] for point in curve] for _, curve in grey] == [[0, 25, 50], [0, 25, 50]]
    assert grey[1][1] == [[0, 6.0], [25, 5.5], [50, 5.0]]
    assert validation == [[50, 5.0], [75, 4.5], [100, 4.0]]
    assert [point[0] for point in training] == [50, 75, 100]


def test_the_picture_has_numbers_as_people_write_them(write_run):
    lines = [
        {"step": step, "learning_rate": 3e-4 * step / 1500, "loss": 2e7 if step == 1500 else 3e7}
        for step in range(0, 1501, 100)
    ]
    figure = loss_figure(read_history(write_run(records=lines)), "run")
    FigureCanvasAgg(figure).draw()
    upper, lower = figure.axes
    assert [label.get_text() for label in lower.get_yticklabels()][:2] == ["0", "2e-4"]
    assert lower.yaxis.get_offset_text().get_text() == ""
    assert upper.texts[0].get_text() == "training 2e7"
    # The label of the axis is in the picture.
    assert lower.yaxis.get_label().get_window_extent().x0 > 4


def test_labels_at_the_ends_of_two_equal_lines_do_not_overlap(write_run, records):
    lines = records(40)
    lines[-1] |= {"val_loss": lines[-1]["loss"]}
    figure = loss_figure(read_history(write_run(records=lines)), "run")
    figure.draw_without_rendering()
    labels = [text.get_window_extent() for text in figure.axes[0].texts[:2]]
    assert not labels[0].overlaps(labels[1])
    assert max(label.x1 for label in labels) < figure.bbox.width


def test_the_upper_axis_counts_tokens(write_run, records):
    figure = loss_figure(read_history(write_run(records=records(40))), "run")
    figure.draw_without_rendering()
    upper = figure.axes[0]
    (top,) = upper.child_axes
    assert top.get_xlim() == tuple(1024 * step for step in upper.get_xlim())
    assert "400k" in [label.get_text() for label in top.get_xticklabels()]


@pytest.mark.parametrize("step", [0, 50])
def test_a_loss_far_above_the_others_does_not_squeeze_them(step):
    steps = np.arange(1000.0)
    losses = np.where(steps == step, 11.0, 3.0 - steps / 2000)
    low, high = robust_range([(steps, losses)])
    assert low < 2.501
    assert 3.0 < high < 3.2


def test_an_axis_shows_the_rise_of_a_diverging_loss():
    steps = np.arange(1000.0)
    _, high = robust_range([(steps, np.where(steps < 900, 3.0, steps / 100))])
    assert high > 9.9


def test_smoothing_keeps_a_line_and_lowers_noise():
    line = np.linspace(5, 1, 1000)
    noise = np.random.default_rng(0).normal(size=1000)
    assert np.abs(smooth(line) - line)[:-40].max() < 1e-9
    assert np.std(smooth(line + noise) - line) < 0.3


def test_labels_that_are_moved_apart_keep_their_order():
    moved = spread([0.5, 0.1, 0.52, 0.51], 0.1)
    assert np.argsort(moved).tolist() == [1, 0, 3, 2]
    assert np.diff(sorted(moved)).min() == pytest.approx(0.1)


def test_the_picture_of_a_run_has_its_name_and_replaces_the_former_one(write_run):
    history = read_history(write_run(records=[POINT]))
    pictures = []
    for name in ("first", "second"):
        draw_losses(history, name)
        pictures.append(imread(history.folder.loss_picture))
    assert (pictures[0] != pictures[1]).any(axis=(1, 2)).nonzero()[0].max() < 75  # rows of pixels: the title alone
