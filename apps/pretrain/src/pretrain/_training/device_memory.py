"""Checks that a model and its batch fit a device. They take no time: `nnx_gpt2.estimate_memory` compiles the step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_gpt2 import num_params
from pretrain._config import PretrainConfig
from pretrain._resolve.target_devices import device_memory_bytes
from ray_jax_launch import OutOfMemoryError

# Parameters, their gradient, and at least one moment of the optimizer.
_COPIES_OF_PARAMETERS = 3
# The share of a device's memory that an evaluation may use. On a host, other programs need memory too.
_EVALUATION_SHARE = 0.5


def check_memory(config: PretrainConfig, mesh: jax.sharding.Mesh) -> None:
    """Check that a model and its batch can fit the devices, before anything is allocated.

    The check counts the least memory that a step needs: the copies of the parameters, and the input of each block,
    which the backward pass reads. A step that passes the check may still need more memory than a device has.

    Raises:
        OutOfMemoryError: the model and its batch cannot fit.
    """
    model, train = config.model, config.train
    state_bytes = _COPIES_OF_PARAMETERS * num_params(model) * jnp.dtype(model.param_dtype).itemsize
    tokens = train.global_batch_size // train.grad_accum_steps * model.seq_len
    inputs_bytes = model.num_layers * tokens * model.embed_dim * jnp.dtype(model.stream_dtype).itemsize
    needed_bytes = state_bytes // (config.mesh.fsdp * config.mesh.tensor) + inputs_bytes // mesh.size
    if needed_bytes > (limit_bytes := device_memory_bytes()):
        raise OutOfMemoryError(
            f"the model and its batch must fit the {limit_bytes / 1e9:,.1f} GB of a device, got at least "
            f"{needed_bytes / 1e9:,.1f} GB. Lower --model.vocab-size, --model.num-layers, --model.embed-dim or "
            "--train.global-batch-size, raise --train.grad-accum-steps, or add devices (--mesh.fsdp)."
        )


def compile_what_fits(
    step: jax.stages.Wrapped, params: Any, batch_size: int, seq_len: int, dtype: np.dtype[Any]
) -> tuple[jax.stages.Compiled, int]:
    """Compile an evaluation step for the largest batch, at most `batch_size`, that fits this process's device.

    Args:
        step: a step of `make_eval_step`.
        params: the parameters.
        batch_size: the largest number of windows.
        seq_len: inputs per window.
        dtype: type of the tokens.

    Returns:
        The compiled step, and its number of windows.
    """
    limit_bytes = _EVALUATION_SHARE * device_memory_bytes()
    while True:
        compiled = step.lower(params, jax.ShapeDtypeStruct((batch_size, seq_len + 1), dtype)).compile()
        found: Any = compiled.memory_analysis()
        needed_bytes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        if needed_bytes <= limit_bytes or batch_size == 1:
            return compiled, batch_size
        batch_size = max(1, min(batch_size // 2, int(batch_size * limit_bytes / needed_bytes)))
