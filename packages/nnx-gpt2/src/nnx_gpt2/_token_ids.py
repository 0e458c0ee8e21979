"""Checks of token ids.

Shapes: B batch, W tokens of a window.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Integer

from nnx_gpt2._errors import is_whole, require, shown


def check_ids(ids: Any, vocab_size: int, name: str = "token ids") -> None:
    """Check the type and shape of token ids, and their range unless jit traces them or other processes hold them.

    Raises:
        ValueError: the ids are not integers of shape [batch, positions], there are none, or they lie outside the
            vocabulary.
    """
    is_batch = ids.ndim == 2 and jnp.issubdtype(ids.dtype, jnp.integer)
    require(is_batch, name, "be integers of shape [batch, positions]", f"{ids.dtype}{list(ids.shape)}")
    require(ids.size > 0, name, "have at least 1 row and 1 position", f"{ids.dtype}{list(ids.shape)}")
    if not isinstance(ids, Tracer) and getattr(ids, "is_fully_addressable", True):
        ids = np.asarray(ids)  # in jax even a constant would become part of what is traced
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0 and high < vocab_size, name, f"lie in [0, {vocab_size})", f"{low} to {high}")


def check_windows(windows: Any, vocab_size: int) -> None:
    """Check windows of tokens as `check_ids` does. A window has a prediction at least.

    Raises:
        ValueError: see `check_ids`; or a window has a single token.
    """
    check_ids(windows, vocab_size, "windows")
    require(windows.shape[1] >= 2, "windows", "have at least 2 tokens, an input and a target", windows.shape[1])


def check_end_of_text(end_of_text: Any, vocab_size: int) -> None:
    """Check the token that ends documents.

    Raises:
        ValueError: it is neither None nor an id of the vocabulary.
    """
    holds = end_of_text is None or is_whole(end_of_text, 0, vocab_size - 1)
    require(holds, "end_of_text", f"be None or an id in [0, {vocab_size})", shown(end_of_text))


def have_known_ids(windows: Integer[Array, "B W"], vocab_size: int) -> Bool[Array, "B 1"]:
    """Return whether each window has all its ids in the vocabulary. A device cannot raise an error."""
    ids = windows.astype(jnp.int32)
    return ((ids >= 0) & (ids < vocab_size)).all(axis=1, keepdims=True)
