"""What a GPT-2 and its optimizer are, in plain numbers. Imports no jax."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

DType = Literal["bfloat16", "float32"]

# Rows of the token embedding come in multiples of this, so that matrix units run full. Megatron-LM
# (Shoeybi et al., 2019, arXiv:1909.08053, section 4) pads to the same number for the same reason.
VOCAB_MULTIPLE = 128


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

    dropout_rate: float = 0.0
    """Probability of zeroing an element of the embeddings, attention weights and residual branches."""

    dtype: DType = "float32"
    """Type that activations and matrix products are computed in."""

    param_dtype: DType = "float32"
    """Type that parameters are stored in."""

    def __post_init__(self) -> None:
        """Check every field once; code downstream trusts it."""
        for name in ("vocab_size", "seq_len", "num_layers", "num_heads", "embed_dim"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"model.{name} must be at least 1, got {value}")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"model.embed_dim must be a multiple of model.num_heads, got {self.embed_dim} and {self.num_heads}"
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"model.dropout_rate must be in [0, 1), got {self.dropout_rate}")
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if value not in ("bfloat16", "float32"):
                raise ValueError(f"model.{name} must be bfloat16 or float32, got {value!r}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: `vocab_size` rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


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
    """AdamW with a linear warmup, a cosine decay and a clipped gradient.

    Raises:
        ValueError: a field is out of its range.
    """

    name: Literal["adamw"] = "adamw"
    """The update rule."""

    learning_rate: float = 6e-4
    """Peak learning rate, reached at the end of the warmup."""

    min_learning_rate: float = 6e-5
    """Learning rate at the last step, the end of the cosine."""

    warmup_steps: int = 0
    """Steps of linear warmup. 0 starts at the peak."""

    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only: biases and norms are spared."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down. 0 never clips."""

    def __post_init__(self) -> None:
        """Check every field once."""
        if self.name != "adamw":
            raise ValueError(f"optimizer.name must be adamw, got {self.name!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"optimizer.learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                "optimizer.min_learning_rate must lie between 0 and optimizer.learning_rate "
                f"({self.learning_rate}), got {self.min_learning_rate}"
            )
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"optimizer.{name} must not be negative, got {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {value}")
