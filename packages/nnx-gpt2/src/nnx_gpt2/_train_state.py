"""The training state, and its creation on the devices that hold it.

The parameters are nested dictionaries of arrays, which jit flattens several times faster than module objects.
`merge` makes the module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import PRNGKeyArray

from nnx_gpt2._dropout import check_key
from nnx_gpt2._errors import check_type, kind, require
from nnx_gpt2._model import block_params, check_params, outer_params
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._params import GivenParams, Params, check_layers, dotted_name
from nnx_gpt2._sharding import FSDP_AXIS, TENSOR_AXIS, check_axis_names, tree_shardings
from nnx_gpt2._target import default_device
from nnx_gpt2._token_ids import has_type


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state that training passes from one step to the next."""

    step: Any
    """Number of batches so far, int32."""

    num_skipped: Any
    """Number of batches without an update, because the loss or the gradient was not finite, int32."""

    num_skipped_in_a_row: Any
    """Number of consecutive batches without an update, up to the latest batch, int32."""

    params: Any
    """Parameters: nested dictionaries from GPT-2's names to arrays."""

    opt_state: Any
    """State of the optimizer."""


def create_train_state(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    mesh: Mesh | None = None,
    *,
    params: GivenParams | None = None,
) -> TrainState:
    """Create a state before its first step on its devices. No device holds more than its own shards.

    To continue from trained parameters, such as those of `GPT2.from_pretrained` or of another run, pass `params`. The
    state has copies of them in `config.param_dtype`, and a new state of the optimizer. If they have more positions than
    `config.seq_len`, the state has the first ones: the context becomes shorter, as by nanoGPT's `crop_block_size`.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        key: random key of the initial parameters, the same on each process. It is not used if `params` are given.
        mesh: the devices. None is the default device.
        params: initial parameters, from `split_params` or `TrainState.params`: arrays of numpy, or of jax on any
            devices. Each process passes the same values. An array that lies on devices of several processes must lie
            on those of `mesh`. The parameters pass through the memory of the host one array at a time.

    Raises:
        ValueError: an argument has another type, the parameters are bfloat16 (see `GPT2Config.check_trainable`), the
            mesh does not divide the model, or `params` have another layout, names or shapes than those of `config`.
    """
    _check(config, optimizer, mesh)
    check_key(key)
    if params is not None:
        return _create_from(config, optimizer, mesh, params)
    return _creation(config, optimizer, mesh)(key)


def abstract_train_state(
    config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Return the shapes, types and shardings of a state, without arrays, to restore a checkpoint.

    Raises:
        ValueError: see `create_train_state`.
    """
    _check(config, optimizer, mesh)
    shapes = _shapes(config, optimizer)
    if mesh is None:
        device = SingleDeviceSharding(default_device())
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = tree_shardings(shapes, mesh)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def _check(config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> None:
    check_type("config", config, GPT2Config)
    check_type("optimizer", optimizer, optax.GradientTransformation, "Make it by create_optimizer.")
    config.check_trainable()
    if mesh is not None:
        check_axis_names(mesh)
        config.check_axes(fsdp=mesh.shape[FSDP_AXIS], tensor=mesh.shape[TENSOR_AXIS])


@lru_cache(maxsize=32)
def _shapes(config: GPT2Config, optimizer: optax.GradientTransformation) -> TrainState:
    """Trace the creation of a state once: a step, a new state and a restored one need its shapes."""
    outer, block = partial(outer_params, config), jax.jit(partial(block_params, config))
    create = lambda key: _before_first_step(optimizer, _initial_params(outer, block, key))  # noqa: E731
    return jax.eval_shape(create, jax.random.key(0))


@lru_cache(maxsize=32)
def _creation(
    config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> Callable[[PRNGKeyArray], TrainState]:
    """Return the creation of a state. The next run with these arguments compiles nothing.

    One program makes any block. A program that makes them all takes longer to compile with each layer.
    """
    outer, block = partial(outer_params, config), partial(block_params, config)
    if mesh is None:
        outer, block = jax.jit(outer), jax.jit(block)
    else:
        places = tree_shardings(_shapes(config, optimizer), mesh)
        blocks = places.params["h"]
        outer_places = {name: place for name, place in places.params.items() if name != "h"}
        outer = jax.jit(outer, out_shardings=(outer_places, places.step))
        block = jax.jit(block, out_shardings=blocks if config.scan_layers else blocks[0])
    begin = _beginning(config, optimizer, mesh)
    return lambda key: begin(_initial_params(outer, block, key))


@lru_cache(maxsize=32)
def _beginning(
    config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> Callable[[Params], TrainState]:
    """Return the program that makes a state of its parameters, which it donates."""
    begin = partial(_before_first_step, optimizer)
    if mesh is None:
        return jax.jit(begin, donate_argnums=0)
    return jax.jit(begin, out_shardings=tree_shardings(_shapes(config, optimizer), mesh), donate_argnums=0)


def _initial_params(outer: Callable[..., Any], block: Callable[..., Any], key: Any) -> Params:
    """Return the initial parameters from the functions of the modules outside the blocks and of a block."""
    params, keys = outer(key)
    return {**params, "h": dict(enumerate(map(block, keys))) if isinstance(keys, list) else block(keys)}


def _create_from(
    config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None, params: GivenParams
) -> TrainState:
    check_layers(params, config.scan_layers, config.num_layers)
    leaves = {dotted_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name, leaf in leaves.items():
        is_float = has_type(leaf, jnp.floating)
        require(is_float, f"params.{name}", "be an array of floating-point numbers", kind(leaf))
    check_params(config, params, has_more_positions=True)
    shapes = abstract_train_state(config, optimizer, mesh)
    placed = jax.tree_util.tree_map_with_path(lambda path, like: _place(leaves[dotted_name(path)], like), shapes.params)
    return _beginning(config, optimizer, mesh)(placed)


def _place(leaf: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a copy of a parameter, or of its first rows, with the type and sharding of another one.

    A copy, because a step may donate the state.
    """
    num_rows = like.shape[0]
    if not getattr(leaf, "is_fully_addressable", True):
        return jax.jit(lambda x: jnp.array(x[:num_rows], like.dtype), out_shardings=like.sharding)(leaf)
    rows = np.asarray(leaf)[:num_rows]
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.array(rows[index], like.dtype))


def _before_first_step(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero, num_skipped=zero, num_skipped_in_a_row=zero, params=params, opt_state=optimizer.init(params)
    )
