"""Looking up the embeddings of tokens: its gradient is summed in float32, and over a mesh by each device for itself.

Shapes: P padded vocabulary, C width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnx_gpt2._model_config import DType
from nnx_gpt2._sharding import (
    BATCH_AXES,
    TENSOR_AXIS,
    axis_index,
    gather_fsdp,
    over_mesh,
    param_spec,
    psum,
    reduce_scatter,
)

_TABLE_SPEC, _BATCH_SPEC = param_spec("wte.embedding", 2), PartitionSpec(BATCH_AXES)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table_PC: Float[Array, "P C"], tokens: Int[Array, "..."], dtype: DType) -> Float[Array, "..."]:
    """The rows of these tokens, one dimension more than `tokens`.

    Args:
        table_PC: the embeddings, over a mesh laid out as `wte` is.
        tokens: ids.
        dtype: the result's.
    """

    def local(table_PC: Array, tokens: Array) -> Array:
        table_PC = gather_fsdp(table_PC.astype(dtype))
        rows = _local_rows(tokens, len(table_PC))
        return psum(jnp.take(table_PC, rows, axis=0, mode="fill", fill_value=0), TENSOR_AXIS)

    return over_mesh(local, (_TABLE_SPEC, _BATCH_SPEC), _BATCH_SPEC)(table_PC, tokens)


def _forward(table_PC: Array, tokens: Array, dtype: DType) -> tuple[Array, tuple[Array, Array]]:
    # Of the table only its shape and type matter: an array of no columns carries them.
    return lookup(table_PC, tokens, dtype), (tokens, table_PC[:, :0])


def _backward(dtype: DType, saved: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    tokens, like = saved

    def local(like: Array, tokens: Array, grad: Array) -> Array:
        accumulate = jnp.promote_types(dtype, jnp.float32)
        table_PC = jnp.zeros((len(like), grad.shape[-1]), accumulate)
        table_PC = table_PC.at[_local_rows(tokens, len(like))].add(grad.astype(accumulate), mode="drop")
        return reduce_scatter(table_PC).astype(like.dtype)

    in_specs = (PartitionSpec(TENSOR_AXIS), _BATCH_SPEC, _BATCH_SPEC)
    return over_mesh(local, in_specs, _TABLE_SPEC)(like, tokens, grad), None


lookup.defvjp(_forward, _backward)


def _local_rows(tokens: Array, num_rows: int) -> Array:
    """Which of this device's rows each token is; beyond the end where it is another device's."""
    rows = tokens - axis_index(TENSOR_AXIS) * num_rows
    return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
