"""Trees of parameters: nested dictionaries of arrays under GPT-2's names."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

Params = PyTree[Array]


def dotted_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: its path's keys, attributes and indices joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def stack_layers(params: Params) -> Params:
    """The parameters as `scan_layers=True` has them, from those of `scan_layers=False`.

    Raises:
        ValueError: they are stacked already.
    """
    check_layers(params, is_stacked=False)
    blocks = params["h"]
    return {**params, "h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *[blocks[i] for i in range(len(blocks))])}


def unstack_layers(params: Params) -> Params:
    """The parameters as `scan_layers=False` has them, from those of `scan_layers=True`.

    Raises:
        ValueError: they are not stacked.
    """
    check_layers(params, is_stacked=True)
    num_layers = len(params["h"]["ln_1"]["scale"])
    return {**params, "h": {i: jax.tree.map(lambda x, i=i: x[i], params["h"]) for i in range(num_layers)}}


def check_layers(params: Params, is_stacked: bool, num_layers: int | None = None) -> None:
    blocks = params.get("h", {})
    if is_stacked != ("ln_1" in blocks):
        wanted, remedy = ("stacked", "stack_layers") if is_stacked else ("separate", "unstack_layers")
        raise ValueError(f"expected the parameters of {wanted} layers, got the others: convert them by {remedy}")
    found = len(blocks["ln_1"]["scale"]) if is_stacked else len(blocks)
    if num_layers is not None and found != num_layers:
        raise ValueError(f"expected the parameters of {num_layers} layers, as the config says, got {found}")
