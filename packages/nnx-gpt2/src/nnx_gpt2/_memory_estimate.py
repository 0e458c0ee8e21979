"""What a train step needs of a device's memory, as its compiler sees it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from nnx_gpt2._model_config import GPT2Config
from nnx_gpt2._optimizer import create_optimizer
from nnx_gpt2._optimizer_config import OptimizerConfig
from nnx_gpt2._sharding import batch_sharding, replicated
from nnx_gpt2._train_state import abstract_train_state
from nnx_gpt2._train_step import make_train_step


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on each device, from XLA's own analysis of the compiled step."""

    state_bytes: int
    """Parameters and optimizer state, and the batch: what goes in. What comes out takes its place."""

    temporary_bytes: int
    """Activations, gradients, and all else while the step runs."""

    code_bytes: int
    """The program itself; 0 where the backend does not say."""

    @property
    def peak_bytes(self) -> int:
        """All of it together."""
        return self.state_bytes + self.temporary_bytes + self.code_bytes


def estimate_memory(
    config: GPT2Config,
    *,
    global_batch_size: int,
    optimizer: OptimizerConfig | None = None,
    grad_accum_steps: int = 1,
    mesh: Mesh | None = None,
) -> MemoryEstimate:
    """Compile a train step for the current backend, without any arrays, and read off what it takes.

    Args:
        config: the model.
        global_batch_size: windows per step, over all devices.
        optimizer: AdamW if None.
        grad_accum_steps: as of the train step.
        mesh: the devices; without one, a single device.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    rule = create_optimizer(OptimizerConfig() if optimizer is None else optimizer, 1000)
    step = make_train_step(config, rule, mesh, grad_accum_steps=grad_accum_steps)
    one_device = SingleDeviceSharding(jax.local_devices()[0])
    batch = jax.ShapeDtypeStruct(
        (global_batch_size, config.seq_len + 1),
        jnp.uint16,
        sharding=one_device if mesh is None else batch_sharding(mesh),
    )
    key_type = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct((), key_type.dtype, sharding=one_device if mesh is None else replicated(mesh))
    analysis = step.lower(abstract_train_state(config, rule, mesh), batch, key).compile().memory_analysis()
    assert analysis is not None, "XLA analyses every program on CPU, GPU and TPU"
    # What comes out and is not donated counts too; of a state that is donated nothing does.
    kept_bytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return MemoryEstimate(
        state_bytes=analysis.argument_size_in_bytes + kept_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        code_bytes=analysis.generated_code_size_in_bytes,
    )
