"""Programs for a TPU slice of four hosts and for eight H100 GPUs, compiled by their own compilers, which need neither.

`nox -s "accelerators(tpu)"` and `nox -s "accelerators(gpu)"` install the compilers.
"""

import dataclasses
import importlib.util
import re
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

pytestmark = [
    pytest.mark.accelerators,
    # jax writes programs for absent devices into its cache, and cannot read them: it compiles them again.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]

CONFIG = GPT2Config(vocab_size=512, seq_len=256, num_layers=1, num_heads=2, embed_dim=128, dtype="bfloat16")
OPTIMIZER = create_optimizer(OptimizerConfig(), 100)
LAYOUTS = {"data": {}, "fsdp=8": {"fsdp": 8}, "data,fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2}}
# What XLA's compiler for GPUs has to know of an H100 with 80 GB: NVIDIA's data sheet, and its CUDA and cuDNN.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 2 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# The package that has a compiler.
COMPILERS = {"tpu": "libtpu", "gpu": "jax_cuda12_plugin"}
# By target: how the program of the fast kernel calls it.
KERNELS = {"tpu": "splash", "gpu": "__cudnn$fmha"}
# Without a device, XLA cannot time the kernels of a GPU to choose one.
OPTIONS: dict[str, Any] = {"tpu": {}, "gpu": {"xla_gpu_autotune_level": 0}}


@pytest.fixture(scope="module", params=COMPILERS)
def target(request):
    if importlib.util.find_spec(COMPILERS[request.param]) is None:
        pytest.skip(f"the compiler is not installed: {COMPILERS[request.param]}, for Linux")
    return request.param


@pytest.fixture(scope="module")
def devices(target):
    """The 16 devices of a slice `v6e:4x4`, of four hosts; or eight H100."""
    if target == "gpu":
        return topologies.get_topology_desc("h100", "cuda", topology="1x1x8", target_config=H100).devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # this host has no metadata server
        return topologies.get_topology_desc("v6e:4x4", "tpu").devices


@pytest.fixture
def on_their_host(devices, monkeypatch):
    """Make the first of the devices the default one of the code that jit traces, as on a host with several of them."""
    monkeypatch.setattr("nnx_gpt2._target.default_device", lambda: devices[0])


def train_step(config: GPT2Config, mesh: jax.sharding.Mesh, **options: Any) -> tuple[Any, TrainState]:
    """Compile a train step of 32 windows, and return it and its state."""
    state, key = abstract_train_state(config, OPTIMIZER, mesh), jax.eval_shape(lambda: jax.random.key(0))
    windows = jax.ShapeDtypeStruct((32, config.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
    return compiled(make_train_step(config, OPTIMIZER, mesh, **options).lower(state, windows, key), mesh), state


def compiled(lowered: Any, mesh: jax.sharding.Mesh) -> Any:
    return lowered.compile(compiler_options=OPTIONS.get(mesh.devices.flat[0].platform))


def has_kernel(program, target):
    return KERNELS[target] in program.as_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_train_step_has_the_kernel_and_writes_over_its_state(layout, target, devices):
    program, state = train_step(CONFIG, make_mesh(devices=devices, **LAYOUTS[layout]))
    assert has_kernel(program, target)
    assert re.findall(r"infeed|outfeed|send\(|recv\(", program.as_text()) == []
    shards = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)]
    assert program.memory_analysis().alias_size_in_bytes >= sum(shards)


@pytest.mark.parametrize(("layout", "grad_dtype"), [("data", "float32"), ("fsdp=8", "float32"), ("fsdp=8", "bfloat16")])
def test_devices_add_gradients_in_float32_unless_asked(layout, grad_dtype, target, devices):
    config = dataclasses.replace(CONFIG, grad_dtype=grad_dtype)
    program, _ = train_step(config, make_mesh(devices=devices, **LAYOUTS[layout]), grad_accum_steps=2)
    sums = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", program.as_text())
    assert any("f32" in types for types in sums)
    assert any("bf16" in types for types in sums) == (grad_dtype == "bfloat16")


@pytest.mark.parametrize("target", ["gpu"], indirect=True)
def test_dropout_keeps_a_byte_for_each_attention_weight(devices):
    """Kept weights would be seven bytes or more: the softmax in float32, the weights in bfloat16, and the mask."""
    config = dataclasses.replace(CONFIG, seq_len=512, num_heads=8, dropout_rate=0.1)
    mesh = make_mesh(devices=devices, fsdp=len(devices))
    two, six = (
        train_step(dataclasses.replace(config, num_layers=layers), mesh)[0].memory_analysis().temp_size_in_bytes
        for layers in (2, 6)
    )
    num_windows = 32 // len(devices)
    num_weights = num_windows * 8 * 512 * 512 * 5 / 8  # in four blocks of queries, which see more and more keys
    others = num_windows * 512 * 128 * 2 * 40
    assert num_weights < (six - two) / 4 < 1.5 * num_weights + others


@pytest.mark.parametrize("target", ["tpu"], indirect=True)
def test_the_estimate_of_the_memory_is_that_of_the_compiler(devices):
    mesh = make_mesh(fsdp=16, devices=devices)
    program, _ = train_step(CONFIG, mesh)
    estimate = estimate_memory(CONFIG, global_batch_size=32, mesh=mesh)
    analysis = program.memory_analysis()
    assert estimate.state_bytes == analysis.argument_size_in_bytes
    assert estimate.code_bytes == analysis.generated_code_size_in_bytes > 0


@pytest.mark.parametrize(
    ("changes", "fast_on"),
    [
        ({"seq_len": 255}, set()),
        ({"seq_len": 64}, {"gpu"}),
        ({"seq_len": 1024}, {"tpu", "gpu"}),
        ({"seq_len": 1024, "embed_dim": 256, "dtype": "float32"}, {"tpu"}),
        ({"seq_len": 640}, {"tpu", "gpu"}),
        ({"embed_dim": 50}, {"tpu"}),
        ({"embed_dim": 160}, {"tpu", "gpu"}),
        ({"embed_dim": 320}, {"tpu"}),
        ({"scan_layers": True, "remat": "full"}, {"tpu", "gpu"}),
        ({"dropout_rate": 0.1, "seq_len": 512}, set()),
        ({"dropout_rate": 0.1, "seq_len": 512, "remat": "full"}, set()),
    ],
    ids=[
        "length 255",
        "length 64",
        "length 1024",
        "float32",
        "length 640",
        "width 25",
        "width 80",
        "width 160",
        "scan and remat",
        "dropout",
        "dropout and remat",
    ],
)
def test_every_shape_compiles(changes, fast_on, target, devices):
    program, _ = train_step(dataclasses.replace(CONFIG, **changes), make_mesh(devices=devices))
    assert has_kernel(program, target) == (target in fast_on)


@pytest.mark.parametrize("num_positions", [256, 255])
def test_documents_keep_the_kernel_at_even_lengths(num_positions, target, devices):
    config = dataclasses.replace(CONFIG, seq_len=num_positions)
    program, _ = train_step(config, make_mesh(devices=devices), end_of_text=256, grad_accum_steps=2)
    assert has_kernel(program, target) == (num_positions == 256)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eval_step_has_the_kernel(layout, target, devices):
    mesh = make_mesh(devices=devices, **LAYOUTS[layout])
    params = abstract_train_state(CONFIG, OPTIMIZER, mesh).params
    windows = jax.ShapeDtypeStruct((16, CONFIG.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
    assert has_kernel(compiled(make_eval_step(CONFIG, mesh).lower(params, windows), mesh), target)


@pytest.mark.usefixtures("on_their_host")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_on_several_devices_computes_logits_and_samples(layout, devices):
    """XLA splits these programs, and cannot split the kernel of a TPU."""
    mesh = make_mesh(devices=devices, **LAYOUTS[layout])
    params = abstract_train_state(CONFIG, OPTIMIZER, mesh).params
    tokens = jax.ShapeDtypeStruct((4, CONFIG.seq_len), jnp.int32)
    compiled(jax.jit(lambda params, tokens: merge(CONFIG, params)(tokens)).lower(params, tokens), mesh)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT2(CONFIG, rngs=nnx.Rngs(0))))
    prompts, lengths, number = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 128), (3,), ()))
    real, is_done = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((3,), bool)
    key, draw = jax.eval_shape(lambda: jax.random.key(0)), _Draw(False, 50, True, 500)
    arguments = (graphdef, params, prompts, lengths, is_done, number, number, key, real, real, number)
    for use_cache in (True, False):
        compiled(_continue.lower(*arguments, draw=draw, use_cache=use_cache), mesh)
