"""The function that Ray's workers unpickle. Light to import: the driver imports it too."""

from typing import Any


def train_worker(arguments: dict[str, Any]) -> str:
    """Run the training loop in a worker."""
    # On a TPU host, a driver that imports jax would lock the chips.
    from pretrain._training.loop import run
    from ray_jax_launch import log_to_driver

    log_to_driver("pretrain")
    return run(**arguments)
