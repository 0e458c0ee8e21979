"""Dropout whose randomness is handed in, so that a step is a pure function of its key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zero each element with probability `rate` and scale the others by `1 / (1 - rate)`.

    Srivastava et al., 2014, in the inverted form. Without a key, or at rate 0, `x` comes back as is.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def split_key(key: PRNGKeyArray | None, num: int) -> list[PRNGKeyArray | None]:
    """`num` keys out of one, or `num` times None, which means no dropout."""
    return [None] * num if key is None else list(jax.random.split(key, num))
