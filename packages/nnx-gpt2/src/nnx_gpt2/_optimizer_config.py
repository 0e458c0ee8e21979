"""The configuration of the optimizer. Imports no jax."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, assert_never, get_args

from nnx_gpt2._errors import FLOAT32_MAX, INT32_MAX, is_number, is_one_of, is_whole, plain, require, shown
from nnx_gpt2._model_config import with_field_docs

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]
MuonScaling = Literal["rms", "spectral"]


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The update rule, the learning rate over time, and gradient clipping.

    Raises:
        ValueError: a field is out of its range.
    """

    name: OptimizerName = "adamw"
    """The update rule: AdamW, or Muon on the blocks' matrices and AdamW on the rest, with the head."""

    schedule: ScheduleName = "cosine"
    """The schedule after warmup: cosine decay to the minimum, a plateau and a linear decay (`wsd`), or a plateau."""

    learning_rate: float = 6e-4
    """Peak learning rate, reached at the end of the warmup."""

    min_learning_rate: float | None = None
    """Learning rate of the last step of `cosine` and `wsd`; None is `min_learning_rate_ratio` of the peak."""

    min_learning_rate_ratio: float = 0.1
    """Learning rate of that step as a share of the peak. A given `min_learning_rate` comes first."""

    warmup_steps: int = 0
    """Steps of linear warmup. 0 starts at the peak."""

    decay_steps: int | None = None
    """Steps of the final decay of `wsd`, at least 1; None is a fifth of the run."""

    weight_decay: float = 0.1
    """Decoupled weight decay of kernels and embeddings. Biases and norms do not decay."""

    beta1: float = 0.9
    """Decay of AdamW's first moment. Muon has `muon_momentum`."""

    beta2: float = 0.95
    """Decay of AdamW's second moment."""

    muon_learning_rate: float | None = None
    """Peak learning rate of Muon's matrices, with the schedule of the others; None is `learning_rate`."""

    muon_scaling: MuonScaling = "rms"
    """Length of Muon's updates. `rms`: a root mean square of 0.2, as AdamW's have about, so that one learning rate fits
    both. `spectral`: a spectral norm of max(1, outputs / inputs) ** 0.5, as of the first Muon, for rates such as 0.02.
    A rate of `rms` is the one of `spectral` divided by 0.2 * width ** 0.5, but for `mlp.c_proj`, by half of it."""

    muon_momentum: float = 0.95
    """Momentum of Muon."""

    muon_momentum_warmup_steps: int = 0
    """Updates in which Muon's momentum rises from 0.85, or from a smaller `muon_momentum`. 0 starts at
    `muon_momentum`; 300 is usual."""

    muon_weight_decay: float | None = None
    """Decoupled weight decay of Muon's matrices; None is `weight_decay`, which is that of the embeddings then too."""

    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down. 0 disables clipping."""

    average_decay: float = 0.0
    """Decay per update of a moving average of the parameters, such as 0.999; see `averaged_params`. The average needs
    the memory of the parameters once more. 0 keeps none."""

    def __post_init__(self) -> None:
        """Check every field."""
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        peak = self.learning_rate
        end = self.min_learning_rate
        ratio = self.min_learning_rate_ratio
        decay = self.decay_steps
        rate, muon_decay = self.muon_learning_rate, self.muon_weight_decay
        between = f"lie between 0 and learning_rate ({shown(peak)})"
        is_end = end is None or (is_number(peak) and is_number(end) and 0 <= end <= peak)
        in_float32 = f"be between 0 and {FLOAT32_MAX}"
        for name, constraint, holds in (
            ("name", f"be {' or '.join(get_args(OptimizerName))}", is_one_of(self.name, get_args(OptimizerName))),
            ("schedule", "be cosine, wsd or constant", is_one_of(self.schedule, get_args(ScheduleName))),
            ("learning_rate", f"be above 0 and at most {FLOAT32_MAX}", is_number(peak) and peak > 0),
            ("min_learning_rate", between, is_end),
            ("min_learning_rate_ratio", "be in [0, 1]", is_number(ratio) and 0 <= ratio <= 1),
            ("warmup_steps", f"be a whole number from 0 to {INT32_MAX}", is_whole(self.warmup_steps, 0, INT32_MAX)),
            ("decay_steps", f"be a whole number from 1 to {INT32_MAX}", decay is None or is_whole(decay, 1, INT32_MAX)),
            ("weight_decay", in_float32, is_number(self.weight_decay) and self.weight_decay >= 0),
            ("clip_norm", in_float32, is_number(self.clip_norm) and self.clip_norm >= 0),
            ("beta1", "be in [0, 1)", is_number(self.beta1) and 0 <= self.beta1 < 1),
            ("beta2", "be in [0, 1)", is_number(self.beta2) and 0 <= self.beta2 < 1),
            (
                "muon_learning_rate",
                f"be above 0 and at most {FLOAT32_MAX}",
                rate is None or (is_number(rate) and rate > 0),
            ),
            ("muon_scaling", "be rms or spectral", is_one_of(self.muon_scaling, get_args(MuonScaling))),
            ("muon_momentum", "be in [0, 1)", is_number(self.muon_momentum) and 0 <= self.muon_momentum < 1),
            (
                "muon_momentum_warmup_steps",
                f"be a whole number from 0 to {INT32_MAX}",
                is_whole(self.muon_momentum_warmup_steps, 0, INT32_MAX),
            ),
            ("muon_weight_decay", in_float32, muon_decay is None or (is_number(muon_decay) and muon_decay >= 0)),
            ("average_decay", "be in [0, 1)", is_number(self.average_decay) and 0 <= self.average_decay < 1),
        ):
            is_above = name == "min_learning_rate" and end is not None and is_number(end) and end > peak
            remedy = "Lower it too, or raise the peak." if is_above else ""
            require(holds, name, constraint, shown(getattr(self, name)), remedy)

    @property
    def final_learning_rate(self) -> float:
        """Learning rate of the last step of `cosine` and `wsd`, which `constant` does not use."""
        if self.min_learning_rate is None:
            return self.min_learning_rate_ratio * self.learning_rate
        return self.min_learning_rate

    @property
    def of_matrices(self) -> "OptimizerConfig":
        """The configuration with the learning rates of Muon's matrices: another peak, and the same shape."""
        if self.muon_learning_rate is None:
            return self
        share = self.final_learning_rate / self.learning_rate
        return replace(
            self, learning_rate=self.muon_learning_rate, min_learning_rate=None, min_learning_rate_ratio=share
        )

    def num_steps_before_decay(self, max_steps: int) -> int:
        """Return how many first steps have a learning rate that does not depend on the length of the run.

        Runs of two lengths have the same rates in the first `n` steps, where `n` is the smaller of the two results. A
        run of at most `n` steps so far may therefore continue as one of the other length. `constant` never decays, and
        `wsd` decays at the end. `cosine` decays from the step after the peak on; its last step has
        `final_learning_rate`, also if that step would have the peak.

        Args:
            max_steps: length of the run in steps.

        Raises:
            ValueError: `max_steps` is below 1, or warmup and decay of `wsd` are longer than the run.
        """
        max_steps = checked_length(max_steps)
        match self.schedule:
            case "cosine":
                peak_step = self.warmup_steps
                return peak_step + 1 if peak_step < max_steps - 1 else min(peak_step, max_steps)
            case "wsd":
                return max_steps - self.wsd_decay_steps(max_steps)
            case "constant":
                return max_steps
            case _:
                assert_never(self.schedule)

    def wsd_decay_steps(self, max_steps: int) -> int:
        """Return the steps of the decay of `wsd` in a run of `max_steps` steps.

        Raises:
            ValueError: warmup and decay are longer than the run.
        """
        decay = max(max_steps // 5, 1) if self.decay_steps is None else self.decay_steps
        require(
            self.warmup_steps + decay <= max_steps,
            "warmup_steps and decay_steps",
            f"fit into the {max_steps} steps of the run",
            f"{self.warmup_steps} and {decay}",
            "Lower one of the two, or raise the number of steps.",
        )
        return decay


def checked_length(max_steps: Any) -> int:
    """Return the length of a run in steps as an int.

    Raises:
        ValueError: it is no whole number, below 1, or above the largest int32.
    """
    max_steps = plain(max_steps)
    is_length = is_whole(max_steps, 1, INT32_MAX)
    require(is_length, "max_steps", f"be at least 1 and at most {INT32_MAX}", shown(max_steps))
    return max_steps
