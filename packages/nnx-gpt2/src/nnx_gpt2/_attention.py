"""Causal self-attention, by the fastest kernel that the backend has for the case at hand.

Shapes: B batch, T query position, S key position, N heads, H head width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from nnx_gpt2._dropout import dropout


def causal_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTNH: Float[Array, "B T N H"],
    v_BTNH: Float[Array, "B T N H"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention in which a position sees itself and what came before it.

    Vaswani et al., 2017 (arXiv:1706.03762), section 3.2.1, with a causal mask. On NVIDIA GPUs in
    bfloat16 it is cuDNN's flash kernel, unless attention weights are dropped out, which that kernel
    does not offer through JAX's public interface; elsewhere XLA compiles the plain formula.

    Args:
        q_BTNH: queries.
        k_BTNH: keys.
        v_BTNH: values.
        dropout_rate: probability of zeroing an attention weight.
        dropout_key: the key that decides which; without one, nothing is dropped.

    Returns:
        The weighted values, in the type of `v_BTNH`.
    """
    drops = dropout_key is not None and dropout_rate > 0
    if not drops and jax.default_backend() == "gpu" and q_BTNH.dtype == jnp.bfloat16:
        return jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True, implementation="cudnn")

    _, num_positions, _, head_dim = q_BTNH.shape
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH * head_dim**-0.5, k_BTNH, preferred_element_type=jnp.float32)
    visible_TS = jnp.tril(jnp.ones((num_positions, num_positions), dtype=bool))
    scores_BNTS = jnp.where(visible_TS[None, None], scores_BNTS, jnp.finfo(jnp.float32).min)
    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(v_BTNH.dtype)
    weights_BNTS = dropout(weights_BNTS, dropout_rate, dropout_key)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BTNH)
