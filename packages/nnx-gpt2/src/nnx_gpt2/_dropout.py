"""Dropout with explicit random keys, which keeps a step a pure function of its key."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from nnx_gpt2._errors import kind, require
from nnx_gpt2._token_ids import has_type


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zero each element with probability `rate` and scale the others by `1 / (1 - rate)`.

    Srivastava et al., 2014, in the inverted form. Without a key, or at rate 0, `x` is returned unchanged. The scale is
    not rounded to the type of `x`, only each result: in bfloat16, 1 - 0.1 would be 0.8984.
    """
    if key is None or rate == 0:
        return x
    return drop(x, rate, jax.random.bernoulli(key, 1 - rate, x.shape))


def drop(x: Float[Array, "..."], rate: float, keep: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Zero each element that is not kept, and scale the others by `1 / (1 - rate)`."""
    scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) / (1 - rate)
    return jnp.where(keep, scaled, jnp.zeros_like(scaled)).astype(x.dtype)


def check_key(key: Any, name: str = "key") -> None:
    """Check a random key: one of `jax.random.key`, or the array of `jax.random.PRNGKey`.

    Raises:
        ValueError: it is neither, or there are several keys.
    """
    is_key = (has_type(key, jax.dtypes.prng_key) and key.ndim == 0) or (has_type(key, jnp.uint32) and key.ndim == 1)
    require(is_key, name, "be one random key", kind(key), "Pass jax.random.key(seed).")


def split_key(key: PRNGKeyArray | None, num: int) -> list[PRNGKeyArray | None]:
    """Split a key into `num` keys. Without a key, return `num` times None: no dropout."""
    return [None] * num if key is None else list(jax.random.split(key, num))
