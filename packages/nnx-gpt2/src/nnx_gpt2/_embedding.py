"""Embedding lookups, the logits of the tied head, and the sums of the tables' gradients in float32.

Each device of a mesh adds the gradients of its own tokens. Only the sum is sent.

Shapes: P padded vocabulary, S context length, B batch, T position, C width, M tokens.
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
_POSITIONS_SPEC = param_spec("wpe.embedding", 2)
# The layout of the head: the rows of each device, one device after the other.
HEAD_SPEC = PartitionSpec((*BATCH_AXES, TENSOR_AXIS))


def lookup(
    table_PC: Float[Array, "P C"], tokens: Int[Array, "..."], dtype: DType
) -> tuple[Float[Array, "..."], Float[Array, "rows C"]]:
    """Return the embeddings of tokens, and the table for the tied head.

    The embeddings have the shape of `tokens` and one more dimension. The head has the layout `HEAD_SPEC`: over a mesh,
    each device has all columns. Its values are those of `dtype`. Its type is at least float32, for its gradient.

    Args:
        table_PC: the embeddings. Over a mesh they have the layout of `wte`.
        tokens: token ids.
        dtype: the type of the embeddings.
    """
    return _lookup(table_PC.astype(jnp.promote_types(dtype, jnp.float32)), tokens, dtype)


def logits(x_MC: Float[Array, "M C"], head_PC: Float[Array, "P C"]) -> Float[Array, "M P"]:
    """Apply the tied head: the products of `x_MC` with the rows of the table, in the type of `x_MC`.

    Sums and results are float32 at least. In bfloat16, neighbouring numbers near 100 differ by a half.
    """
    accumulate = jnp.promote_types(x_MC.dtype, jnp.float32)
    return jnp.einsum("MC,PC->MP", x_MC, head_PC.astype(x_MC.dtype), preferred_element_type=accumulate)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(table_PC: Array, tokens: Array, dtype: DType) -> tuple[Array, Array]:
    def local(table_PC: Array, tokens: Array) -> tuple[Array, Array]:
        full_PC = gather_fsdp(table_PC.astype(dtype))
        rows = _local_rows(tokens, len(full_PC))
        embeddings = psum(jnp.take(full_PC, rows, axis=0, mode="fill", fill_value=0), TENSOR_AXIS)
        return embeddings, full_PC.astype(table_PC.dtype)

    return over_mesh(local, (_TABLE_SPEC, _BATCH_SPEC), (_BATCH_SPEC, HEAD_SPEC))(table_PC, tokens)


def _forward(table_PC: Array, tokens: Array, dtype: DType) -> tuple[tuple[Array, Array], Array]:
    return _lookup(table_PC, tokens, dtype), tokens


def _backward(dtype: DType, tokens: Array, grads: tuple[Array, Array]) -> tuple[Array, None]:
    def local(tokens: Array, grad: Array, head_PC: Array) -> Array:
        head_PC = head_PC.at[_local_rows(tokens, len(head_PC))].add(grad.astype(head_PC.dtype), mode="drop")
        return reduce_scatter(head_PC)

    return over_mesh(local, (_BATCH_SPEC, _BATCH_SPEC, HEAD_SPEC), _TABLE_SPEC)(tokens, *grads), None


_lookup.defvjp(_forward, _backward)


@jax.custom_vjp
def add_positions(x_BTC: Float[Array, "B T C"], table_SC: Float[Array, "S C"]) -> Float[Array, "B T C"]:
    """Add the embeddings of the positions 0 to T - 1, in the type of `x_BTC`.

    Args:
        x_BTC: the embeddings of tokens.
        table_SC: the embeddings of positions. Over a mesh they have the layout of `wpe`.
    """

    def local(x_BTC: Array, table_SC: Array) -> Array:
        return x_BTC + gather_fsdp(table_SC.astype(x_BTC.dtype))[None, : x_BTC.shape[1]]

    return over_mesh(local, (_BATCH_SPEC, _POSITIONS_SPEC), _BATCH_SPEC)(x_BTC, table_SC)


def _add_positions_forward(x_BTC: Array, table_SC: Array) -> tuple[Array, Array]:
    return add_positions(x_BTC, table_SC), table_SC


def _add_positions_backward(table_SC: Array, grad_BTC: Array) -> tuple[Array, Array]:
    def local(grad_BTC: Array) -> Array:
        grad_TC = grad_BTC.sum(0, dtype=jnp.promote_types(grad_BTC.dtype, jnp.float32))
        return reduce_scatter(jnp.pad(grad_TC, ((0, len(table_SC) - len(grad_TC)), (0, 0))))

    return grad_BTC, over_mesh(local, (_BATCH_SPEC,), _POSITIONS_SPEC)(grad_BTC).astype(table_SC.dtype)


add_positions.defvjp(_add_positions_forward, _add_positions_backward)


def _local_rows(tokens: Array, num_rows: int) -> Array:
    """Return the row of each token on this device, or `num_rows` if another device has it."""
    rows = tokens - axis_index(TENSOR_AXIS) * num_rows
    return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
