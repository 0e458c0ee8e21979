"""`loss.png`: the loss curves of a run."""

import io
import textwrap
from typing import TYPE_CHECKING

from nnx_gpt2 import num_params
from pretrain._formats import axis_number, count, four_digits, loss, plain
from pretrain._report.curves import points, robust_range, smooth, spread
from pretrain._report.reported_run import Fork, fork_of, reported_runs
from pretrain._run.history import RunHistory
from pretrain._run.metrics import last_values
from pretrain._surroundings.output_file import write_output

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Colors of Okabe and Ito, which color-blind people can tell apart: https://jfly.uni-koeln.de/color/
_TRAINING, _VALIDATION, _RATE, _NOTE = "#0072B2", "#D55E00", "#009E73", "#444444"
_INHERITED = "#999999"
_LABEL_HEIGHT = 0.06  # of a line's last value, as a share of the axis


def draw_losses(history: RunHistory, name: str) -> None:
    """Draw the loss curves into the run's folder.

    Args:
        history: the run's history.
        name: the title.
    """
    content = io.BytesIO()
    loss_figure(history, name, fork_of(history)).savefig(content, dpi=150, format="png")
    write_output(history.folder.loss_picture, content.getvalue())


def loss_figure(history: RunHistory, name: str, fork: Fork | None = None) -> "matplotlib.figure.Figure":
    """Return the loss curves, with the learning rate below.

    Args:
        history: the run's history.
        name: the title.
        fork: the beginning that another run has trained, which is drawn in grey; None for a run that began by itself.
    """
    # matplotlib's import writes to its configuration folder, and may fail.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(8, 5))
    # Fixed margins: matplotlib's layouts shrink the axes to nothing beside long labels.
    margins = {"left": 0.11, "right": 0.82, "top": 0.81, "bottom": 0.1, "hspace": 0.12}
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(5, 1), gridspec_kw=margins)
    _draw_curves(upper, history, fork)
    upper.set_ylabel("loss (nats per token)")
    upper.tick_params(axis="x", length=0)
    config = history.description.config
    tokens_per_step = config.train.global_batch_size * config.model.seq_len
    top = upper.secondary_xaxis("top", functions=(lambda step: step * tokens_per_step, lambda n: n / tokens_per_step))
    top.set_xlabel("training tokens", fontsize="small")
    rates = points(history.records, "learning_rate")
    lower.plot(*rates, color=_RATE, marker="." if len(rates[0]) == 1 else None)
    lower.set_ylim(0, 1.15 * max(rates[1], default=1.0) or 1.0)
    lower.set_ylabel("learning\nrate", fontsize="small")
    lower.tick_params(axis="y", labelsize="small")
    lower.yaxis.set_major_locator(MaxNLocator(2))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: plain(rate)))
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    lower.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    top.xaxis.set_major_locator(MaxNLocator(7))
    top.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: axis_number(tokens)))
    top.tick_params(labelsize="small")
    for axes in (upper, lower):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines["right"].set_visible(False)
    # A name is text: a dollar sign in it starts no formula.
    left, text = margins["left"], {"parse_math": False, "va": "top"}
    figure.text(left, 0.97, textwrap.shorten(name, 70), fontsize="large", fontweight="bold", **text)
    figure.text(left, 0.925, _subtitle(history), fontsize="small", color=_NOTE, **text)
    return figure


def _draw_curves(axes: "matplotlib.axes.Axes", history: RunHistory, fork: Fork | None) -> None:
    curves = {name: points(history.records, name) for name in ("loss", "val_loss")}
    curves = {name: curve for name, curve in curves.items() if len(curve[0])}
    if not curves:
        return
    (run,) = reported_runs([history], [fork])
    inherited = [run.inherited(name, "step")[1:] for name in curves]
    low, high = robust_range([*curves.values(), *(curve for curve in inherited if len(curve[0]))])
    axes.set_ylim(low, high)
    for name, (steps, losses) in zip(curves, inherited, strict=True):
        if len(steps):
            axes.plot(steps, smooth(losses) if name == "loss" else losses, color=_INHERITED, linewidth=1.8)
    ends = []
    if "loss" in curves:
        steps, losses = curves["loss"]
        size, alpha = (16, 0.3) if len(steps) < 200 else (5, max(0.02, min(0.2, 1500 / len(steps))))
        axes.scatter(steps, losses, s=size, color=_TRAINING, alpha=alpha, linewidths=0)
        smoothed = smooth(losses)
        axes.plot(steps, smoothed, color=_TRAINING, linewidth=1.8, marker="o" if len(steps) == 1 else None)
        ends.append(("training", losses[-1], smoothed[-1], _TRAINING))
    if "val_loss" in curves:
        steps, losses = curves["val_loss"]
        axes.plot(steps, losses, color=_VALIDATION, linewidth=1.8, marker="o", markersize=4 if len(steps) < 60 else 2)
        ends.append(("validation", losses[-1], losses[-1], _VALIDATION))
    heights = spread([(y - low) / (high - low) for _, _, y, _ in ends], _LABEL_HEIGHT)
    for (label, value, _, color), height in zip(ends, heights, strict=True):
        place = {"xycoords": ("axes fraction", "axes fraction"), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{label} {loss(float(value))}", (1, height), (6, 0), color=color, fontsize="medium", **place)
    notes = []
    above = max(((losses.max(), steps[losses.argmax()]) for steps, losses in curves.values()), key=lambda at: at[0])
    if above[0] > high:
        highest = four_digits(float(above[0]))
        notes.append(f"\N{BLACK UP-POINTING TRIANGLE} above the axis: up to {highest}, at step {above[1]:,.0f}")
    restarts = [start["step"] for start in history.starts[1:]]
    if restarts:
        axes.vlines(restarts, 0, 0.05, transform=axes.get_xaxis_transform(), color=_NOTE, linewidth=1.5)
        notes.append(f"| {len(restarts)} restart{'s' * (len(restarts) > 1)}")
    place = {"transform": axes.transAxes, "ha": "right", "va": "top", "multialignment": "right"}
    axes.text(0.985, 0.965, "\n".join(notes), fontsize="small", color=_NOTE, **place)


def _subtitle(history: RunHistory) -> str:
    config, final = history.description.config, last_values(history.records)
    # The vocabulary is resolved in a run's description.
    words = [f"{count(num_params(config.model))} parameters"]  # pyright: ignore[reportArgumentType]
    if "tokens" in final:
        epochs = f" ({final['epoch']:.2f} epochs)" if final.get("epoch", 0) >= 0.01 else ""
        words.append(f"{count(final['tokens'])} tokens{epochs} of {textwrap.shorten(config.data, 40)}")
    else:
        words.append(f"data {textwrap.shorten(config.data, 40)}")
    if "full_val_loss" in final:
        words.append(f"loss on all validation tokens {loss(final['full_val_loss'])}")
    return "  ·  ".join(words)
