"""Muon, the update rule of the blocks' matrices, with the orthogonalization of optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from nnx_gpt2._optimizer_config import OptimizerConfig
from nnx_gpt2._params import dotted_name

# The root mean square of updates with `muon_scaling="rms"`, about that of AdamW's updates: Liu et al., 2025,
# arXiv:2502.16982, section 2.2.
_RMS = 0.2
# The momentum of the first update with a warmup, as in https://github.com/KellerJordan/modded-nanogpt since 2024.
_FIRST_MOMENTUM = 0.85


def muon(config: OptimizerConfig, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon with Nesterov momentum (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

    An update is the momentum of a matrix, made nearly orthogonal by five iterations of Newton and Schulz, with a length
    that depends on the shape of the matrix: see `OptimizerConfig.muon_scaling`.

    Args:
        config: momentum, scaling and weight decay.
        learning_rate: the rate of each step.
    """
    decay = config.weight_decay if config.muon_weight_decay is None else config.muon_weight_decay
    return optax.chain(
        _orthogonal_momentum(config.muon_momentum, config.muon_momentum_warmup_steps),
        optax.stateless(lambda updates, _: _scaled(updates, in_rms=config.muon_scaling == "rms")),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Return whether the parameter at this path is a matrix of a block, which Muon updates."""
    return dotted_name(path).endswith("kernel")


def _orthogonal_momentum(momentum: float, warmup_steps: int) -> optax.GradientTransformation:
    """Return the orthogonal momentum. During the warmup, the momentum is another number in each update."""

    def rule(beta: Any) -> optax.GradientTransformation:
        return scale_by_muon(beta=beta, weight_dimension_numbers=_matrix_axes)

    if not warmup_steps:
        return rule(momentum)

    def momentum_at(count: Int[Array, ""]) -> Float[Array, ""]:
        share = jnp.minimum(count / warmup_steps, 1.0)
        return (1 - share) * min(_FIRST_MOMENTUM, momentum) + share * momentum

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return rule(momentum_at(state.count)).update(updates, state, params)

    return optax.GradientTransformation(rule(momentum).init, update)


def _scaled(updates: Any, *, in_rms: bool) -> Any:
    """Return orthogonal updates with the length of `muon_scaling`."""

    def scaled(update: jax.Array, axes: Any) -> jax.Array:
        fan_in, fan_out = update.shape[axes.reduction_axis], update.shape[axes.output_axis]
        if in_rms:
            return jnp.sqrt(jnp.maximum(fan_in, fan_out)) * _RMS * update
        return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * update

    return jax.tree.map(scaled, updates, _matrix_axes(updates))


def _matrix_axes(params: Any) -> Any:
    """Return the input and output axis of each kernel. Other axes (q, k, v; stacked layers) index matrices."""

    def axes(path: tuple[Any, ...], kernel: jax.Array) -> MuonDimensionNumbers:
        num_dims = 3 if dotted_name(path).endswith("c_attn.kernel") else 2
        return MuonDimensionNumbers(reduction_axis=kernel.ndim - num_dims, output_axis=kernel.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)
