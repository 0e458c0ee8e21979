"""The training of every worker. The driver imports this module too: on a TPU host, its jax would lock the chips."""

from typing import Any


def train_worker(arguments: dict[str, Any]) -> str:
    """Run the training loop in a worker."""
    from pretrain._training.loop import run
    from ray_jax_launch import log_to_driver

    log_to_driver("pretrain")
    return run(**arguments)
