"""The configuration of the model, and the published sizes. Imports no jax."""

import ast
import dataclasses
import inspect
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from nnx_gpt2._errors import INT32_MAX, is_number, is_one_of, is_whole, plain, require, shown

T = TypeVar("T", bound=type)

DType = Literal["bfloat16", "float32", "float64"]
SavedDType = Literal["bfloat16", "float16", "float32", "float64"]
SPLASH_MULTIPLE = 128
"""Splash attention takes positions in tiles of this many lanes."""

GradDType = Literal["bfloat16", "float32"]
AttentionBackend = Literal["auto", "xla", "cudnn", "splash"]
RematPolicy = Literal["none", "dots", "full"]

# The token embedding is padded to a multiple of this number of rows, to fill the matrix units. Megatron-LM
# (Shoeybi et al., 2019, arXiv:1909.08053, section 4) pads to the same number for the same reason.
VOCAB_MULTIPLE = 128

# Upper limits on the sizes, far above any model: token ids are int32, and XLA counts the elements of an array in int64.
# A million layers were not traced within four minutes. The deepest published transformers have a thousand.
_MOST = {"vocab_size": INT32_MAX, "loss_chunk_tokens": INT32_MAX, "num_layers": 10_000}
_MOST_OTHERWISE = 1 << 20

# Metadata of a field that says how the model is computed: it changes the results by rounding only.
_FREE = {"changes_result": False}


def with_field_docs(cls: T) -> T:
    """Put the docstring below each field of a dataclass with slots into `__slots__`, which `help` shows.

    Python keeps no docstrings of fields. It does keep those in `__slots__`, if this is a dictionary. The file of the
    class is parsed once for this, in some milliseconds.
    """
    source = inspect.getsourcefile(cls)
    if source is None or not Path(source).is_file():  # as in a frozen program
        return cls
    module = ast.parse(Path(source).read_bytes())
    (node,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    docs: dict[str, str | None] = dict.fromkeys(cls.__slots__)
    for above, below in pairwise(node.body):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            docs[above.target.id] = inspect.cleandoc(ast.literal_eval(below.value))
    cls.__slots__ = docs
    return cls


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """The shape of a GPT-2, and the way it is computed. The defaults are GPT-2 124M.

    Raises:
        ValueError: a field is out of its range, or `embed_dim` is no multiple of `num_heads`.
    """

    vocab_size: int = 50257
    """Number of token ids. The model pads it to a multiple of 128 internally."""

    seq_len: int = 1024
    """Context length, in tokens."""

    num_layers: int = 12
    """Number of transformer blocks."""

    num_heads: int = 12
    """Number of attention heads of each block."""

    embed_dim: int = 768
    """Width of the residual stream."""

    mlp_dim: int | None = None
    """Width inside the feed-forward layer; None is four times `embed_dim`, as in GPT-2."""

    norm_epsilon: float = 1e-5
    """Added to the variance in layer norms."""

    dropout_rate: float = 0.0
    """Probability of zeroing an element of the embeddings, attention weights and residual branches."""

    dtype: DType = "float32"
    """Type of activations and matrix products. (float64 needs jax_enable_x64.)"""

    param_dtype: DType = "float32"
    """Type of the stored parameters. bfloat16 is for a model that is not trained: see `check_trainable`."""

    residual_dtype: DType | None = None
    """Type of the residual stream, to which each layer adds; None is `dtype`."""

    grad_dtype: GradDType = "float32"
    """Type in which devices and microbatches add the gradients of a bfloat16 model's kernels. Biases, norms and
    embeddings are added in float32 always."""

    attention: AttentionBackend = field(default="auto", metadata=_FREE)
    """Attention kernel: `cudnn` (NVIDIA, bfloat16), `splash` (TPU), `xla` (any device), or `auto`."""

    remat: RematPolicy = field(default="none", metadata=_FREE)
    """Recomputation in the backward pass to save memory: nothing, all but matrix products, or entire blocks."""

    scan_layers: bool = False
    """Compile one block and loop over it. A deep model compiles faster, and its parameters are stacked."""

    loss_chunk_tokens: int = field(default=4096, metadata=_FREE)
    """Upper limit on the tokens per device whose logits are in memory at once; at least one position per window."""

    def __post_init__(self) -> None:
        """Check every field. Code downstream relies on it."""
        sizes = ("vocab_size", "seq_len", "num_layers", "num_heads", "embed_dim", "mlp_dim", "loss_chunk_tokens")
        for name in sizes:
            size = getattr(self, name)
            is_default, most = size is None and name == "mlp_dim", _MOST.get(name, _MOST_OTHERWISE)
            holds = is_default or (isinstance(size, int) and is_whole(size, 1, most))
            require(holds, name, f"be a whole number from 1 to {most}", shown(size))
        for name in ("norm_epsilon", "dropout_rate"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        dim = self.embed_dim
        num_heads = self.num_heads
        epsilon = self.norm_epsilon
        rate = self.dropout_rate
        found, below = f"{dim} and {num_heads}", dim - dim % num_heads
        remedy = f"Choose {f'{below} or ' if below else ''}{below + num_heads}, or another number of heads."
        require(dim % num_heads == 0, "embed_dim", "be a multiple of num_heads", found, remedy)
        for name, constraint, holds in (
            ("dropout_rate", "be in [0, 1)", is_number(rate) and 0 <= rate < 1),
            ("norm_epsilon", "be between 0 and 1", is_number(epsilon) and 0 < epsilon < 1),
            ("dtype", "be bfloat16, float32 or float64", is_one_of(self.dtype, get_args(DType))),
            ("param_dtype", "be bfloat16, float32 or float64", is_one_of(self.param_dtype, get_args(DType))),
            ("residual_dtype", "be None, or a type of at least the precision of dtype", _can_hold_layers(self)),
            ("grad_dtype", "be float32 or bfloat16", is_one_of(self.grad_dtype, get_args(GradDType))),
            ("attention", "be auto, xla, cudnn or splash", is_one_of(self.attention, get_args(AttentionBackend))),
            ("remat", "be none, dots or full", is_one_of(self.remat, get_args(RematPolicy))),
            ("scan_layers", "be True or False", isinstance(self.scan_layers, bool)),
        ):
            require(holds, name, constraint, shown(getattr(self, name)))

    def check_axes(self, *, fsdp: int, tensor: int) -> None:
        """Reject sizes of the mesh axes `fsdp` and `tensor` that do not divide the model.

        Raises:
            ValueError: the message names the axis, its size, and the dimension.
        """
        fsdp, tensor = plain(fsdp), plain(tensor)
        for axis, size, name, dim in (
            ("tensor", tensor, "num_heads", self.num_heads),
            ("tensor", tensor, "mlp_dim", self.feed_forward_dim),
            ("tensor", tensor, "padded_vocab_size", self.padded_vocab_size),
            ("fsdp", fsdp, "embed_dim", self.embed_dim),
        ):
            divides = is_whole(size, 1) and dim % size == 0
            require(divides, f"mesh axis {axis}", f"divide {name} ({dim})", shown(size), "Choose another size.")

    def check_trainable(self) -> None:
        """Reject parameters in bfloat16, and an attention kernel that the windows or the types of the model rule out.

        bfloat16 loses small updates: near 1 its numbers differ by 1/128 and 1/256. The scale of a norm, 1 at the start,
        could not move at learning rates below 2e-3. Creating a training state and a train step makes this check. An
        application can call it before it starts anything.

        Raises:
            ValueError: the message names the field.
        """
        require(
            self.param_dtype != "bfloat16",
            "param_dtype",
            "be float32 or float64 for training",
            shown(self.param_dtype),
            "Set dtype to bfloat16 to compute in bfloat16.",
        )
        length = self.seq_len
        dropout = self.dropout_rate
        dtype = self.dtype
        for backend, holds, needs, found in (
            ("splash", length % SPLASH_MULTIPLE == 0, f"a multiple of {SPLASH_MULTIPLE} positions", length),
            ("cudnn", dtype == "bfloat16", "the type bfloat16", dtype),
            ("splash", dropout == 0, "no dropout", dropout),
            ("cudnn", dropout == 0, "no dropout", dropout),
        ):
            fits = holds or self.attention != backend
            require(fits, f"attention backend {backend}", f"have {needs}", found, "Choose auto.")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def stream_dtype(self) -> DType:
        """Type of the residual stream: `residual_dtype`, or `dtype`."""
        return self.dtype if self.residual_dtype is None else self.residual_dtype

    @property
    def feed_forward_dim(self) -> int:
        """Width inside the feed-forward layer: `mlp_dim`, or four times `embed_dim`."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: `vocab_size` rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _can_hold_layers(config: GPT2Config) -> bool:
    """Return whether the type of the residual stream is at least as precise as that of the layers."""
    types = get_args(DType)
    dtype = config.dtype
    stream = config.residual_dtype
    if stream is None or not is_one_of(dtype, types):
        return stream is None or is_one_of(stream, types)
    return is_one_of(stream, types) and types.index(stream) >= types.index(dtype)


# The four published sizes: Radford et al., 2019, "Language Models are Unsupervised Multitask
# Learners", table 2. (The paper's parameter counts are wrong. The counts below are those of `num_params`.)


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
