"""Ray's JaxTrainer tutorial in the parts of this repository: GPT-2 124M on OpenWebText. Run it again to continue.

python examples/ray_tutorial.py --hardware gpu:2
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig

from owt_data import PrepareOptions, open_tokens, prepare, token_windows
from ray_jax_launch import JaxTrainer


def train_loop(config: dict[str, Any]) -> None:
    """Train on this worker's share of each batch."""
    import jax  # in the worker only: a driver that uses jax would lock the chips of a TPU
    import numpy as np

    import nnx_gpt2 as gpt2
    from ray_jax_launch import Checkpoints

    # Step 3, the model and its step. AdamW decays weights by 0.1. The learning rate falls from 5e-4 to 0.
    model, max_steps = gpt2.GPT2Config(**config["model"]), config["max_steps"]
    adamw = gpt2.OptimizerConfig(learning_rate=5e-4, min_learning_rate=0.0, beta2=0.999)
    optimizer, mesh, key = gpt2.create_optimizer(adamw, max_steps), gpt2.make_mesh(), jax.random.key(2357)
    state = gpt2.create_train_state(model, optimizer, key, mesh)
    train_step, eval_step = gpt2.make_train_step(model, optimizer, mesh), gpt2.make_eval_step(model, mesh)
    batch_size = config["batch_size"] // jax.process_count()

    def batches(shard: Any) -> Iterator[jax.Array]:
        while True:
            for batch in shard.iter_batches(batch_size=batch_size, prefetch_batches=2, drop_last=True):
                # y is x shifted by one. A window has the inputs and the last target.
                yield gpt2.put_batch(np.concatenate([batch["x"], batch["y"][:, -1:]], axis=1), mesh)

    # Step 4, the loop. A continued run reads the random windows again from the first; `step_windows` would go on.
    train_batches, val_batches = (batches(ray.train.get_dataset_shard(name)) for name in ("train", "val"))
    with Checkpoints(num_to_keep=2) as checkpoints:
        start = checkpoints.latest_step() or 0
        if start:
            state = checkpoints.restore(start, {"state": state})["state"]
        for step in range(start + 1, max_steps + 1):
            state, metrics = train_step(state, next(train_batches), key)
            if step % 100 == 0 or step == max_steps:
                val_loss = eval_step(state.params, next(val_batches)).mean()
                checkpoints.save(step, {"state": state}, metadata={})
                ray.train.report({"step": step, "loss": float(metrics["loss"]), "val_loss": float(val_loss)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", default="openwebtext", help="a hub dataset, or a file of text")
    parser.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"])
    parser.add_argument("--hardware", default="auto", help="such as gpu:2, gpu:4x8, tpu:v6e:4x4, cpu:2 or local")
    parser.add_argument("--max-steps", type=int, default=10_000)
    parser.add_argument("--model", type=json.loads, default={"dtype": "bfloat16", "dropout_rate": 0.1})
    arguments = parser.parse_args()

    # Step 1, the token files. If they exist, `prepare` returns at once. Step 2, random windows as rows x and y.
    storage = Path("runs").absolute()  # on several nodes, a folder that they share
    prepare(arguments.source, storage / "tokens", PrepareOptions(tokenizer=arguments.tokenizer))
    data = open_tokens(str(storage / "tokens"), tokenizer=arguments.tokenizer)
    model = {"vocab_size": data.vocab_size, "seq_len": 1024} | arguments.model
    windows = partial(token_windows, seq_len=model["seq_len"], num_rows=5_000_000, order="random")
    # Steps 5 and 6, the workers and the launch.
    result = JaxTrainer(
        train_loop,
        train_loop_config={"model": model, "batch_size": 32, "max_steps": arguments.max_steps},
        hardware=arguments.hardware,
        run_config=RunConfig("ray-tutorial", str(storage), failure_config=FailureConfig(max_failures=3)),
        datasets={"train": partial(windows, data.train), "val": partial(windows, data.val)},
    ).fit()
    print(result.metrics, result.checkpoint, result.path)
