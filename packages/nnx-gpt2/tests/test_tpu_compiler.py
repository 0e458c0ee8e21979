"""Programs for TPUs, compiled for a slice of four hosts by the TPU's own compiler, which needs no TPU.

`nox -s "accelerators(tpu)"` installs the compiler.
"""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies

from nnx_gpt2 import (
    GPT2,
    GPT2Config,
    OptimizerConfig,
    TrainState,
    abstract_train_state,
    batch_sharding,
    create_optimizer,
    estimate_memory,
    make_eval_step,
    make_mesh,
    make_train_step,
    merge,
)
from nnx_gpt2._generate import _continue, _Draw

pytest.importorskip("libtpu", reason="the TPU's compiler is not installed: the extra tpu, on Linux")
pytestmark = [
    pytest.mark.accelerators,
    # jax writes programs for absent devices into its cache, and cannot read them: it compiles them again.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]

CONFIG = GPT2Config(vocab_size=512, seq_len=256, num_layers=1, num_heads=2, embed_dim=128, dtype="bfloat16")
OPTIMIZER = create_optimizer(OptimizerConfig(), 100)
LAYOUTS = {"data=16": {}, "fsdp=16": {"fsdp": 16}, "data=4,fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2}}


@pytest.fixture(scope="module")
def devices():
    """The 16 devices of a slice `v6e:4x4`, of four hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # this host has no metadata server
        return topologies.get_topology_desc(platform="tpu", topology_name="v6e:4x4").devices


@pytest.fixture
def on_a_tpu_host(devices, monkeypatch):
    """Make the TPU the default device of the code that jit traces, as on a host with several of them."""
    monkeypatch.setattr("nnx_gpt2._target.default_device", lambda: devices[0])


def train_step(config: GPT2Config, mesh: jax.sharding.Mesh) -> tuple[Any, TrainState]:
    """Compile a train step with a window per device, and return it and its state."""
    state, key = abstract_train_state(config, OPTIMIZER, mesh), jax.eval_shape(lambda: jax.random.key(0))
    windows = jax.ShapeDtypeStruct((16, config.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
    return make_train_step(config, OPTIMIZER, mesh).lower(state, windows, key).compile(), state


def has_kernel(program):
    return "splash" in program.as_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_train_step_has_the_kernel_and_writes_over_its_state(layout, devices):
    program, state = train_step(CONFIG, make_mesh(devices=devices, **LAYOUTS[layout]))
    assert has_kernel(program)
    assert re.findall(r"infeed|outfeed|send\(|recv\(", program.as_text()) == []
    shards = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)]
    assert program.memory_analysis().alias_size_in_bytes >= sum(shards)


def test_the_estimate_of_the_memory_is_that_of_the_tpu(devices):
    mesh = make_mesh(fsdp=16, devices=devices)
    program, _ = train_step(CONFIG, mesh)
    estimate = estimate_memory(CONFIG, global_batch_size=16, mesh=mesh)
    analysis = program.memory_analysis()
    assert estimate.state_bytes == analysis.argument_size_in_bytes
    assert estimate.code_bytes == analysis.generated_code_size_in_bytes > 0


@pytest.mark.parametrize(
    ("changes", "is_fast"),
    [
        ({"seq_len": 255}, False),
        ({"seq_len": 64}, False),
        ({"embed_dim": 50}, True),  # heads of width 25
        ({"embed_dim": 160}, True),
        ({"scan_layers": True, "remat": "full"}, True),
        ({"dropout_rate": 0.1}, False),
    ],
    ids=["length 255", "length 64", "width 25", "width 80", "scan and remat", "dropout"],
)
def test_every_shape_compiles(changes, is_fast, devices):
    program, _ = train_step(dataclasses.replace(CONFIG, **changes), make_mesh(devices=devices))
    assert has_kernel(program) == is_fast


def test_documents_keep_the_kernel(devices):
    mesh = make_mesh(devices=devices)
    state, key = abstract_train_state(CONFIG, OPTIMIZER, mesh), jax.eval_shape(lambda: jax.random.key(0))
    windows = jax.ShapeDtypeStruct((32, CONFIG.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
    step = make_train_step(CONFIG, OPTIMIZER, mesh, end_of_text=256, grad_accum_steps=2)
    assert has_kernel(step.lower(state, windows, key).compile())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eval_step_has_the_kernel(layout, devices):
    mesh = make_mesh(devices=devices, **LAYOUTS[layout])
    params = abstract_train_state(CONFIG, OPTIMIZER, mesh).params
    windows = jax.ShapeDtypeStruct((16, CONFIG.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
    assert has_kernel(make_eval_step(CONFIG, mesh).lower(params, windows).compile())


@pytest.mark.usefixtures("on_a_tpu_host")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_on_several_devices_computes_logits_and_samples(layout, devices):
    """XLA splits these programs, and cannot split the kernel."""
    params = abstract_train_state(CONFIG, OPTIMIZER, make_mesh(devices=devices, **LAYOUTS[layout])).params
    tokens = jax.ShapeDtypeStruct((4, CONFIG.seq_len), jnp.int32)
    jax.jit(lambda params, tokens: merge(CONFIG, params)(tokens)).lower(params, tokens).compile()
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT2(CONFIG, rngs=nnx.Rngs(0))))
    prompts, lengths, number = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 128), (3,), ()))
    real, is_done = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((3,), bool)
    key, draw = jax.eval_shape(lambda: jax.random.key(0)), _Draw(False, 50, True, 500)
    arguments = (graphdef, params, prompts, lengths, is_done, number, number, key, real, real, number)
    for use_cache in (True, False):
        _continue.lower(*arguments, draw=draw, use_cache=use_cache).compile()


def test_a_step_for_a_cpu_is_made_on_a_tpu_host(devices, monkeypatch):
    """A mesh of this machine's CPU devices decides, not the default device."""
    monkeypatch.setattr("nnx_gpt2._target.default_device", lambda: SimpleNamespace(platform="tpu"))
    program, _ = train_step(CONFIG, make_mesh(devices=jax.devices("cpu")))
    assert not has_kernel(program)
