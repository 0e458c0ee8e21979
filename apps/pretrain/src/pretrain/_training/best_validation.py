"""The best validation of a run so far: the checkpoint to keep for it, and whether the run still improves."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from pretrain._config import TrainConfig


@dataclass(slots=True)
class BestValidation:
    """The lowest validation losses so far. All processes have the same."""

    train: TrainConfig
    """The intervals of the run."""

    best_loss: float | None = None
    """The lowest loss."""

    num_since_best: int = 0
    """The number of validations after that of the lowest loss."""

    best_saved_loss: float | None = None
    """The lowest loss of a step with a checkpoint in this run."""

    best_saved_step: int | None = None
    """The step of this checkpoint."""

    def add(self, step: int, loss: float, *, is_saved: bool) -> None:
        """Add a validation.

        Args:
            step: its step.
            loss: its loss.
            is_saved: whether the step has a checkpoint.
        """
        if _is_lower(loss, self.best_loss):
            self.best_loss, self.num_since_best = loss, 0
        else:
            self.num_since_best += 1
        if is_saved and _is_lower(loss, self.best_saved_loss):
            self.best_saved_loss, self.best_saved_step = loss, step

    def keep(self, step: int) -> bool:
        """Return whether a checkpoint is kept, whatever its age."""
        is_kept_for_good = self.train.keep_every is not None and step % self.train.keep_every == 0
        return is_kept_for_good or (self.train.keep_best and step == self.best_saved_step)

    @property
    def has_stalled(self) -> bool:
        """True if the run ends because its loss has not fallen for long."""
        patience = self.train.early_stop_evals
        return patience is not None and self.num_since_best >= patience

    def to_json(self) -> dict[str, Any]:
        """Return the losses, for the metadata of a checkpoint."""
        return {name: getattr(self, name) for name in _STORED}

    def restore(self, stored: dict[str, Any]) -> None:
        """Continue after the validations before a checkpoint.

        Args:
            stored: what `to_json` returned; empty for no validations.
        """
        for name, value in stored.items():
            setattr(self, name, value)


_STORED = tuple(field.name for field in dataclasses.fields(BestValidation))[1:]


def _is_lower(loss: float, best: float | None) -> bool:
    """Return whether a loss is the best so far. A loss that is not finite never is."""
    return math.isfinite(loss) and (best is None or loss < best)


def without_checkpoints(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the validations of another run, whose checkpoints are not those of this one."""
    return stored | {"best_saved_loss": None, "best_saved_step": None}
