"""Checks of token ids.

Shapes: B batch, W tokens of a window.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Integer

from nnx_gpt2._errors import is_whole, kind, require, shown, value_error


def check_ids(ids: Any, vocab_size: int, name: str = "token ids") -> None:
    """Check the type and shape of token ids, and their range unless jit traces them or other processes hold them.

    Raises:
        ValueError: the ids are not integers of shape [batch, positions], there are none, or they lie outside the
            vocabulary.
    """
    check_batch(ids, name)
    check_range(ids, vocab_size, name)


def check_batch(ids: Any, name: str) -> None:
    """Check the type and shape of a batch of integers.

    Raises:
        ValueError: the batch is no array of integers of shape [batch, positions], or it is empty.
    """
    if not has_type(ids, jnp.integer) or ids.ndim != 2:  # `kind` takes longer than the check
        raise value_error(name, "be integers of shape [batch, positions]", kind(ids))
    if ids.size == 0:
        raise value_error(name, "have at least 1 row and 1 position", kind(ids))


def check_range(indices: Any, size: int, name: str) -> None:
    """Check the type of indices, and their range unless jit traces them or other processes hold them.

    Raises:
        ValueError: the indices are no array of integers, or they lie outside [0, size).
    """
    require(has_type(indices, jnp.integer), name, "be an array of integers", kind(indices))
    if not isinstance(indices, Tracer) and getattr(indices, "is_fully_addressable", True) and indices.size:
        indices = np.asarray(indices)  # in jax even a constant would become part of what is traced
        low, high = int(indices.min()), int(indices.max())
        require(low >= 0 and high < size, name, f"lie in [0, {size})", f"{low} to {high}")


def has_type(x: Any, dtype: Any) -> bool:
    """Return whether a value is an array of numpy or jax, not masked, of a kind of types such as `jnp.integer`."""
    is_array = isinstance(x, (np.ndarray, jax.Array)) and not isinstance(x, np.ma.MaskedArray)
    return is_array and _is_subtype(x.dtype, dtype)


def as_native(ids: Any) -> Any:
    """Return an array in the byte order of this machine, the only one that jax takes."""
    return ids if ids.dtype.isnative else ids.astype(ids.dtype.newbyteorder("="))


def for_device(ids: Any, size: int, name: str) -> Any:
    """Check a batch of numpy, and return it in the byte order of devices. Another batch is returned as it is.

    The range of types above 32 bits is checked here: jax would cut them to 32 bits.

    Raises:
        ValueError: see `check_batch`; or ids of such a type lie outside [0, size).
    """
    if not isinstance(ids, np.ndarray):
        return ids
    check_batch(ids, name)
    if ids.dtype.itemsize > 4:
        check_range(ids, size, name)
    return as_native(ids)


@cache
def _is_subtype(dtype: Any, of: Any) -> bool:
    return jnp.issubdtype(dtype, of)


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
