"""The shape of a GPT-2 in plain numbers. Imports no jax."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nnx_gpt2._choices import check_choice

DType = Literal["bfloat16", "float32", "float64"]
AttentionBackend = Literal["auto", "xla", "cudnn", "splash"]
RematPolicy = Literal["none", "dots", "full"]

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
            check_choice("model", name, getattr(self, name), choices)

    def check_axes(self, *, fsdp: int, tensor: int) -> None:
        """Refuse sizes of the mesh axes `fsdp` and `tensor` that do not divide the model.

        Raises:
            ValueError: the message names the axis, its size, and what it should divide.
        """
        for axis, size, name, divided in (
            ("tensor", tensor, "num_heads", self.num_heads),
            ("tensor", tensor, "mlp_dim", self.feed_forward_dim),
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
    def feed_forward_dim(self) -> int:
        """Width inside the feed-forward layer: `mlp_dim`, or four times `embed_dim`."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

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
