"""Causal self-attention, by the fastest kernel that the devices have for the inputs.

Shapes: B batch, T query position, S key position, N heads, H head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nnx_gpt2._dropout import check_key, drop, split_key
from nnx_gpt2._errors import is_number, is_one_of, kind, plain, require, shown
from nnx_gpt2._model_config import SPLASH_MULTIPLE, AttentionBackend
from nnx_gpt2._sharding import BATCH_AXES, TENSOR_AXIS, constrain, under_mesh
from nnx_gpt2._target import Target, compute_capability, has_bfloat16, target_for
from nnx_gpt2._token_ids import has_type

# The plain formula works on blocks of queries, each with the keys that it can see. The number of blocks has an upper
# bound and their size a lower bound: more blocks save little arithmetic and cost compile time.
_MAX_BLOCKS, _MIN_BLOCK = 4, 64
# cuDNN has wider heads on GPUs of compute capability 9 and above only.
_CUDNN_MAX_WIDTH = 128

# The largest tile of the splash kernel, in positions: MaxText's default for all of its tiles
# (AI-Hypercomputer/maxtext, sa_block_q and others). JAX's own default is 128, with a note that sizes matter greatly.
_MAX_TILE = 512
_TILES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")

# What a kernel needs, for errors.
_NEEDS = {
    "cudnn": (
        "bfloat16 on an NVIDIA GPU of compute capability 8 or above, an even number of positions, heads of a width "
        f"that is a multiple of 8 up to {_CUDNN_MAX_WIDTH}"
    ),
    "splash": f"a multiple of {SPLASH_MULTIPLE} positions, on TPUs one device or a step over a mesh",
}

_HEADS = (BATCH_AXES, None, TENSOR_AXIS, None)


def causal_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTNH: Float[Array, "B T N H"],
    v_BTNH: Float[Array, "B T N H"],
    *,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    backend: AttentionBackend = "auto",
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention in which a position sees itself and earlier positions.

    Vaswani et al., 2017 (arXiv:1706.03762), section 3.2.1, with a causal mask. The backends:

    - `cudnn`: cuDNN's flash kernel, for bfloat16 on NVIDIA GPUs of compute capability 8 or above, an even T, and H a
      multiple of 8 up to 128. Segments need a mask in memory.
    - `splash`: Pallas' splash kernel, for TPUs and T a multiple of 128. XLA cannot split it: the program must be one of
      this package's steps, or the arrays must lie on one device. Other devices interpret it, slowly.
    - `xla`: the plain formula on blocks of queries, for any device. Only this backend supports dropout.
    - `auto`: the first backend in this list that supports the inputs.

    Args:
        q_BTNH: queries.
        k_BTNH: keys.
        v_BTNH: values.
        segment_ids_BT: if given, a position sees only positions of its own segment (document).
        dropout_rate: probability of zeroing an attention weight.
        dropout_key: random key of the dropout. None disables dropout.
        backend: the kernel.

    Returns:
        The weighted values, of the type of `v_BTNH`.

    Raises:
        ValueError: the inputs have other types or shapes, there are no positions, or the backend does not support
            the inputs.
    """
    _check_inputs(q_BTNH, k_BTNH, v_BTNH, segment_ids_BT)
    dropout_rate = plain(dropout_rate)
    is_rate = is_number(dropout_rate) and 0 <= dropout_rate < 1
    require(is_rate, "dropout_rate", "be in [0, 1)", shown(dropout_rate))
    if dropout_key is not None:
        check_key(dropout_key, "dropout_key")
    is_known = is_one_of(backend, get_args(AttentionBackend))
    require(is_known, "attention backend", "be auto, xla, cudnn or splash", shown(backend))
    drops = dropout_key is not None and dropout_rate > 0
    target = target_for(q_BTNH)
    supported: dict[AttentionBackend, bool] = {
        "cudnn": not drops and _supports_cudnn(q_BTNH, target),
        "splash": not drops and _supports_splash(q_BTNH, target),
        "xla": True,
    }
    if backend == "auto":
        interpreted = "splash" if target.platform != "tpu" else None
        backend = next(name for name in supported if supported[name] and name != interpreted)
    require(
        supported[backend],
        f"attention backend {backend}",
        f"have {_NEEDS.get(backend)}, and no dropout",
        f"{q_BTNH.dtype}{list(q_BTNH.shape)} on {_shown(target)}, dropout {dropout_rate if drops else 0}",
        "Choose auto.",
    )
    if backend == "xla":
        return _xla(q_BTNH, k_BTNH, v_BTNH, segment_ids_BT, dropout_rate, dropout_key)
    kernel = _cudnn if backend == "cudnn" else partial(_splash, interpret=target.platform != "tpu")
    return _on_each_device(kernel, q_BTNH, k_BTNH, v_BTNH, segment_ids_BT)


def _check_inputs(q_BTNH: Any, k_BTNH: Any, v_BTNH: Any, segment_ids_BT: Any) -> None:
    """Check types and shapes, which would broadcast."""
    inputs, name = (q_BTNH, k_BTNH, v_BTNH), "queries, keys and values"
    are_alike = all(has_type(x, jnp.floating) and x.ndim == 4 and x.shape == q_BTNH.shape for x in inputs)
    constraint = "be floating-point numbers of one shape [batch, positions, heads, head width]"
    require(are_alike, name, constraint, ", ".join(map(kind, inputs)))
    require(q_BTNH.shape[1] >= 1, name, "have at least 1 position", q_BTNH.shape[1])
    require(q_BTNH.shape[3] >= 1, name, "have a head width of at least 1", q_BTNH.shape[3])
    if segment_ids_BT is not None:
        are_ids = has_type(segment_ids_BT, jnp.integer) and segment_ids_BT.shape == q_BTNH.shape[:2]
        require(are_ids, "segment ids", f"be integers of shape {list(q_BTNH.shape[:2])}", kind(segment_ids_BT))


def _supports_splash(q_BTNH: Array, target: Target) -> bool:
    is_whole = target.platform != "tpu" or target.num_devices == 1 or under_mesh()
    return is_whole and q_BTNH.shape[1] % SPLASH_MULTIPLE == 0


def _supports_cudnn(q_BTNH: Array, target: Target) -> bool:
    """Return whether cuDNN has the kernel, and that of its gradient."""
    _, num_positions, _, head_dim = q_BTNH.shape
    is_new = compute_capability(target.device) is not None and has_bfloat16(target.device)
    has_width = head_dim % 8 == 0 and head_dim <= _CUDNN_MAX_WIDTH
    return is_new and q_BTNH.dtype == jnp.bfloat16 and has_width and num_positions % 2 == 0


def _shown(target: Target) -> str:
    number = "several" if target.num_devices is None else target.num_devices
    return target.platform if number == 1 else f"{number} devices of {target.platform}"


def _xla(
    q_BTNH: Array,
    k_BTNH: Array,
    v_BTNH: Array,
    segment_ids_BT: Array | None,
    dropout_rate: float,
    dropout_key: PRNGKeyArray | None,
) -> Array:
    num_positions, head_dim = q_BTNH.shape[1], q_BTNH.shape[3]
    # Move heads before positions once, not in every product.
    q_BNTH, k_BNSH, v_BNSH = (
        constrain(x_BTNH, *_HEADS).swapaxes(1, 2) for x_BTNH in (q_BTNH * head_dim**-0.5, k_BTNH, v_BTNH)
    )
    block = max(_MIN_BLOCK, -(-num_positions // _MAX_BLOCKS))
    starts = range(0, num_positions, block)
    outputs = []
    for start, key in zip(starts, split_key(dropout_key, len(starts)), strict=True):
        end = min(start + block, num_positions)
        visible_BNTS = (jnp.arange(start, end)[:, None] >= jnp.arange(end)[None])[None, None]
        if segment_ids_BT is not None:
            same_BTS = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, :end]
            visible_BNTS = visible_BNTS & same_BTS[:, None]
        q_block = q_BNTH[:, :, start:end]
        k_seen = k_BNSH[:, :, :end]
        v_seen = v_BNSH[:, :, :end]
        if key is None or dropout_rate == 0:
            outputs.append(_mix(q_block, k_seen, v_seen, visible_BNTS))
        else:
            # The backward pass has the mask, and computes the weights again.
            keep_BNTS = jax.random.bernoulli(key, 1 - dropout_rate, (*q_block.shape[:3], end))
            mix = jax.checkpoint(partial(_mix, dropout_rate=dropout_rate))
            outputs.append(mix(q_block, k_seen, v_seen, visible_BNTS, keep_BNTS))
    return constrain(jnp.concatenate(outputs, axis=2).swapaxes(1, 2), *_HEADS)


def _mix(
    q_BNTH: Array,
    k_BNSH: Array,
    v_BNSH: Array,
    visible_BNTS: Array,
    keep_BNTS: Array | None = None,
    dropout_rate: float = 0.0,
) -> Array:
    """Return the weighted values of a block of queries."""
    accumulate = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    scores_BNTS = jnp.einsum("BNTH,BNSH->BNTS", q_BNTH, k_BNSH, preferred_element_type=accumulate)
    if keep_BNTS is not None:
        # The compiler of TPUs would fuse the recomputed product into the next ones, and its search for their tiles
        # overflows the stack of a thread (libtpu 0.0.42).
        scores_BNTS = jax.lax.optimization_barrier(scores_BNTS)
    scores_BNTS = jnp.where(visible_BNTS, scores_BNTS, jnp.finfo(accumulate).min)
    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    if keep_BNTS is not None:
        weights_BNTS = drop(weights_BNTS, dropout_rate, keep_BNTS)
    return jnp.einsum("BNTS,BNSH->BNTH", weights_BNTS.astype(v_BNSH.dtype), v_BNSH)


def _cudnn(q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, segment_ids_BT: Array | None) -> Array:
    mask_BNTS = None
    if segment_ids_BT is not None:
        mask_BNTS = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, mask=mask_BNTS, is_causal=True, implementation="cudnn")


def _splash(q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, segment_ids_BT: Array | None, *, interpret: bool) -> Array:
    # Pallas takes a second to import, and only this backend needs it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    num_positions, num_heads, head_dim = q_BTNH.shape[1:]
    mask = splash_attention_mask.CausalMask((num_positions, num_positions))
    kernel: Any = splash.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(_TILES, _tile(num_positions))),
        interpret=interpret,
    )
    q_BNTH, k_BNTH, v_BNTH = (x.swapaxes(1, 2) for x in (q_BTNH * head_dim**-0.5, k_BTNH, v_BTNH))
    if segment_ids_BT is None:
        mixed_BNTH = jax.vmap(kernel)(q_BNTH, k_BNTH, v_BNTH)
    else:
        mixed_BNTH = jax.vmap(kernel)(q_BNTH, k_BNTH, v_BNTH, splash.SegmentIds(segment_ids_BT, segment_ids_BT))
    return mixed_BNTH.swapaxes(1, 2)


def _tile(num_positions: int) -> int:
    """Return the largest tile that divides the positions. They are a multiple of 128."""
    tiles = range(SPLASH_MULTIPLE, _MAX_TILE + 1, SPLASH_MULTIPLE)
    return max(tile for tile in tiles if num_positions % tile == 0)


def _on_each_device(
    kernel: Callable[..., Array], q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, segment_ids_BT: Array | None
) -> Array:
    """Run a kernel that XLA cannot partition: each device computes its own rows and heads."""
    if not under_mesh():
        return kernel(q_BTNH, k_BTNH, v_BTNH, segment_ids_BT)
    heads = PartitionSpec(*_HEADS)
    segments = None if segment_ids_BT is None else PartitionSpec(BATCH_AXES)
    split = jax.shard_map(kernel, in_specs=(heads, heads, heads, segments), out_specs=heads, check_vma=False)
    return split(q_BTNH, k_BTNH, v_BTNH, segment_ids_BT)
