"""Device memory of a train step, from XLA's analysis of the compiled program."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from nnx_gpt2._absent_devices import compiler_options
from nnx_gpt2._errors import INT32_MAX, check_type, is_whole, require, shown
from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._optimizer import create_optimizer
from nnx_gpt2._optimizer_config import OptimizerConfig
from nnx_gpt2._sharding import batch_sharding, make_mesh, replicated
from nnx_gpt2._target import default_device
from nnx_gpt2._train_state import abstract_train_state
from nnx_gpt2._train_step import make_train_step
from nnx_gpt2._tree_step import TreeTrainStep

# The number of steps does not change the memory. Any warmup and decay must fit into it.
_NUM_STEPS = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on each device, from XLA's analysis of the compiled step."""

    state_bytes: int
    """Inputs of the step: parameters, optimizer state, and the batch unless it is in shards."""

    temporary_bytes: int
    """Activations, gradients, other temporary arrays, and outputs that do not reuse the memory of inputs."""

    code_bytes: int
    """The compiled program; 0 if the backend does not report it."""

    @property
    def peak_bytes(self) -> int:
        """The sum of state, temporary arrays and program."""
        return self.state_bytes + self.temporary_bytes + self.code_bytes


def estimate_memory(
    config: GPT2Config,
    *,
    global_batch_size: int,
    optimizer: OptimizerConfig | None = None,
    grad_accum_steps: int = 1,
    mesh: Mesh | None = None,
    num_shards: int | None = None,
    end_of_text: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a train step by compiling it for its devices. Allocates no arrays.

    Args:
        config: the model.
        global_batch_size: windows per step, over all devices.
        optimizer: the optimizer. None is AdamW.
        grad_accum_steps: see `make_train_step`.
        mesh: the devices, which need not be in this machine: see `absent_devices`. None is the default device.
        num_shards: the shards of a `TreeTrainStep`. The estimate is for one shard at a time, and the sums that wait for
            others. None is the step of `make_train_step`.
        end_of_text: see `make_train_step`.

    Raises:
        ValueError: `global_batch_size` is below 1, or no multiple of the devices and microbatches, the mesh does not
            divide the model, its parameters are bfloat16, or `end_of_text` is no id of the model.
    """
    is_size = is_whole(global_batch_size, 1, INT32_MAX)
    require(is_size, "global_batch_size", f"be 1 to {INT32_MAX}", shown(global_batch_size))
    optimizer = OptimizerConfig() if optimizer is None else optimizer
    check_type("optimizer", optimizer, OptimizerConfig)
    rule = create_optimizer(optimizer, _NUM_STEPS)
    options: dict[str, Any] = {"grad_accum_steps": grad_accum_steps, "end_of_text": end_of_text}
    if num_shards is None:
        step: Any = make_train_step(config, rule, mesh, **options)
    else:
        devices = make_mesh(devices=[default_device()]) if mesh is None else mesh
        step = TreeTrainStep(config, rule, devices, num_shards=num_shards, **options)
    device = default_device() if mesh is None else mesh.devices.flat[0]
    one_device = SingleDeviceSharding(device)
    batch = jax.ShapeDtypeStruct(
        (global_batch_size, config.seq_len + 1),
        jnp.uint16,
        sharding=one_device if mesh is None else batch_sharding(mesh),
    )
    key_type = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct((), key_type.dtype, sharding=one_device if mesh is None else replicated(mesh))
    state = abstract_train_state(config, rule, mesh)
    analysis = step.lower(state, batch, key).compile(compiler_options=compiler_options(device)).memory_analysis()
    assert analysis is not None, "XLA analyses every program on CPU, GPU and TPU"
    if num_shards is not None:
        # Of the gradients, one is computed, and one per level of the tree waits. The new state follows them.
        num_levels = (num_shards // (1 if mesh is None else mesh.size)).bit_length()
        state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
        gradients_bytes = num_levels * analysis.output_size_in_bytes
        return MemoryEstimate(
            state_bytes=state_bytes,
            temporary_bytes=gradients_bytes + max(analysis.temp_size_in_bytes, state_bytes),
            code_bytes=analysis.generated_code_size_in_bytes,
        )
    # Without donation, the old and the new state exist at the same time.
    new_bytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return MemoryEstimate(
        state_bytes=analysis.argument_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes + new_bytes,
        code_bytes=analysis.generated_code_size_in_bytes,
    )
