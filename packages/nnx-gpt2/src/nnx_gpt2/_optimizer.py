"""The optimizer and its learning rate schedule, built from optax."""

from collections.abc import Callable
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers, muon

from nnx_gpt2._errors import require
from nnx_gpt2._optimizer_config import OptimizerConfig
from nnx_gpt2._params import dotted_name

# Muon's updates are scaled to this root mean square, which is about that of AdamW's updates. One learning rate then
# fits both: Liu et al., 2025, arXiv:2502.16982, section 2.2.
_MUON_RMS = 0.2


def learning_rate_schedule(config: OptimizerConfig, max_steps: int) -> Callable[[ArrayLike], jax.Array]:
    """Return the learning rate schedule: linear warmup to the peak, then the schedule of the config.

    Step `i` of a warmup of `w` steps has `(i + 1) / (w + 1)` of the peak: no step has rate zero. `cosine` decays to
    the minimum at `max_steps` (Loshchilov and Hutter, 2017, arXiv:1608.03983, without restarts). `wsd` stays at the
    peak and decays linearly over the last `decay_steps` (Hu et al., 2024, arXiv:2404.06395). `constant` stays at the
    peak. A run may be shorter than its warmup.

    Raises:
        ValueError: warmup and decay of `wsd` are longer than the run.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    first = peak / (warmup + 1)
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=first,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=max(max_steps, warmup + 1),
            end_value=config.min_learning_rate,
        )
        return lambda step: jnp.asarray(schedule(step))
    parts = [optax.linear_schedule(first, peak, warmup), optax.constant_schedule(peak)]
    starts = [warmup]
    if config.schedule == "wsd":
        decay = max_steps // 5 if config.decay_steps is None else config.decay_steps
        require(
            warmup + decay <= max_steps,
            "optimizer.warmup_steps and optimizer.decay_steps",
            f"fit into the {max_steps} steps of the run",
            f"{warmup} and {decay}",
        )
        parts.append(optax.linear_schedule(peak, config.min_learning_rate, max(decay, 1)))
        starts.append(max_steps - decay)
    schedule = optax.join_schedules(parts, starts)
    return lambda step: jnp.asarray(schedule(step))


def _is_weight(path: tuple[Any, ...]) -> bool:
    return dotted_name(path).endswith(("kernel", "embedding"))


def weight_mask(params: Any) -> Any:
    """Return a tree with True for each parameter that decays: kernels and embeddings, not biases and norms."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_weight(path), params)


def _update_rule(params: Any) -> Any:
    """Return the update rule of each parameter: Muon for the matrices of the blocks, AdamW for the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if dotted_name(path).endswith("kernel") else "adamw", params
    )


def _matrix_axes(params: Any) -> Any:
    """Return the input and output axis of each kernel. Other axes (q, k, v; stacked layers) index matrices."""

    def axes(path: tuple[Any, ...], kernel: jax.Array) -> MuonDimensionNumbers:
        num_dims = 3 if dotted_name(path).endswith("c_attn.kernel") else 2
        return MuonDimensionNumbers(reduction_axis=kernel.ndim - num_dims, output_axis=kernel.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def create_optimizer(config: OptimizerConfig, max_steps: int) -> optax.GradientTransformation:
    """Create the optimizer: clipping by the global norm, then AdamW or Muon.

    Muon (Jordan et al., 2024, in optax.contrib) updates the matrices of the blocks, with queries, keys and values as
    separate matrices. AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) updates embeddings, biases and norms.

    To add an optimizer, add its name to `OptimizerName` and a case here, and its own settings to `OptimizerConfig`. The
    command line then offers them. Leaves of its state must have the names and shapes of the parameters, or be scalars:
    `param_spec` shards the state by these names. The tests list the names.

    Args:
        config: the update rule and its rates.
        max_steps: length of the run in steps, over which the learning rate decays.

    Raises:
        ValueError: `max_steps` is below 1, or shorter than warmup and decay.
    """
    require(max_steps >= 1, "max_steps", "be at least 1", max_steps)
    schedule = learning_rate_schedule(config, max_steps)
    adamw = optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=weight_mask)
    match config.name:
        case "adamw":
            rule = adamw
        case "muon":
            matrices = muon(
                schedule,
                weight_decay=config.weight_decay,
                consistent_rms=_MUON_RMS,
                muon_weight_dimension_numbers=_matrix_axes,
            )
            rule = optax.partition({"muon": matrices, "adamw": adamw}, _update_rule)
        case _:
            assert_never(config.name)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule) if config.clip_norm else rule
