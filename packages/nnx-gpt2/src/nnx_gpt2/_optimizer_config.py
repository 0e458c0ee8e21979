"""The optimizer in plain numbers. Imports no jax."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from nnx_gpt2._choices import check_choice

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The update rule, its learning rate over time, and a clipped gradient.

    Raises:
        ValueError: a field is out of its range.
    """

    name: OptimizerName = "adamw"
    """The update rule: AdamW, or Muon on the blocks' matrices and AdamW on the rest, at the same rate."""

    schedule: ScheduleName = "cosine"
    """What follows the warmup: a cosine to the minimum, a plateau and a linear decay (`wsd`), or a plateau."""

    learning_rate: float = 6e-4
    """Peak learning rate, reached at the end of the warmup."""

    min_learning_rate: float = 6e-5
    """Learning rate at the last step of `cosine` and `wsd`. `constant` does not use it."""

    warmup_steps: int = 0
    """Steps of linear warmup. 0 starts at the peak."""

    decay_steps: int | None = None
    """Steps of the decay that ends `wsd`. None is a fifth of the run."""

    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only: biases and norms are spared."""

    beta1: float = 0.9
    """Decay of AdamW's first moment. (Muon's momentum is optax's, 0.95.)"""

    beta2: float = 0.95
    """Decay of the second moment."""

    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down. 0 never clips."""

    def __post_init__(self) -> None:
        """Check every field once."""
        check_choice("optimizer", "name", self.name, get_args(OptimizerName))
        check_choice("optimizer", "schedule", self.schedule, get_args(ScheduleName))
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"optimizer.learning_rate must be positive and finite, got {self.learning_rate}")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                "optimizer.min_learning_rate must lie between 0 and optimizer.learning_rate "
                f"({self.learning_rate}), got {self.min_learning_rate}"
            )
        for name in ("warmup_steps", "decay_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"optimizer.{name} must be a whole number, not negative, got {value}")
        for name in ("weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be finite and not negative, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {value}")
