"""`loss.png`: the loss curves of a run."""

from pretrain._run.history import RunHistory


def draw_losses(history: RunHistory, name: str) -> None:
    """Draw the loss curves into the run's folder.

    Args:
        history: the run's history.
        name: the title.
    """
    # matplotlib's import writes to its configuration folder, and may fail.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(record["step"], record[key]) for record in history.records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "val_loss" else None, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(history.folder.loss_picture, dpi=120)
