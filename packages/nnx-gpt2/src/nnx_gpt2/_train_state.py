"""The training state, and its creation on the devices that hold it.

The parameters are nested dictionaries of arrays, which jit flattens several times faster than module objects.
`merge` makes the module.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import PRNGKeyArray

from nnx_gpt2._dropout import check_key
from nnx_gpt2._errors import check_type
from nnx_gpt2._model import GPT2, split_params
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._sharding import FSDP_AXIS, TENSOR_AXIS, check_axis_names, tree_shardings
from nnx_gpt2._target import default_device


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
) -> TrainState:
    """Create an initial state on its devices. No device holds more than its own shards.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        key: random key of the initial parameters, the same on each process.
        mesh: the devices. None is the default device.

    Raises:
        ValueError: an argument has another type, the parameters are bfloat16 (see `GPT2Config.check_trainable`), or the
            mesh does not divide the model.
    """
    _check(config, optimizer, mesh)
    check_key(key)
    create = partial(_create, config, optimizer)
    if mesh is None:
        return jax.jit(create)(key)
    return jax.jit(create, out_shardings=tree_shardings(jax.eval_shape(create, key), mesh))(key)


def abstract_train_state(
    config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Return the shapes, types and shardings of a state, without arrays, to restore a checkpoint.

    Raises:
        ValueError: see `create_train_state`.
    """
    _check(config, optimizer, mesh)
    shapes = jax.eval_shape(partial(_create, config, optimizer), jax.random.key(0))
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


def _create(config: GPT2Config, optimizer: optax.GradientTransformation, key: PRNGKeyArray) -> TrainState:
    params = split_params(GPT2(config, rngs=nnx.Rngs(key)))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero, num_skipped=zero, num_skipped_in_a_row=zero, params=params, opt_state=optimizer.init(params)
    )
