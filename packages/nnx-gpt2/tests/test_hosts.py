"""Two simulated hosts: processes joined by jax.distributed, with different boot ids.

XLA tells hosts apart by the boot id, and gives the devices of each host their own `slice_index`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Each process has two devices. It trains on its half of each batch, and evaluates one batch.
CODE = """
import dataclasses, json, sys

import jax
import numpy as np

from nnx_gpt2 import *

rank, num_processes, port, fsdp, tensor = map(int, sys.argv[1:])
if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
assert jax.process_index() == rank
config = GPT2Config(vocab_size=65, seq_len=16, num_layers=2, num_heads=2, embed_dim=32)
optimizer = create_optimizer(OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4), 200)
mesh = make_mesh(fsdp=fsdp, tensor=tensor)
# The parameters go from one device of each process to the mesh, and from there into the state of training.
params = create_train_state(config, optimizer, jax.random.key(0)).params
own = create_train_state(config, optimizer, jax.random.key(1), params=params)  # without a mesh, each has its own
assert all(leaf.devices() == {jax.local_devices()[0]} for leaf in jax.tree.leaves(own.params))
first = create_train_state(config, optimizer, jax.random.key(1), mesh, params=params)
state = create_train_state(config, optimizer, jax.random.key(2), mesh, params=first.params)
shorter = dataclasses.replace(config, seq_len=9)
narrow = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), first.params)
short = create_train_state(shorter, optimizer, jax.random.key(2), mesh, params=narrow)
assert {leaf.dtype for leaf in jax.tree.leaves(short.params)} == {np.dtype("float32")}
assert [leaf.shape for leaf in jax.tree.leaves(short.params["wpe"])] == [(9, 32)]
created = create_train_state(config, optimizer, jax.random.key(0), mesh)
for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(created)):
    assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    for shard, other in zip(leaf.addressable_shards, like.addressable_shards):
        np.testing.assert_allclose(shard.data, other.data, rtol=1e-6)
jax.tree.map(lambda leaf: leaf.delete(), first)
step, evaluate = make_train_step(config, optimizer, mesh, end_of_text=64), make_eval_step(config, mesh, end_of_text=64)
rows = slice(rank * 8 // num_processes, (rank + 1) * 8 // num_processes)

def batch(seed):
    windows = np.random.default_rng(seed).integers(0, 65, (8, 17)).astype(np.uint16)
    return put_batch(windows[rows], mesh)

losses = []
for seed in range(10):
    state, metrics = step(state, batch(seed), jax.random.key(7))
    losses.append(float(metrics["loss"]))
evaluated = np.asarray(evaluate(state.params, batch(10))).mean(axis=1).tolist()
hosts = len({getattr(device, "slice_index", 0) for device in jax.devices()})
print(json.dumps({"hosts": hosts, "losses": losses, "evaluated": evaluated}))
"""

# The same bits on one process of four devices and on two processes of two. A mesh may have the devices of one process.
TREE = """
import json, sys

import jax
import numpy as np

from nnx_gpt2 import *

rank, num_processes, port, *_ = map(int, sys.argv[1:])
if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
config = GPT2Config(vocab_size=65, seq_len=16, num_layers=1, num_heads=2, embed_dim=32, dropout_rate=0.3)
mesh, rule = make_mesh(), create_optimizer(OptimizerConfig(warmup_steps=1), 100)
rows = np.random.default_rng(0).integers(0, 65, (8, 17)).astype(np.uint16)
own = rows[rank * 8 // num_processes : (rank + 1) * 8 // num_processes]
state, step = create_train_state(config, rule, jax.random.key(0), mesh), TreeTrainStep(config, rule, mesh, num_shards=4)
for _ in range(2):
    state, metrics = step(state, put_batch(own, mesh), jax.random.key(1))
here = put_batch(own, make_mesh(devices=jax.local_devices()))
assert here.shape == own.shape and (np.asarray(here) == own).all()
print(json.dumps([root_digest(tensor_digests(state)), float(metrics["loss"])]))
"""


@pytest.fixture(scope="module")
def other_host(tmp_path_factory):
    """Command prefix that changes the boot id of a command."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("only Linux can give a process its own boot id, by unshare")
    path = tmp_path_factory.mktemp("host") / "boot_id"
    path.write_text(f"{uuid.uuid4()}\n")
    command = ["unshare", "--mount", "sh", "-c", f'mount --bind {path} {BOOT_ID} && exec "$@"', "sh"]
    seen = subprocess.run([*command, "cat", str(BOOT_ID)], capture_output=True, text=True, check=False)
    if seen.stdout != path.read_text():
        pytest.skip(f"this user may not mount: {seen.stderr.strip()}")
    return command


def run(commands, code=CODE, **axes):
    """Run the commands as processes of one job, and return their results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={4 // len(commands)}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    sizes = [str(axes.get("fsdp", 1)), str(axes.get("tensor", 1))]
    processes = [
        subprocess.Popen(
            [*command, sys.executable, "-c", code, str(rank), str(len(commands)), str(port), *sizes],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, command in enumerate(commands)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture(scope="module")
def alone():
    """One process of four devices."""
    (result,) = run([[]])
    return result


@pytest.mark.fault
@pytest.mark.parametrize("axes", [pytest.param({"fsdp": 4}, marks=pytest.mark.slow), {"tensor": 2}], ids=str)
def test_two_hosts_train_and_evaluate_like_one(axes, alone, other_host, record_property):
    record_property("fault", f"two hosts, whose devices XLA puts into two slices; mesh {axes}")
    record_property("lost", "nothing")
    first, second = run([[], other_host], **axes)
    assert first["hosts"] == 2
    for result in (first, second):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=0, atol=1e-5)
        # The comparison is row by row, to catch losses in another order.
        np.testing.assert_allclose(result["evaluated"], alone["evaluated"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_tree_has_the_same_bits_on_two_processes():
    (alone,) = run([[]], TREE)
    assert run([[], []], TREE) == [alone, alone]
