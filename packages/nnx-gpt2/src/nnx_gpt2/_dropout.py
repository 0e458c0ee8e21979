"""Dropout with explicit random keys, which keeps a step a pure function of its key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zero each element with probability `rate` and scale the others by `1 / (1 - rate)`.

    Srivastava et al., 2014, in the inverted form. Without a key, or at rate 0, `x` is returned unchanged.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def split_key(key: PRNGKeyArray | None, num: int) -> list[PRNGKeyArray | None]:
    """Split a key into `num` keys. Without a key, return `num` times None: no dropout."""
    return [None] * num if key is None else list(jax.random.split(key, num))
