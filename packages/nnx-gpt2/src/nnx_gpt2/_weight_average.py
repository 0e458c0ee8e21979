"""A moving average of the parameters, kept in the state of the optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from nnx_gpt2._errors import kind, require
from nnx_gpt2._params import Params


class WeightAverageState(NamedTuple):
    """The average after some updates. Its leaves have the names of the parameters, by which they are sharded."""

    total_weight: Float[Array, ""]
    """Sum of the weights of all updates so far, `1 + decay + decay**2 + ...`; 0 before the first one."""

    average: Params
    """The average; before the first update, the initial parameters."""


def weight_average(decay: float) -> optax.GradientTransformation:
    """Return the last transformation of an optimizer, which averages the parameters and leaves the updates unchanged.

    After update `t` the average is the sum of `decay**(t - i)` times the parameters after update `i`, divided by the
    sum of these weights. It is the exponential moving average with the bias correction of Kingma and Ba, 2015,
    arXiv:1412.6980, section 3, and does not contain the initial parameters. After the first update it equals the
    parameters.
    """

    def init(params: Params) -> WeightAverageState:
        # Copies, because a step donates both the parameters and the average.
        return WeightAverageState(jnp.zeros((), jnp.float32), jax.tree.map(jnp.copy, params))

    def update(updates: Params, state: Any, params: Any = None) -> tuple[Params, WeightAverageState]:
        total_weight = 1 + decay * state.total_weight
        new = optax.apply_updates(params, updates)
        return updates, WeightAverageState(total_weight, optax.incremental_update(new, state.average, 1 / total_weight))

    return optax.GradientTransformation(init, update)


def averaged_params(opt_state: Any) -> Params:
    """Return the average of the parameters from the state of an optimizer with `average_decay`, without a copy.

    `merge` makes a model of it, and an eval step takes it as it takes the parameters. It has their types and shardings.
    A train step donates it with the rest of the state: do not use it after the next step. Before the first update it is
    the initial parameters.

    Args:
        opt_state: `TrainState.opt_state`.

    Raises:
        ValueError: the state has no average.
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_average) if _is_average(node)]
    remedy = "Set average_decay in the OptimizerConfig of the run."
    require(len(found) == 1, "opt_state", "have an average of the parameters", kind(opt_state), remedy)
    return found[0].average


def _is_average(node: Any) -> bool:
    return isinstance(node, WeightAverageState)
