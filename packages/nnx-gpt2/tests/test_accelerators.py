"""Programs for a TPU slice of four hosts and for eight H100 GPUs, compiled by their own compilers, which need neither.

`nox -s "accelerators(tpu)"` and `nox -s "accelerators(gpu)"` install the compilers.
"""

import dataclasses
import importlib.util
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_gpt2 import (
    GPT2,
    GPT2Config,
    OptimizerConfig,
    TrainState,
    TreeTrainStep,
    absent_devices,
    abstract_train_state,
    batch_sharding,
    create_optimizer,
    device_facts,
    estimate_memory,
    has_bfloat16,
    make_eval_step,
    make_mesh,
    make_train_step,
    merge,
    peak_flops_per_s,
)
from nnx_gpt2._absent_devices import compiler_options
from nnx_gpt2._generate import _Draw, _draw_until, _Drawn, _read, _Settings, _Structure

pytestmark = [
    pytest.mark.accelerators,
    # jax writes programs for absent devices into its cache, and cannot read them: it compiles them again.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]

CONFIG = GPT2Config(vocab_size=512, seq_len=256, num_layers=1, num_heads=2, embed_dim=128, dtype="bfloat16")
OPTIMIZER = create_optimizer(OptimizerConfig(), 100)
LAYOUTS = {"data": {}, "fsdp=8": {"fsdp": 8}, "data,fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2}}
# The package that has a compiler.
COMPILERS = {"tpu": "libtpu", "gpu": "jax_cuda12_plugin"}
# By target: how the program of the fast kernel calls it.
KERNELS = {"tpu": "splash", "gpu": "__cudnn$fmha"}
# Four hosts, and one.
NAMES = {"tpu": "tpu:v6e:4x4", "gpu": "gpu:8:h100"}


@pytest.fixture(scope="module", params=COMPILERS)
def target(request):
    if importlib.util.find_spec(COMPILERS[request.param]) is None:
        pytest.skip(f"the compiler is not installed: {COMPILERS[request.param]}, for Linux")
    return request.param


@pytest.fixture(scope="module")
def devices(target):
    """The 16 devices of a slice `v6e:4x4`, of four hosts; or eight H100."""
    return absent_devices(NAMES[target])


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
    return lowered.compile(compiler_options=compiler_options(mesh.devices.flat[0]))


def has_kernel(program, target):
    return KERNELS[target] in program.as_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_train_step_has_the_kernel_and_writes_over_its_state(layout, target, devices):
    program, state = train_step(CONFIG, make_mesh(devices=devices, **LAYOUTS[layout]))
    assert has_kernel(program, target)
    assert re.findall(r"infeed|outfeed|send\(|recv\(", program.as_text()) == []
    shards = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)]
    assert program.memory_analysis().alias_size_in_bytes >= sum(shards)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("layout", "grad_dtype"), [("data", "float32"), ("fsdp=8", "float32"), ("fsdp=8", "bfloat16")])
def test_devices_add_gradients_in_float32_unless_asked(layout, grad_dtype, num_microbatches, target, devices):
    config, mesh = dataclasses.replace(CONFIG, grad_dtype=grad_dtype), make_mesh(devices=devices, **LAYOUTS[layout])
    program, _ = train_step(config, mesh, grad_accum_steps=num_microbatches)
    sums = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", program.as_text())
    assert any("f32" in types for types in sums)
    assert any("bf16" in types for types in sums) == (grad_dtype == "bfloat16")


def test_devices_send_gradients_once_for_all_microbatches(target, devices):
    program, _ = train_step(CONFIG, make_mesh(devices=devices), grad_accum_steps=2)
    bodies, inside, everywhere = computations(program.as_text())
    assert bodies
    assert (inside, everywhere > 0) == ([], True)


@pytest.mark.parametrize("target", ["gpu"], indirect=True)
@pytest.mark.parametrize("layout", ["data", "fsdp=8"])
def test_gpus_exchange_arrays_beside_other_kernels(layout, devices):
    """XLA's scheduler does that for GPUs without a flag. For TPUs, pretrain's `test_tpu_flags.py` has the flags."""
    config = dataclasses.replace(CONFIG, num_layers=2, num_heads=8, embed_dim=1024)
    program, _ = train_step(config, make_mesh(devices=devices, **LAYOUTS[layout]))
    lines = program.as_text().partition("ENTRY ")[2].splitlines()
    found = {}
    for number, line in enumerate(lines):
        if done := re.search(r" (all-reduce|all-gather|reduce-scatter)-done\(.*?(%[\w.-]+)\)", line):
            (start,) = (n for n, other in enumerate(lines[:number]) if other.strip().startswith(f"{done[2]} = "))
            kernels = sum(re.search(r" (fusion|custom-call)\(", other) is not None for other in lines[start:number])
            found.setdefault(done[1], []).append(kernels)
    assert set(found) == ({"all-reduce"} if layout == "data" else {"all-reduce", "all-gather", "reduce-scatter"})
    for kernels in found.values():
        assert max(kernels) > 2
    assert not re.search(r" (?:all-reduce|all-gather|reduce-scatter)\(", program.as_text())


def computations(text):
    """Return the bodies of the loops of a program, the collectives in them, and the number of all collectives."""
    lines, name = {}, ""
    for line in text.splitlines():
        if found := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
            name = found[1]
        lines.setdefault(name, []).append(line)
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    reached, rest = set(), [*bodies]
    while rest:
        if (name := rest.pop()) not in reached:
            reached.add(name)
            calls = r"(?:calls|body|to_apply|branch_computations)=\{?%?([\w.-]+)"
            rest += re.findall(calls, "\n".join(lines.get(name, [])))
    collective = r" (?:all-reduce|reduce-scatter|all-gather)(?:-start)?\("
    inside = [line.strip()[:200] for name in reached for line in lines.get(name, []) if re.search(collective, line)]
    return bodies, inside, len(re.findall(collective, text))


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


@pytest.mark.parametrize("target", ["tpu"], indirect=True)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(
    ("name", "kind", "num_hosts"),
    [
        ("tpu:v6e:1x1", "TPU v6 lite", 1),
        ("tpu:v5e:2x4", "TPU v5 lite", 1),
        ("tpu:v6e:4x4", "TPU v6 lite", 4),
        ("tpu:v5p:2x2x4", "TPU v5", 4),
        ("tpu:v7x:2x2x2", "TPU7x", 2),
    ],
)
def test_slices_have_their_kind_and_hosts(name, kind, num_hosts):
    devices = absent_devices(name)
    assert {device.device_kind for device in devices} == {kind}
    assert len({device.process_index for device in devices}) == num_hosts
    assert (device_facts(name).platform, device_facts(name).device_kind) == (devices[0].platform, kind)


@pytest.mark.parametrize("target", ["gpu"], indirect=True)
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("kind", ["t4", "l4", "a100", "h200", "b200"])
def test_gpus_of_two_hosts_have_a_step_and_its_memory(kind):
    devices = absent_devices(f"gpu:2x4:{kind}")
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    facts, device = device_facts(f"gpu:2x4:{kind}"), devices[0]
    assert (facts.platform, facts.device_kind) == (device.platform, device.device_kind)
    assert (facts.compute_capability, has_bfloat16(facts)) == (device.compute_capability, has_bfloat16(device))
    assert peak_flops_per_s(device.device_kind)
    estimate = estimate_memory(CONFIG, global_batch_size=16, mesh=make_mesh(devices=devices))
    assert 0 < estimate.temporary_bytes < device_facts(f"gpu:2x4:{kind}").memory_bytes


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


def test_the_program_of_a_shard_is_compiled_for_one_device(target, devices):
    mesh = make_mesh(devices=devices)
    step = TreeTrainStep(CONFIG, OPTIMIZER, mesh, num_shards=16)
    windows = jax.ShapeDtypeStruct((32, CONFIG.seq_len + 1), jnp.uint16, sharding=batch_sharding(mesh))
    program = compiled(step.lower(abstract_train_state(CONFIG, OPTIMIZER, mesh), windows, jax.random.key(0)), mesh)
    assert has_kernel(program, target)
    assert "all-reduce" not in program.as_text()


@pytest.mark.usefixtures("on_their_host")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_on_several_devices_computes_logits_and_samples(layout, devices):
    """XLA splits these programs, and cannot split the kernel of a TPU."""
    mesh = make_mesh(devices=devices, **LAYOUTS[layout])
    params = abstract_train_state(CONFIG, OPTIMIZER, mesh).params
    tokens = jax.ShapeDtypeStruct((4, CONFIG.seq_len), jnp.int32)
    compiled(jax.jit(lambda params, tokens: merge(CONFIG, params)(tokens)).lower(params, tokens), mesh)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT2(CONFIG, rngs=nnx.Rngs(0))))
    prompts, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 128), (3,)))
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    real: Any = jax.ShapeDtypeStruct((), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    before = _Drawn(lengths, jax.ShapeDtypeStruct((3,), bool), number)
    settings = _Settings(key=key, temperature=real, top_p=real, end_of_text=number)
    structure, draw = _Structure(graphdef), _Draw(False, 50, True, 500)
    for use_cache in (True, False):
        read = partial(_read, structure, capacity=256, use_cache=use_cache)
        compiled(jax.jit(read).lower(params, prompts, before), mesh)
        start = jax.eval_shape(read, params, prompts, before)
        lowered = _draw_until.lower(structure, params, settings, None, start, number, draw=draw, use_cache=use_cache)
        compiled(lowered, mesh)
