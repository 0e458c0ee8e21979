"""Parameter trees: nested dictionaries of arrays under GPT-2's names."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_gpt2._errors import kind, require

Params = PyTree[Array]
GivenParams = PyTree[Array | np.ndarray]  # not yet on the devices of a state


def dotted_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf: the keys, attributes and indices of its path, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def stack_layers(params: Params) -> Params:
    """Convert parameters of `scan_layers=False` to those of `scan_layers=True`.

    Raises:
        ValueError: the layers are stacked already, or these are not the parameters of a model.
    """
    check_layers(params, is_stacked=False)
    blocks = params["h"]
    return {**params, "h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *[blocks[i] for i in range(len(blocks))])}


def unstack_layers(params: Params) -> Params:
    """Convert parameters of `scan_layers=True` to those of `scan_layers=False`.

    Raises:
        ValueError: the layers are not stacked, or these are not the parameters of a model.
    """
    check_layers(params, is_stacked=True)
    num_layers = len(params["h"]["ln_1"]["scale"])
    return {**params, "h": {i: jax.tree.map(lambda x, i=i: x[i], params["h"]) for i in range(num_layers)}}


def check_layers(params: GivenParams, is_stacked: bool, num_layers: int | None = None) -> None:
    """Check the layout of the layers, and their number if it is given.

    Raises:
        ValueError: the layers have the other layout or another number, or there are none.
    """
    blocks = params.get("h") if isinstance(params, Mapping) else None
    have_layers = isinstance(blocks, Mapping) and ("ln_1" in blocks or {*range(len(blocks) or 1)} == {*blocks})
    source = "Pass those of split_params, or state.params of a TrainState."
    require(have_layers, "params", "be a dictionary with the layers of a GPT-2 in h", kind(params), source)
    assert isinstance(blocks, Mapping)
    names = ["separate", "stacked"]
    wanted, other = names[is_stacked], names[not is_stacked]
    remedy = "Call stack_layers." if is_stacked else "Call unstack_layers."
    require(is_stacked == ("ln_1" in blocks), "layers", f"be {wanted}", f"{other} layers", remedy)
    found = len(blocks["ln_1"]["scale"]) if is_stacked else len(blocks)
    require(num_layers in (None, found), "params", f"have {num_layers} layers, as the config", found)
