"""The training state, the one train step, and the one eval step.

The state is plain nested dictionaries of arrays under GPT-2's names, which jit flattens several times
faster than module objects; `merge` gives the module back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array, Float, Integer, PRNGKeyArray, PyTree

from nnx_gpt2._config import GPT2Config
from nnx_gpt2._loss import window_losses
from nnx_gpt2._model import GPT2
from nnx_gpt2._sharding import replicated

Params = PyTree[Array]
Windows = Integer[Array | np.ndarray, "B W"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that training carries from one step to the next."""

    step: Any
    """Number of updates made so far, int32."""

    params: Any
    """Parameters: nested dictionaries, from GPT-2's names to arrays."""

    opt_state: Any
    """The optimizer's state."""


def _graphdef(config: GPT2Config) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))


def merge(config: GPT2Config, params: Params) -> GPT2:
    """The model with the parameters of a `TrainState`. Copies nothing."""
    return nnx.merge(_graphdef(config), params)


def create_train_state(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    mesh: Mesh | None = None,
) -> TrainState:
    """A freshly initialised state, made on the devices where it will live.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        key: decides the initial parameters; the same on every process.
        mesh: the devices; without one, the default device.
    """
    create = partial(_create, config, optimizer)
    if mesh is None:
        return jax.jit(create)(key)
    return jax.jit(create, out_shardings=replicated(mesh))(key)


def abstract_train_state(
    config: GPT2Config, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """The shapes, types and shardings of a state without its arrays: what a checkpoint is restored into."""
    sharding = SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else replicated(mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(partial(_create, config, optimizer), jax.random.key(0)),
    )


def _create(config: GPT2Config, optimizer: optax.GradientTransformation, key: PRNGKeyArray) -> TrainState:
    params = nnx.to_pure_dict(nnx.state(GPT2(config, rngs=nnx.Rngs(key))))
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def make_train_step(
    config: GPT2Config,
    optimizer: optax.GradientTransformation,
    *,
    grad_accum_steps: int = 1,
) -> Callable[[TrainState, Windows, PRNGKeyArray], tuple[TrainState, dict[str, jax.Array]]]:
    """Compile one update: `step(state, windows, key) -> (state, metrics)`.

    The state that goes in is donated: its buffers become those of the state that comes out. The step's
    randomness is `fold_in(key, state.step)`, so the same `key` serves the whole run and a resumed run
    draws what the unbroken one would have. Metrics: `loss` (nats per token) and `grad_norm` (before
    clipping), float32 scalars left on the device.

    Args:
        config: the model's shape.
        optimizer: see `create_optimizer`.
        grad_accum_steps: number of equal parts that a batch is processed in, one after the other, to
            save memory; the batch size must be a multiple of it.
    """
    graphdef = _graphdef(config)

    def loss_fn(params: Params, windows: Integer[Array, "b W"], key: PRNGKeyArray) -> Float[Array, ""]:
        dropout_key = key if config.dropout_rate > 0 else None
        return window_losses(nnx.merge(graphdef, params), windows, dropout_key=dropout_key).mean()

    def accumulated(params: Params, windows: Integer[Array, "B W"], key: PRNGKeyArray) -> tuple[jax.Array, Params]:
        if grad_accum_steps == 1:
            return jax.value_and_grad(loss_fn)(params, windows, key)
        # Part i takes every k-th row: each device then keeps its own rows, and nothing moves.
        parts = windows.reshape(-1, grad_accum_steps, windows.shape[1]).swapaxes(0, 1)

        def add(total: Params, part: tuple[jax.Array, PRNGKeyArray]) -> tuple[Params, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *part)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zeros, (parts, jax.random.split(key, grad_accum_steps)))
        return jax.tree.map(lambda x: x / grad_accum_steps, total)

    def train_step(
        state: TrainState, windows: Integer[Array, "B W"], key: PRNGKeyArray
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = accumulated(state.params, windows, jax.random.fold_in(key, state.step))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(config: GPT2Config, mesh: Mesh | None = None) -> Callable[[Params, Windows], Float[Array, " B"]]:
    """Compile `step(params, windows) -> losses`: each window's mean loss, without dropout.

    With a mesh, every process gets the losses of the whole global batch.
    """
    graphdef = _graphdef(config)

    def eval_step(params: Params, windows: Integer[Array, "B W"]) -> Float[Array, " B"]:
        return window_losses(nnx.merge(graphdef, params), windows)

    return jax.jit(eval_step) if mesh is None else jax.jit(eval_step, out_shardings=replicated(mesh))
