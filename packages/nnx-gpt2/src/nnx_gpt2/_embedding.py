"""Embedding lookup. Its gradient is summed in float32, on each device of a mesh separately.

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
    """Return the embeddings of tokens: the shape of `tokens` and one more dimension.

    Args:
        table_PC: the embeddings. Over a mesh they have the layout of `wte`.
        tokens: token ids.
        dtype: the type of the result.
    """

    def local(table_PC: Array, tokens: Array) -> Array:
        table_PC = gather_fsdp(table_PC.astype(dtype))
        rows = _local_rows(tokens, len(table_PC))
        return psum(jnp.take(table_PC, rows, axis=0, mode="fill", fill_value=0), TENSOR_AXIS)

    return over_mesh(local, (_TABLE_SPEC, _BATCH_SPEC), _BATCH_SPEC)(table_PC, tokens)


def _forward(table_PC: Array, tokens: Array, dtype: DType) -> tuple[Array, tuple[Array, Array]]:
    # The backward pass needs only the table's dtype and number of rows: an array with no columns keeps both.
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
    """Return the row of each token on this device, or `num_rows` if another device has it."""
    rows = tokens - axis_index(TENSOR_AXIS) * num_rows
    return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
