"""The train step with the flags of TPU workers, by the compiler of TPUs, as `plan` compiles it."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.accelerators,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, for Linux"),
]

# The gradients of a layer are 50 MB. The compiler reads its flags when it starts.
COMPILED = """
import sys
import jax
import jax.numpy as jnp
from nnx_gpt2 import GPT2Config, OptimizerConfig, abstract_train_state, batch_sharding, create_optimizer, make_mesh
from nnx_gpt2 import make_train_step
from pretrain._resolve.target_devices import find_target
from ray_jax_launch import parse_hardware

mesh = make_mesh(devices=find_target(parse_hardware(sys.argv[1]), only_here=False).devices)
config = GPT2Config(vocab_size=512, seq_len=128, num_layers=2, num_heads=8, embed_dim=1024, dtype="bfloat16")
optimizer = create_optimizer(OptimizerConfig(), 100)
state, key = abstract_train_state(config, optimizer, mesh), jax.eval_shape(lambda: jax.random.key(0))
windows = jax.ShapeDtypeStruct((32, config.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
program = make_train_step(config, optimizer, mesh).lower(state, windows, key).compile()
print("fusions", program.as_text().count("async_collective_fusion"))
"""


@pytest.mark.parametrize("hardware", ["tpu:v6e:4x4", "tpu:v5p:2x2x4"])
@pytest.mark.parametrize(("own", "is_joined"), [("", True), ("--xla_enable_async_all_reduce=false", False)])
def test_gradients_are_summed_beside_the_backward_pass_unless_the_user_says_otherwise(hardware, own, is_joined):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": own}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, hardware], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout.split()[-1]) > 0) == is_joined
