"""Checks of token ids.

Shapes: B batch, W tokens of a window.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Integer

from nnx_gpt2._errors import require


def check_ids(ids: Any, vocab_size: int, name: str = "token ids") -> None:
    """Check the type and shape of token ids, and their range unless jit traces them.

    Raises:
        ValueError: the ids are not integers of shape [batch, positions], or lie outside the vocabulary.
    """
    is_batch = ids.ndim == 2 and jnp.issubdtype(ids.dtype, jnp.integer)
    require(is_batch, name, "be integers of shape [batch, positions]", f"{ids.dtype}{list(ids.shape)}")
    if not isinstance(ids, Tracer) and ids.size:
        ids = np.asarray(ids)  # in jax even a constant would become part of what is traced
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0 and high < vocab_size, name, f"lie in [0, {vocab_size})", f"{low} to {high}")


def have_known_ids(windows: Integer[Array, "B W"], vocab_size: int) -> Bool[Array, "B 1"]:
    """Return whether each window has all its ids in the vocabulary. A device cannot raise an error."""
    ids = windows.astype(jnp.int32)
    return ((ids >= 0) & (ids < vocab_size)).all(axis=1, keepdims=True)
