"""The report of a finished run: `result.json` and `loss.png`."""

import dataclasses
from dataclasses import dataclass

from pretrain._best_effort import best_effort
from pretrain._errors import UsageError
from pretrain._run.files import parse_json, read_lines, write_json
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import Record, last_values


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The content of `result.json`. A field is None if the run's files do not have its value."""

    steps: int | None
    """Steps of the run."""

    metrics: dict[str, float]
    """The last value of each metric."""

    wall_s: float
    """Seconds from the start of the last command."""

    restarts: int | None
    """Starts of the workers after the first."""

    workers: int | None
    """Workers of the last start."""

    num_params: int | None = None
    """Parameters of the model. (Runs of pretrain 0.7 and earlier lack this field and the next two.)"""

    tokens: int | None = None
    """Training tokens seen."""

    epochs: float | None = None
    """Passes over the training windows."""

    def summary(self) -> str:
        """Return the steps and the validation loss as text."""
        words = [] if self.steps is None else [f"{self.steps} steps"]
        if (loss := self.metrics.get("val_loss")) is not None:
            words.append(f"validation loss {loss:.4f}")
        return ", ".join(words) or "metrics unknown"


def write_report(folder: RunFolder, name: str, *, wall_s: float, num_params: int) -> RunResult:
    """Write `result.json` and `loss.png`.

    `result.json` is written first, and marks the run as finished.

    Args:
        folder: the run's folder.
        name: the title of the picture.
        wall_s: seconds from the start of the last command.
        num_params: parameters of the model.
    """
    records = read_lines(folder.metrics)
    final = last_values(records)
    starts = read_lines(folder.starts)
    result = RunResult(
        steps=final.pop("step", None),
        tokens=final.pop("tokens", None),
        epochs=final.pop("epoch", None),
        num_params=num_params,
        metrics=final,
        wall_s=round(wall_s, 1),
        restarts=len(starts) - 1 if starts else None,
        workers=starts[-1].get("workers") if starts else None,
    )
    write_json(folder.result, dataclasses.asdict(result))
    with best_effort(f"the picture {folder.loss_picture}"):
        _draw_losses(records, folder, name)
    return result


def read_result(folder: RunFolder) -> RunResult | None:
    """Read `result.json`. Return None if the run is not finished.

    A damaged file counts as missing: the run then continues from its last checkpoint, and writes the file again.
    """
    if not folder.result.exists():
        return None
    try:
        return parse_json(RunResult, folder.result.read_bytes(), folder.result, "The run writes it again.")
    except UsageError:
        return None


def _draw_losses(records: list[Record], folder: RunFolder, name: str) -> None:
    # matplotlib's import writes to its configuration folder, and may fail.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("val_loss", "validation")):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "val_loss" else None, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(folder.loss_picture, dpi=120)
