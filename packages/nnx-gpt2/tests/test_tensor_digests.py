"""Digests of arrays: equal for equal arrays on any mesh, and different for any change."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_gpt2 import (
    GPT2Config,
    OptimizerConfig,
    _tensor_digests,
    create_optimizer,
    create_train_state,
    make_mesh,
    root_digest,
    tensor_digests,
    tree_shardings,
)
from nnx_gpt2._tensor_digests import _block_sides

CONFIG = GPT2Config(vocab_size=65, seq_len=24, num_layers=2, num_heads=2, embed_dim=48)

# Two processes of six devices each. `fsdp` of 2 and 4 splits arrays between blocks, 3, 6 and 12 within them.
CODE = """
import json, sys

import jax, jax.numpy as jnp
import numpy as np

from nnx_gpt2 import *

rank, num_processes, port = map(int, sys.argv[1:])
if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
config = GPT2Config(vocab_size=65, seq_len=24, num_layers=1, num_heads=2, embed_dim=48)
state = create_train_state(config, create_optimizer(OptimizerConfig(average_decay=0.5), 9), jax.random.key(0))
host = jax.tree.map(np.asarray, state)
roots = {"here": root_digest(tensor_digests(host))}
for fsdp, tensor in ((1, 1), (2, 1), (3, 1), (4, 1), (12, 1), (6, 2)):
    shardings = tree_shardings(host, make_mesh(fsdp=fsdp, tensor=tensor))
    place = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    roots[f"{fsdp}x{tensor}"] = root_digest(tensor_digests(jax.tree.map(place, host, shardings)))
print(json.dumps(roots))
"""


def state(optimizer=None, mesh=None, **changes):
    rule = create_optimizer(optimizer or OptimizerConfig(), 20)
    found = create_train_state(CONFIG, rule, jax.random.key(0))
    return found if mesh is None else jax.device_put(found, tree_shardings(found, mesh))


@pytest.mark.parametrize(
    "optimizer", [OptimizerConfig(average_decay=0.9), OptimizerConfig(name="muon")], ids=["averaged", "muon"]
)
@pytest.mark.parametrize(
    ("num_devices", "axes"),
    [(8, {}), (8, {"fsdp": 2}), (6, {"fsdp": 3}), (8, {"fsdp": 4}), (8, {"tensor": 2}), (8, {"fsdp": 2, "tensor": 2})],
    ids=str,
)
def test_a_mesh_has_the_digests_of_one_device(num_devices, axes, optimizer):
    mesh = make_mesh(**axes, devices=jax.devices()[:num_devices])
    alone = tensor_digests(state(optimizer))
    assert {len(digest) for digest in alone.values()} == {64}
    assert tensor_digests(state(optimizer, mesh)) == alone
    assert tensor_digests(jax.tree.map(np.asarray, state(optimizer))) == alone


def test_names_are_those_of_the_tree_and_each_array_has_one():
    digests = tensor_digests(state())
    assert {"step", "params.wte.embedding", "params.h.0.attn.c_attn.kernel"} <= digests.keys()
    assert (
        len({*digests.values()}) == len(digests) == len(jax.tree.leaves(state()))
    )  # the name is part of a digest: equal zeros differ


@pytest.mark.parametrize("position", [0, 1000, -1])
def test_one_ulp_changes_one_digest(position):
    found = jax.tree.map(np.array, state())
    before = tensor_digests(found)
    kernel = found.params["h"][1]["mlp"]["c_fc"]["kernel"].reshape(-1)
    kernel[position] = np.nextafter(kernel[position], np.float32(np.inf))
    after = tensor_digests(found)
    assert {name for name in before if before[name] != after[name]} == {"params.h.1.mlp.c_fc.kernel"}
    assert root_digest(before) != root_digest(after)


def test_the_sign_of_zero_and_the_bits_of_nan_count():
    values = np.array([0.0, -0.0, np.nan, -np.nan], np.float32)
    assert len({*(tensor_digests({"x": value})["x"] for value in values)}) == 4


def test_name_type_and_shape_change_a_digest():
    zeros = np.zeros((4, 6), np.float32)
    trees = [
        {"x": zeros}, {"y": zeros}, {"x": zeros.astype(np.int32)}, {"x": zeros.astype(jnp.bfloat16)},
        {"x": zeros.reshape(6, 4)}, {"x": zeros.reshape(24)}, {"x": zeros[:3]}, {"x": {"y": zeros}},
    ]  # fmt: skip
    assert len({*(digest for tree in trees for digest in tensor_digests(tree).values())}) == len(trees)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(3), jnp.float32(3)),
        (np.arange(30, dtype=">i4").reshape(5, 6), np.arange(30, dtype="<i4").reshape(5, 6)),
        (np.asfortranarray(np.arange(256.0).reshape(16, 16)), np.arange(256.0).reshape(16, 16)),  # blocks of 2 by 2
        (np.arange(64.0, dtype=np.float32)[::2], jnp.arange(0, 64, 2, jnp.float32)),
        (np.zeros((0, 3), np.int32), jnp.zeros((0, 3), jnp.int32)),
        (np.ones((5, 7), jnp.bfloat16), jnp.ones((5, 7), jnp.bfloat16)),
    ],
    ids=["0-d", "big-endian", "columns first", "strided", "empty", "bfloat16"],
)
def test_equal_values_in_other_layouts_have_equal_digests(one, other):
    assert tensor_digests([one]) == tensor_digests([other])


def test_two_arrays_of_one_name_are_rejected():
    with pytest.raises(ValueError, match="the names of the arrays must differ, got 1 names of 2 arrays"):
        tensor_digests({"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)})


def test_random_keys_have_digests():
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg"), jax.random.split(jax.random.key(0), 4)]
    assert len({*(tensor_digests([key])["0"] for key in keys)}) == 4
    sharded = jax.device_put(keys[3], NamedSharding(Mesh(np.array(jax.devices()[:4]), "x"), PartitionSpec("x")))
    assert tensor_digests([sharded]) == tensor_digests([keys[3]])


def test_the_digest_of_a_tree_is_fixed():
    # A change of these digests makes all recorded ones useless.
    tree = {"a": np.arange(3 * 64 * 200, dtype=np.float32).reshape(3, 64, 200), "b": np.int32(7)}
    digests = tensor_digests(tree)
    assert digests["a"].startswith("68ce5b97af961596")
    assert digests["b"].startswith("523f7d735c222861")
    assert root_digest(digests).startswith("b45ce17635461b88")


def test_the_blocks_of_large_arrays_are_fixed():
    # Another grid changes the digests of large arrays. A block has 64 KiB, unless its sides are odd.
    assert _block_sides((1024, 1024), 4) == (128, 128)
    assert _block_sides((1024, 1280), 8) == (64, 80)
    assert _block_sides((8 * 24_999,), 4) == (24_999,)
    large = np.arange(200_000, dtype=np.float32)
    assert tensor_digests({"c": large})["c"].startswith("54073a1d597f237a")


def test_an_error_in_a_thread_is_raised():
    """No digest, or that of zeros, would hide it."""
    with pytest.raises(TypeError):
        tensor_digests({"good": np.arange(5), "bad": np.array([None, 1], object)})


def test_few_arrays_are_in_host_memory_at_the_same_time(monkeypatch):
    """The blocks of the first array are done, those of the others are not yet."""
    begun, may_go_on = list[str](), threading.Event()
    parts_of, hash_of = _tensor_digests._parts, _tensor_digests._hash

    def parts(tensor):
        begun.append(tensor.header)
        return parts_of(tensor)

    def hash_blocks(host, bounds, tensor, numbers):
        assert tensor.header == begun[0] or may_go_on.wait(60)
        hash_of(host, bounds, tensor, numbers)

    monkeypatch.setattr(_tensor_digests, "_parts", parts)
    monkeypatch.setattr(_tensor_digests, "_hash", hash_blocks)
    tree = {f"array{number:02}": np.full(3, number) for number in range(40)}
    with ThreadPoolExecutor() as pool:
        digests = pool.submit(tensor_digests, tree)
        while len(begun) < 17:  # the seventeenth waits for the second
            time.sleep(0.01)
        time.sleep(0.2)
        num_begun = len(begun)
        may_go_on.set()
        assert (num_begun, len(digests.result(60))) == (17, 40)


def test_processes_share_the_work_and_agree():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(rank, num_processes):
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={12 // num_processes}", "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", CODE, str(rank), str(num_processes), str(port)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [start(0, 1), start(0, 2), start(1, 2)]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    roots = {root for out, _ in outputs for root in json.loads(out.splitlines()[-1]).values()}
    assert len(roots) == 1
