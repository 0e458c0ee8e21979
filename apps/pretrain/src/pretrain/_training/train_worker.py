"""The training of every worker. The driver imports this module, and must not import jax: it would lock a TPU."""

from typing import Any


def train_worker(arguments: dict[str, Any]) -> str:
    """Run the training loop in a worker."""
    from pretrain._training.loop import run
    from ray_jax_launch import log_to_driver

    log_to_driver("pretrain")
    return run(**arguments)
