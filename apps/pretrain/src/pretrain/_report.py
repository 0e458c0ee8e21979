"""The end of a run: `result.json` and `loss.png`."""

import json
from typing import Any

from matplotlib.figure import Figure

from pretrain._metrics import read_metrics
from pretrain._run import RunFolder, write_json


def write_report(folder: RunFolder, name: str, *, wall_s: float) -> dict[str, Any]:
    """Sum up a run that has ended.

    Args:
        folder: the run's.
        name: the run's.
        wall_s: seconds that the last command took, from its start.

    Returns:
        What `result.json` holds.
    """
    records = read_metrics(folder.metrics)
    final: dict[str, Any] = {}
    for record in records:
        final |= record
    starts = [json.loads(line) for line in folder.starts.read_text().splitlines()]
    result = {
        "steps": final.pop("step"),
        "metrics": final,
        "wall_s": round(wall_s, 1),
        "restarts": len(starts) - 1,
        "workers": starts[-1]["workers"],
    }
    _draw_losses(folder, name)
    write_json(folder.result, result)
    return result


def _draw_losses(folder: RunFolder, name: str) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(record["step"], record[key]) for record in read_metrics(folder.metrics) if key in record]
        axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "val_loss" else None, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder.loss_picture, dpi=120)
