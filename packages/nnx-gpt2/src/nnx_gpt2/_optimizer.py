"""The optimizer, built from optax's parts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from nnx_gpt2._config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, max_steps: int) -> Callable[[ArrayLike], jax.Array]:
    """Linear warmup to the peak, then a cosine down to the minimum at `max_steps`.

    Step `i` of a warmup of `w` steps has `(i + 1) / (w + 1)` of the peak, so that no step is wasted
    at zero. The cosine is that of Loshchilov and Hutter, 2017 (arXiv:1608.03983), without restarts.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(max_steps, config.warmup_steps + 1),
        end_value=config.min_learning_rate,
    )
    return lambda step: jnp.asarray(schedule(step))


def is_matrix(params: Any) -> Any:
    """True for each parameter that weight decay applies to: those of two dimensions or more."""
    return jax.tree.map(lambda param: param.ndim >= 2, params)


def create_optimizer(config: OptimizerConfig, max_steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) behind a clip by global norm.

    Args:
        config: the rates.
        max_steps: length of the run in steps, over which the learning rate decays.

    Raises:
        ValueError: `max_steps` is below 1.
    """
    if max_steps < 1:
        raise ValueError(f"expected at least 1 step of training, got {max_steps}")
    adamw = optax.adamw(
        learning_rate_schedule(config, max_steps),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=is_matrix,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw
