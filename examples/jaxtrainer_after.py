"""Linear regression under JaxTrainer. The files jaxtrainer_before.py and jaxtrainer_after.py differ in one import.

python examples/jaxtrainer_before.py, and then python examples/jaxtrainer_after.py
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray_jax_launch import JaxTrainer


def train_loop(config: dict[str, Any]) -> None:
    """Fit `y = 2 x + 1` to noisy points. Each worker makes its own points, and they share one model."""
    import jax  # in the worker only: a driver that uses jax would lock the chips of a TPU
    import jax.numpy as jnp
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rng = np.random.default_rng(jax.process_index())
    x = rng.normal(size=(100, 1)).astype(np.float32)
    y = 2 * x + 1 + 0.1 * rng.normal(size=x.shape).astype(np.float32)
    by_row, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    x, y = (jax.make_array_from_process_local_data(by_row, rows) for rows in (x, y))

    optimizer = optax.adam(config["learning_rate"])
    params = jax.device_put({"w": jnp.zeros((1, 1)), "b": jnp.zeros(1)}, everywhere)
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    for epoch in range(1, config["epochs"] + 1):
        params, opt_state, loss = train_step(params, opt_state, x, y)
        if epoch % 50 == 0:
            metrics = {"epoch": epoch, "loss": float(loss), "processes": jax.process_count()}
            with tempfile.TemporaryDirectory() as folder:
                np.savez(Path(folder, "params.npz"), **jax.device_get(params))
                is_first = ray.train.get_context().get_world_rank() == 0
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if is_first else None)


if __name__ == "__main__":
    trainer = JaxTrainer(
        train_loop,
        train_loop_config={"learning_rate": 0.1, "epochs": 100},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="jaxtrainer", storage_path=str(Path("runs").absolute())),
    )
    result = trainer.fit()
    print(result.metrics, result.path, result.error)
    if result.checkpoint is not None:
        with result.checkpoint.as_directory() as folder:
            print({name: value.round(1).tolist() for name, value in np.load(Path(folder, "params.npz")).items()})
