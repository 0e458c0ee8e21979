"""Ray's PyTorch tutorial in JAX: GPT-2 124M on wikitext-103, tokenized while it trains, with epochs.

python examples/wikitext_tutorial.py --hardware gpu:4
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray.train

from owt_data import load_tokenizer, stream_text
from ray_jax_launch import launch, parse_hardware


def train_loop(config: dict[str, Any]) -> None:
    """Train on this worker's blocks, validate and save after each epoch."""
    import jax  # in the worker only: a driver that uses jax would lock the chips of a TPU

    import nnx_gpt2 as gpt2
    from ray_jax_launch import Checkpoints

    model = gpt2.GPT2Config(**config["model"])
    adamw = gpt2.OptimizerConfig(schedule="constant", learning_rate=3e-4, beta2=0.999, clip_norm=1.0)
    # A constant schedule does not depend on the number of steps.
    optimizer, mesh, key = gpt2.create_optimizer(adamw, max_steps=1), gpt2.make_mesh(), jax.random.key(0)
    state = gpt2.create_train_state(model, optimizer, key, mesh)
    train_step, eval_step = gpt2.make_train_step(model, optimizer, mesh), gpt2.make_eval_step(model, mesh)

    def batches(name: str) -> Iterator[jax.Array]:
        shard: Any = ray.train.get_dataset_shard(name)
        for batch in shard.iter_batches(batch_size=config["batch_size"], prefetch_batches=2, drop_last=True):
            yield gpt2.put_batch(batch["input_ids"], mesh)

    with Checkpoints(num_to_keep=2) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            state = checkpoints.restore(first, {"state": state})["state"]
        for epoch in range(first + 1, config["epochs"] + 1):
            began, losses, num_tokens = time.perf_counter(), [], 0
            for blocks in batches("train"):
                state, metrics = train_step(state, blocks, key)
                losses.append(metrics["loss"])
                num_tokens += blocks.size
            train_loss = sum(map(float, losses)) / len(losses)
            seconds = time.perf_counter() - began
            val_losses = [float(eval_step(state.params, blocks).mean()) for blocks in batches("validation")]
            checkpoints.save(epoch, {"state": state}, metadata={})
            report = {"epoch": epoch, "train_loss": train_loss, "val_loss": sum(val_losses) / len(val_losses)}
            ray.train.report(report | {"tokens": num_tokens, "tokens_per_s": num_tokens / seconds})


if __name__ == "__main__":
    wikitext = "Salesforce/wikitext:wikitext-103-raw-v1"
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", default=f"{wikitext}:train", help="a hub dataset, or a file of text")
    parser.add_argument("--validation", default=f"{wikitext}:validation")
    parser.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"])
    parser.add_argument("--hardware", default="gpu:1", help="such as gpu:4, gpu:4x8, tpu:v6e:4x4, cpu:2 or local")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="blocks per worker")
    parser.add_argument("--model", type=json.loads, default={"dropout_rate": 0.1}, help="fields of GPT2Config")
    arguments = parser.parse_args()
    model = {"vocab_size": load_tokenizer(arguments.tokenizer).n_vocab, "seq_len": 256} | arguments.model
    # End-of-text before each article's title, a line break after each row. Ray splits the blocks among the workers.
    blocks = partial(stream_text, block_size=256, tokenizer=arguments.tokenizer, row_end="\n", column="input_ids")
    result = launch(
        train_loop,
        {"model": model, "epochs": arguments.epochs, "batch_size": arguments.batch_size},
        hardware=parse_hardware(arguments.hardware),
        storage_path="runs",  # on several nodes, a folder that they share
        name="wikitext-tutorial",
        datasets={"train": partial(blocks, arguments.train), "validation": partial(blocks, arguments.validation)},
    )
    print(result.metrics, result.checkpoint, result.path)
