"""Checkpoints of several processes, and of processes that are killed."""

import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ray_jax_launch import Checkpoints, checkpoint_steps, intact_step, latest_step

SHARDED = """
import sys

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ray_jax_launch import Checkpoints

action, folder, num_processes, rank, port = sys.argv[1:]
if int(num_processes) > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(num_processes), int(rank))
assert jax.process_count() == int(num_processes)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
values = {"w": rng.standard_normal((8, 3), np.float32), "v": rng.standard_normal((3, 16)).astype(ml_dtypes.bfloat16)}
split = {"w": PartitionSpec("data"), "v": PartitionSpec(None, "data")}

def place(name, value):
    sharding = NamedSharding(mesh, split[name])
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

tree = {name: place(name, value) for name, value in values.items()}
tree["put"] = jax.device_put(jax.numpy.ones(2) * 3, NamedSharding(mesh, PartitionSpec()))
values["put"] = np.array([3, 3], np.float32)
make_key = jax.jit(lambda: jax.random.key(7), out_shardings=NamedSharding(mesh, PartitionSpec()))
with Checkpoints(folder) as checkpoints:
    if action == "save":
        try:
            checkpoints.save(5, {"params": {"own": jax.numpy.ones(2)}}, metadata={})
        except ValueError as error:
            assert "params['own'] must be an array that all processes share" in str(error)
        else:
            raise AssertionError
        items = {"params": tree, "rng": {"key": make_key()}}
        checkpoints.save(5, items, metadata={"by": int(num_processes)})
        checkpoints.wait()
    else:
        assert checkpoints.latest_step() == 5
        items = checkpoints.restore(5, {"params": tree, "rng": {"key": make_key()}})
        restored = items["params"]
        np.testing.assert_array_equal(jax.random.key_data(items["rng"]["key"]), jax.random.key_data(make_key()))
        for name, value in values.items():
            assert restored[name].sharding == tree[name].sharding
            for shard in restored[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()
print("done")
"""

ENDLESS = """
import sys

import jax.numpy as jnp

from ray_jax_launch import Checkpoints

with Checkpoints(sys.argv[1]) as checkpoints:
    step = checkpoints.latest_step() or 0
    while True:
        step += 1
        checkpoints.save(step, {"params": {"w": jnp.full(2_000_000, float(step))}}, metadata={})
        checkpoints.wait()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one_device_each():
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}


def run_processes(action, folder, num_processes):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, action, str(folder), str(num_processes), str(rank), str(port)],
            env=one_device_each(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(num_processes)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
        assert out.endswith("done\n")


@pytest.mark.parametrize(
    ("place", "num_readers"),
    [
        ("s3", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("s3", 4), ("folder", 1), ("folder", 4))),
    ],
    indirect=["place"],
)
def test_another_number_of_processes_restores_the_same_bits(place, num_readers):
    run_processes("save", place, 2)
    run_processes("restore", place, num_readers)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("place", "num_kills"),
    [("folder", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("folder", 10), ("s3", 10)))],
    indirect=["place"],
)
def test_every_listed_checkpoint_can_be_read_after_kills_during_a_save(place, num_kills, record_property):
    record_property("fault", f"a process that saves is killed at {num_kills} random moments")
    record_property("lost", "steps since the last checkpoint")
    rng = np.random.default_rng(num_kills)
    for _ in range(num_kills):
        before = intact_step(place) or 0
        process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(place)], env=one_device_each())
        try:
            deadline = time.monotonic() + 120
            while (latest_step(place) or 0) < before + 2:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.5))
        finally:
            process.kill()
            process.wait()
        steps = checkpoint_steps(place)
        assert steps[-1] >= before + 2
        with Checkpoints(place, read_only=True) as checkpoints:
            for step in steps:
                restored = checkpoints.restore(step, {"params": {"w": jnp.zeros(2_000_000)}})["params"]["w"]
                assert jax.device_get(restored == step).all()
        assert intact_step(place) == steps[-1]  # no checkpoint was quarantined
