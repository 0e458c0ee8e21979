"""What a GPT-2 and its optimizer are, in plain numbers. Imports no jax."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

DType = Literal["bfloat16", "float32", "float64"]
AttentionBackend = Literal["auto", "xla", "cudnn", "splash"]
RematPolicy = Literal["none", "dots", "full"]
OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]

# Rows of the token embedding come in multiples of this, so that matrix units run full. Megatron-LM
# (Shoeybi et al., 2019, arXiv:1909.08053, section 4) pads to the same number for the same reason.
VOCAB_MULTIPLE = 128


def _check_choice(section: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{section}.{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """The shape of a GPT-2. The defaults are GPT-2 124M.

    Raises:
        ValueError: a field is out of its range, or `embed_dim` is no multiple of `num_heads`.
    """

    vocab_size: int = 50257
    """Number of token ids. Padding to a multiple of 128 happens inside the model, unseen."""

    seq_len: int = 1024
    """Context length, in tokens."""

    num_layers: int = 12
    """Number of transformer blocks."""

    num_heads: int = 12
    """Attention heads of each block."""

    embed_dim: int = 768
    """Width of the residual stream."""

    mlp_dim: int | None = None
    """Width inside the feed-forward layer. None is GPT-2's, four times `embed_dim`."""

    norm_epsilon: float = 1e-5
    """Added to the variance in layer norms."""

    dropout_rate: float = 0.0
    """Probability of zeroing an element of the embeddings, attention weights and residual branches."""

    dtype: DType = "float32"
    """Type that activations and matrix products are computed in. (float64 needs jax_enable_x64.)"""

    param_dtype: DType = "float32"
    """Type that parameters are stored in."""

    attention: AttentionBackend = "auto"
    """Kernel of the attention: `cudnn` (NVIDIA, bfloat16), `splash` (TPU), `xla` (anywhere), or `auto`."""

    remat: RematPolicy = "none"
    """What the backward pass computes again to save memory: nothing, all but matrix products, or whole blocks."""

    scan_layers: bool = False
    """Compile one block and loop over it: a deep model compiles sooner, and its parameters are stacked."""

    loss_chunk_tokens: int = 4096
    """Tokens per device whose logits exist at once: at most this many, but one position of each window at least."""

    def __post_init__(self) -> None:
        """Check every field once; code downstream trusts it."""
        for name in ("vocab_size", "seq_len", "num_layers", "num_heads", "embed_dim", "mlp_dim", "loss_chunk_tokens"):
            value = getattr(self, name)
            if value is None and name == "mlp_dim":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"model.{name} must be at least 1, got {value!r}")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"model.embed_dim must be a multiple of model.num_heads, got {self.embed_dim} and {self.num_heads}"
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"model.dropout_rate must be in [0, 1), got {self.dropout_rate}")
        if not isinstance(self.norm_epsilon, float) or not 0 < self.norm_epsilon < 1:
            raise ValueError(f"model.norm_epsilon must be between 0 and 1, got {self.norm_epsilon!r}")
        for name, choices in (
            ("dtype", get_args(DType)),
            ("param_dtype", get_args(DType)),
            ("attention", get_args(AttentionBackend)),
            ("remat", get_args(RematPolicy)),
        ):
            _check_choice("model", name, getattr(self, name), choices)

    def check_axes(self, *, fsdp: int, tensor: int) -> None:
        """Refuse sizes of the mesh axes `fsdp` and `tensor` that do not divide the model.

        Raises:
            ValueError: the message names the axis, its size, and what it should divide.
        """
        for axis, size, name, divided in (
            ("tensor", tensor, "num_heads", self.num_heads),
            ("tensor", tensor, "hidden_dim", self.hidden_dim),
            ("tensor", tensor, "padded_vocab_size", self.padded_vocab_size),
            ("fsdp", fsdp, "embed_dim", self.embed_dim),
        ):
            if divided % size:
                raise ValueError(
                    f"expected a mesh axis {axis} that divides the model's {name}, {divided}, got {size}: "
                    f"choose another size for {axis}"
                )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Width inside the feed-forward layer."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: `vocab_size` rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def check_mesh(
    *, fsdp: int, tensor: int, num_devices: int, devices_per_process: int, devices_per_slice: int | None = None
) -> None:
    """Reject sizes of the mesh axes `fsdp` and `tensor` that `make_mesh` would reject.

    A launcher calls it before any device is there.

    Args:
        fsdp: devices that share one copy of the parameters.
        tensor: devices that share each layer's work.
        num_devices: devices of all processes.
        devices_per_process: devices of each process.
        devices_per_slice: devices of each TPU slice, where there are several slices.

    Raises:
        ValueError: the axes do not divide the devices, `tensor` spans processes, or `fsdp` or `tensor` spans slices.
    """
    if fsdp < 1 or tensor < 1 or not num_devices or num_devices % (fsdp * tensor):
        raise ValueError(
            f"mesh axes fsdp and tensor must be at least 1 and their product must divide the {num_devices} devices, "
            f"got {fsdp} and {tensor}. Choose other sizes, or another number of devices."
        )
    if devices_per_process % tensor:
        raise ValueError(
            f"mesh axis tensor must divide the {devices_per_process} devices of one process, got {tensor}. Choose a "
            "smaller size, or processes of more devices: a tensor group stays within one process."
        )
    if devices_per_slice is not None and devices_per_slice % (fsdp * tensor):
        raise ValueError(
            f"mesh axes fsdp and tensor must have a product that divides the {devices_per_slice} devices of one TPU "
            f"slice, got {fsdp} and {tensor}. Choose smaller sizes: only the data axis spans slices."
        )


# The four published sizes: Radford et al., 2019, "Language Models are Unsupervised Multitask
# Learners", table 2. (The paper's counts are wrong; these functions' results have the right ones,
# as `num_params` computes.)


def gpt2(**changes: Any) -> GPT2Config:
    """GPT-2 small: 124 439 808 parameters. `changes` replace fields."""
    return dataclasses.replace(GPT2Config(), **changes)


def gpt2_medium(**changes: Any) -> GPT2Config:
    """GPT-2 medium: 354 823 168 parameters. `changes` replace fields."""
    return dataclasses.replace(GPT2Config(num_layers=24, num_heads=16, embed_dim=1024), **changes)


def gpt2_large(**changes: Any) -> GPT2Config:
    """GPT-2 large: 774 030 080 parameters. `changes` replace fields."""
    return dataclasses.replace(GPT2Config(num_layers=36, num_heads=20, embed_dim=1280), **changes)


def gpt2_xl(**changes: Any) -> GPT2Config:
    """GPT-2 XL: 1 557 611 200 parameters. `changes` replace fields."""
    return dataclasses.replace(GPT2Config(num_layers=48, num_heads=25, embed_dim=1600), **changes)


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
        _check_choice("optimizer", "name", self.name, get_args(OptimizerName))
        _check_choice("optimizer", "schedule", self.schedule, get_args(ScheduleName))
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
