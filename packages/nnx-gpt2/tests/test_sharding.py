"""Meshes of eight simulated devices against a single device."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    abstract_train_state,
    batch_sharding,
    create_optimizer,
    create_train_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    param_spec,
    put_batch,
    replicated,
)

CONFIG = GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=5)
LAYOUTS = {
    "data=8": {},
    "fsdp=8": {"fsdp": 8},
    "data=2,fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2},
}


def windows(seed):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (8, 17)).astype(np.uint16)


def train(num_steps, mesh=None, *, optimizer=OPTIMIZER, grad_accum_steps=1, end_of_text=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    rule = create_optimizer(optimizer, 200)
    state = create_train_state(config, rule, jax.random.key(0), mesh)
    step = make_train_step(config, rule, mesh, grad_accum_steps=grad_accum_steps, end_of_text=end_of_text)
    losses = []
    for i in range(num_steps):
        batch = windows(i) if mesh is None else put_batch(windows(i), mesh)
        state, metrics = step(state, batch, jax.random.key(7))
        losses.append(float(metrics["loss"]))
    return state, np.array(losses)


@pytest.fixture(scope="module")
def single():
    return train(20)


@pytest.mark.parametrize("layout", [pytest.param("data=8", marks=pytest.mark.slow), *list(LAYOUTS)[1:]])
def test_a_layout_trains_like_one_device(layout, single):
    assert jax.device_count() == 8
    mesh = make_mesh(**LAYOUTS[layout])
    state, losses = train(20, mesh)
    np.testing.assert_allclose(losses, single[1], atol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), state.params, single[0].params)
    expected = np.asarray(make_eval_step(CONFIG, end_of_text=7)(single[0].params, windows(30)))
    evaluated = make_eval_step(CONFIG, mesh, end_of_text=7)(state.params, put_batch(windows(30), mesh))
    assert evaluated.sharding.is_fully_replicated
    np.testing.assert_allclose(evaluated, expected, atol=1e-3)


def test_options_together_train_alike_on_a_mesh():
    """A device has a row of a microbatch, whose logits are three chunks, the last one padded."""
    ways: dict[str, Any] = {"scan_layers": True, "remat": "dots", "loss_chunk_tokens": 6}
    changes: dict[str, Any] = {"dropout_rate": 0.2, "grad_accum_steps": 2, "end_of_text": 7}
    mesh = make_mesh(fsdp=2, tensor=2)
    (state, losses), (expected, expected_losses) = train(2, mesh, **ways, **changes), train(2, **ways, **changes)
    np.testing.assert_allclose(losses, expected_losses, atol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), state.params, expected.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": True, "remat": "dots", "loss_chunk_tokens": 4},
        {"dropout_rate": 0.2, "grad_accum_steps": 2},
        {"end_of_text": 7},
        {"optimizer": dataclasses.replace(OPTIMIZER, name="muon")},
    ],
    ids=str,
)
def test_options_train_alike_on_a_mesh(changes):
    mesh = make_mesh(fsdp=2, tensor=2)
    np.testing.assert_allclose(train(4, mesh, **changes)[1], train(4, **changes)[1], atol=1e-4)


# The shape of each sharded parameter, and of its shard on a mesh of fsdp=4, tensor=2.
SHARDS = {
    "wte.embedding": ((128, 32), (64, 8)),
    "wpe.embedding": ((16, 32), (16, 8)),
    "attn.c_attn.kernel": ((32, 3, 32), (8, 3, 16)),
    "attn.c_attn.bias": ((3, 32), (3, 16)),
    "attn.c_proj.kernel": ((32, 32), (16, 8)),
    "mlp.c_fc.kernel": ((32, 128), (8, 64)),
    "mlp.c_fc.bias": ((128,), (64,)),
    "mlp.c_proj.kernel": ((128, 32), (64, 8)),
}


@pytest.mark.parametrize("name", SHARDS)
def test_each_matrix_is_split_along_the_dimensions_that_the_axes_are_for(name):
    """`tensor` splits heads, feed-forward units and the vocabulary. `fsdp` splits the other dimension of a matrix."""
    full, shard = SHARDS[name]
    mesh = make_mesh(fsdp=4, tensor=2)
    assert jax.NamedSharding(mesh, param_spec(name, len(full))).shard_shape(full) == shard
    assert jax.NamedSharding(mesh, param_spec(name, len(full) + 1)).shard_shape((2, *full)) == (2, *shard)


@pytest.mark.parametrize(
    ("scan_layers", "name"), [(False, "adamw"), (True, "adamw"), pytest.param(False, "muon", marks=pytest.mark.slow)]
)
def test_no_device_holds_a_complete_sharded_parameter(scan_layers, name):
    """Check parameters and moments of the optimizer, after creation and a step. Muon has one moment of kernels."""
    mesh = make_mesh(fsdp=4, tensor=2)
    optimizer = dataclasses.replace(OPTIMIZER, name=name)
    state, _ = train(1, mesh, scan_layers=scan_layers, optimizer=optimizer)
    created = create_train_state(
        dataclasses.replace(CONFIG, scan_layers=scan_layers), create_optimizer(optimizer, 200), jax.random.key(0), mesh
    )
    num_sharded = 0
    for tree in (state, created):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            leaf_name = jax.tree_util.keystr(path, simple=True, separator=".")
            shard = next((shard for suffix, (_, shard) in SHARDS.items() if leaf_name.endswith(suffix)), None)
            held = leaf.addressable_shards[0].data.shape
            assert held == leaf.shape if shard is None else held[leaf.ndim - len(shard) :] == shard, leaf_name
            num_sharded += shard is not None
    per_layer = 6 if not scan_layers else 6 / CONFIG.num_layers
    num_missing = 4 * CONFIG.num_layers if name == "muon" else 0
    assert num_sharded == 2 * (3 * (2 + per_layer * CONFIG.num_layers) - num_missing)


def test_the_initial_parameters_follow_the_key_on_one_device_and_on_a_mesh():
    config, rule, mesh = dataclasses.replace(CONFIG, num_layers=1), create_optimizer(OPTIMIZER, 200), make_mesh(fsdp=8)
    one, same, other = (
        np.asarray(create_train_state(config, rule, jax.random.key(seed), on).params["wte"]["embedding"])
        for seed, on in ((5, None), (5, mesh), (6, mesh))
    )
    np.testing.assert_allclose(one, same, rtol=1e-6)
    assert not np.isclose(one[:65], other[:65]).mean() > 0.01


def test_the_abstract_state_has_the_form_of_the_real_state():
    mesh, rule = make_mesh(fsdp=2, tensor=2), create_optimizer(OPTIMIZER, 200)
    real = create_train_state(CONFIG, rule, jax.random.key(0), mesh)
    abstract = abstract_train_state(CONFIG, rule, mesh)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), real) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), real, abstract))
    )


def test_a_stacked_parameter_is_split_as_its_layers_are():
    assert param_spec("h.3.mlp.c_fc.kernel", 2) == jax.P("fsdp", "tensor")
    assert param_spec("opt.mu.h.mlp.c_fc.kernel", 3) == jax.P(None, "fsdp", "tensor")
    assert param_spec("h.3.ln_1.scale", 1) == jax.P()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, "must be at least 1 and their product must divide the 8 devices, got 3 and 1."),
        ({"tensor": 0}, "must be at least 1 and their product must divide the 8 devices, got 1 and 0."),
        ({"devices": []}, "devices must be None, or at least 1 device of jax, each once, got an object of type list."),
    ],
)
def test_a_mesh_that_does_not_divide_the_devices_is_rejected(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"tensor": 4}, "mesh axis tensor must divide num_heads (2), got 4. Choose another size."),
        (
            {"num_heads": 3, "embed_dim": 48},
            {"tensor": 3, "devices": jax.devices()[:3]},
            "mesh axis tensor must divide padded_vocab_size (128), got 3.",
        ),
        ({"mlp_dim": 63}, {"tensor": 2}, "mesh axis tensor must divide mlp_dim (63), got 2."),
        ({"embed_dim": 36}, {"fsdp": 8}, "mesh axis fsdp must divide embed_dim (36), got 8."),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_rejected(changes, sizes, message):
    config, rule = dataclasses.replace(CONFIG, **changes), create_optimizer(OPTIMIZER, 200)
    with pytest.raises(ValueError, match=re.escape(message)):
        create_train_state(config, rule, jax.random.key(0), make_mesh(**sizes))
    with pytest.raises(ValueError, match=re.escape(message)):
        make_train_step(config, rule, make_mesh(**sizes))


def test_a_batch_whose_microbatches_have_fewer_rows_than_devices_is_rejected():
    mesh, rule = make_mesh(), create_optimizer(OPTIMIZER, 200)
    step = make_train_step(CONFIG, rule, mesh, grad_accum_steps=2)
    message = "batch size must be a positive multiple of 8 devices (the axes data and fsdp) x 2 microbatches, got 8."
    with pytest.raises(ValueError, match=re.escape(message)):
        step.lower(abstract_train_state(CONFIG, rule, mesh), put_batch(windows(0), mesh), jax.random.key(0))


def test_rows_of_microbatches_stay_on_their_devices():
    """Devices exchange sums of gradients, and no rows of token ids."""
    mesh, rule = make_mesh(), create_optimizer(OPTIMIZER, 200)
    config = dataclasses.replace(CONFIG, num_layers=1)
    step = make_train_step(config, rule, mesh, grad_accum_steps=2)
    batch = jax.ShapeDtypeStruct((16, 17), jnp.int32, sharding=batch_sharding(mesh))
    key = jax.device_put(jax.random.key(0), replicated(mesh))
    program = step.lower(abstract_train_state(config, rule, mesh), batch, key).compile().as_text()
    assert program is not None
    moved = re.findall(r"= (\S+) (all-gather|all-to-all|all-reduce|collective-permute)\(", program)
    assert moved
    assert not [shape for shape, _ in moved if shape.startswith("s32[") and ",17]" in shape], moved


@pytest.mark.parametrize(
    ("layout", "sums"),
    [
        ("data=8", ["all-reduce"]),
        ("fsdp=8", ["reduce-scatter"]),
        ("data=2,fsdp=2,tensor=2", ["all-reduce", "reduce-scatter"]),
    ],
)
def test_the_gradients_of_lookup_and_head_are_sent_as_one_sum(layout, sums):
    mesh, rule = make_mesh(**LAYOUTS[layout]), create_optimizer(OPTIMIZER, 200)
    config = dataclasses.replace(CONFIG, vocab_size=300, num_layers=1)
    state = abstract_train_state(config, rule, mesh)
    key = jax.device_put(jax.random.key(0), replicated(mesh))
    program = make_train_step(config, rule, mesh).lower(state, put_batch(windows(0), mesh), key).compile().as_text()
    assert program is not None
    sent = re.findall(r"= (.*) (all-reduce|reduce-scatter)\(", program)
    num_rows = config.padded_vocab_size // mesh.shape["tensor"]
    assert sorted(kind for shapes, kind in sent for _ in range(shapes.count(f"f32[{num_rows},"))) == sums


def test_a_mesh_with_rows_of_another_process_on_this_one_is_rejected(monkeypatch):
    """All devices are this process's, which holds only the second half of the rows."""
    monkeypatch.setattr("nnx_gpt2._sharding._place_among_processes", lambda mesh: (1, 2))
    message = "mesh must place rows 8 to 16 on process 1, got 0 to 2. Make the mesh by make_mesh."
    with pytest.raises(ValueError, match=re.escape(message)):
        put_batch(windows(0), make_mesh())


def test_rows_that_do_not_divide_are_rejected():
    with pytest.raises(ValueError, match="partitioned 4 times, but the dimension size is 3"):
        put_batch(windows(0)[:3], make_mesh(tensor=2))
    assert put_batch(windows(0)[:4], make_mesh(tensor=2)).shape == (4, 17)
    assert jnp.asarray(put_batch(windows(0), make_mesh(fsdp=2))).sum() == windows(0).astype(np.int64).sum()
