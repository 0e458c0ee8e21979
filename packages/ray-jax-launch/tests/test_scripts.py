"""Scripts of Ray's own JaxTrainer, each run as a command after a change of one import."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BEFORE, AFTER = "from ray.train.v2.jax import JaxTrainer", "from ray_jax_launch import JaxTrainer"

# Least squares by hand on random numbers of each worker, with metrics but no checkpoint.
REGRESSION = """
import ray.train
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer


def fit_line():
    import jax
    import jax.numpy as jnp

    inputs = jax.random.normal(jax.random.key(jax.process_index()), (64,))
    targets = 3 * inputs - 1

    @jax.jit
    def improve(line):
        loss, slope = jax.value_and_grad(lambda line: jnp.mean((line[0] * inputs + line[1] - targets) ** 2))(line)
        return line - 0.1 * slope, loss

    line = jnp.zeros(2)
    for epoch in range(100):
        line, loss = improve(line)
        if epoch % 20 == 19:
            print("after epoch", epoch)
            ray.train.report({"loss": float(loss), "epoch": epoch, "processes": jax.process_count()})


trainer = JaxTrainer(train_loop_per_worker=fit_line, scaling_config=ScalingConfig(num_workers=2))
result = trainer.fit()
assert result.metrics["loss"] < 1e-3, result
assert result.metrics["epoch"] == 99
assert result.metrics["processes"] == 2
assert result.error is None
assert result.path.startswith(RESULTS + "/ray_train_run-")
print("passed")
"""

# A model over a global batch, rows of Ray Data, and a checkpoint by Orbax that every rank writes and rank 0 reports.
DATASET = """
import sys
from pathlib import Path

import numpy as np
import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

SHARED = Path(sys.argv[1])


def train_loop_per_worker(config):
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    local = config["global_batch_size"] // ray.train.get_context().get_world_size()

    def global_array(rows):
        return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), rows)

    @jax.jit
    def train_step(w, x, y):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.2 * grad, loss

    start, w = 0, jnp.zeros(2)
    checkpointer = ocp.PyTreeCheckpointer()
    before = ray.train.get_checkpoint()
    if before is not None:
        restored = checkpointer.restore(before.path)
        start, w = int(restored["step"]), jnp.asarray(restored["w"])
    w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    print("starting from step", start)
    data = ray.train.get_dataset_shard("train")
    for step in range(start, config["steps"]):
        for batch in data.iter_batches(batch_size=local, batch_format="numpy", drop_last=True):
            w, loss = train_step(w, global_array(batch["x"]), global_array(batch["y"]))
        folder = SHARED / "work" / str(step + 1)
        checkpointer.save(folder, {"w": w, "step": np.int64(step + 1)}, force=True)
        rank = ray.train.get_context().get_world_rank()
        metrics = {"step": step + 1, "loss": float(loss)}
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
    return start


rng = np.random.default_rng(0)
rows = rng.normal(size=(256, 2)).astype(np.float32)
train = ray.data.from_items([{"x": row, "y": np.float32(row @ [1, -2])} for row in rows])
result = JaxTrainer(
    train_loop_per_worker=train_loop_per_worker,
    train_loop_config={"global_batch_size": 32, "steps": int(sys.argv[2])},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="a_run",
        storage_path=str(SHARED),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        worker_runtime_env={"env_vars": {"LD_LIBRARY_PATH": ""}},
    ),
    datasets={"train": train},
).fit()
assert result.metrics["step"] == int(sys.argv[2])
assert result.checkpoint.path.startswith(result.path + "/checkpoint_")
assert len(result.best_checkpoints) == 2
print("passed, started from", result.return_value, "loss", result.metrics["loss"])
"""


def run(script, tmp_path, *args):
    """Run the script, with the changed import, and return its line about the result, and its log."""
    assert script.count(BEFORE) == 1
    code = f"RESULTS = {str(tmp_path / 'ray_results')!r}\n" + script.replace(BEFORE, AFTER)
    # Ray sets the authentication of a process's own cluster in its environment. The script has another home folder, and
    # starts its own cluster even if an earlier test has left one.
    unwanted = ("XLA_FLAGS", "JAX_PLATFORMS", "RAY_AUTH_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    path = tmp_path / "script.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, str(path), *map(str, args)],
        env=environment | {"HOME": str(tmp_path), "RAY_ADDRESS": "local", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Ray prints the output of workers in a script that starts it by Ray Data.
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("passed"))
    return line, done.stderr


def test_a_script_with_metrics_and_rays_defaults(tmp_path):
    line, log = run(REGRESSION, tmp_path)
    assert line == "passed"
    assert log.startswith("starting cpu:2\n")
    assert {"worker 0: after epoch 99", "worker 1: after epoch 99"} <= set(log.splitlines())


def test_a_script_with_a_dataset_and_orbax_checkpoints_continues_in_a_second_process(tmp_path):
    first, _ = run(DATASET, tmp_path, tmp_path, 2)
    assert first.startswith("passed, started from 0 loss ")
    second, _ = run(DATASET, tmp_path, tmp_path, 4)
    assert second.startswith("passed, started from 2 loss ")
    assert float(second.split()[-1]) < float(first.split()[-1])
