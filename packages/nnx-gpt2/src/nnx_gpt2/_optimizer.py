"""The optimizer and its learning rate schedule, built from optax."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from nnx_gpt2._errors import INT32_MAX, check_type, is_number, kind, plain, require
from nnx_gpt2._muon import is_matrix, muon
from nnx_gpt2._optimizer_config import OptimizerConfig, checked_length
from nnx_gpt2._params import dotted_name
from nnx_gpt2._token_ids import has_type
from nnx_gpt2._weight_average import weight_average


def learning_rate_schedule(config: OptimizerConfig, max_steps: int) -> Callable[[ArrayLike], jax.Array]:
    """Return the learning rate schedule: linear warmup to the peak, then the schedule of the config.

    The first step is 0, the last one `max_steps - 1`. Step `i` of a warmup of `w` steps has `(i + 1) / (w + 1)` of the
    peak: no step has rate zero. `cosine` decays from the peak at step `w` to `config.final_learning_rate` at the last
    step (Loshchilov and Hutter, 2017, arXiv:1608.03983, without restarts). `wsd` stays at the peak, and over the last
    `decay_steps` the rate falls by equal amounts, to the same rate at the last step (Hu et al., 2024,
    arXiv:2404.06395). `constant` stays at the peak. A run of `cosine` or `constant` may be shorter than its warmup.

    Raises:
        ValueError: `max_steps` is below 1, or warmup and decay of `wsd` are longer than the run. The schedule raises
            ValueError if a step is no number, or above the largest int32.
    """
    check_type("config", config, OptimizerConfig)
    schedule = _schedule(config, checked_length(max_steps))

    def rate(step: ArrayLike) -> jax.Array:
        count: Any = plain(step)
        is_step = has_type(count, jnp.number) or (is_number(count) and -INT32_MAX <= count <= INT32_MAX)
        require(is_step, "step", f"be an array of numbers, or a number of at most {INT32_MAX}", kind(count))
        return schedule(count)

    return rate


@lru_cache(maxsize=32)
def _schedule(config: OptimizerConfig, max_steps: int) -> Callable[[Any], jax.Array]:
    """Return the schedule as one program: its operations, one by one, take 0.4 s to compile.

    The last step of a decay has a rate of its own, because the program rounds in other places than the formulas.
    """
    peak = config.learning_rate
    end = config.final_learning_rate
    warmup = config.warmup_steps
    parts = [optax.linear_schedule(peak / (warmup + 1), peak, warmup)]
    starts = [warmup]
    match config.schedule:
        case "cosine":
            last = max(max_steps - 1, warmup)
            parts += [
                optax.cosine_decay_schedule(peak, max(last - warmup, 1), alpha=end / peak),
                optax.constant_schedule(end),  # also in a run of one step after the warmup
            ]
            starts += [last]
        case "wsd":
            decay = config.wsd_decay_steps(max_steps)
            first = peak * (1 - 1 / decay) + end / decay
            parts += [
                optax.constant_schedule(peak),
                optax.linear_schedule(first, end, decay - 1),
                optax.constant_schedule(end),
            ]
            starts += [max_steps - decay, max_steps - 1]
        case "constant":
            parts += [optax.constant_schedule(peak)]
        case _:
            assert_never(config.schedule)
    joined = optax.join_schedules(parts, starts)
    return jax.jit(lambda count: jnp.asarray(joined(count)), inline=True)


def _is_weight(path: tuple[Any, ...]) -> bool:
    return dotted_name(path).endswith(("kernel", "embedding"))


def weight_mask(params: Any) -> Any:
    """Return a tree with True for each parameter that decays: kernels and embeddings, not biases and norms."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_weight(path), params)


def _update_rule(params: Any) -> Any:
    """Return the update rule of each parameter: Muon for the matrices of the blocks, AdamW for the rest."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if is_matrix(path) else "adamw", params)


def create_optimizer(config: OptimizerConfig, max_steps: int) -> optax.GradientTransformation:
    """Create the optimizer: clipping by the global norm, then AdamW or Muon, then the average of the parameters.

    Muon (Jordan et al., 2024, in optax.contrib) updates the matrices of the blocks, with queries, keys and values as
    separate matrices. AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) updates the embeddings, of which `wte` is
    the head too, biases and norms.

    To add an optimizer, add its name to `OptimizerName` and a case here, and its own settings to `OptimizerConfig`. The
    command line then offers them. Leaves of its state must have the names and shapes of the parameters, or be scalars:
    `param_spec` shards the state by these names. The tests list the names.

    Args:
        config: the update rule and its rates.
        max_steps: length of the run in steps, over which the learning rate decays.

    Raises:
        ValueError: `max_steps` is below 1, or shorter than warmup and decay of `wsd`.
    """
    check_type("config", config, OptimizerConfig)
    return _create_optimizer(config, checked_length(max_steps))


@lru_cache(maxsize=32)
def _create_optimizer(config: OptimizerConfig, max_steps: int) -> optax.GradientTransformation:
    """Return the same functions for the same arguments, so that jit recognizes them."""
    schedule = learning_rate_schedule(config, max_steps)
    adamw = optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=weight_mask)
    match config.name:
        case "adamw":
            rule = adamw
        case "muon":
            of_matrices = learning_rate_schedule(config.of_matrices, max_steps)
            rule = optax.partition({"muon": muon(config, of_matrices), "adamw": adamw}, _update_rule)
        case _:
            assert_never(config.name)
    if config.clip_norm:
        rule = optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
    return optax.chain(rule, weight_average(config.average_decay)) if config.average_decay else rule
