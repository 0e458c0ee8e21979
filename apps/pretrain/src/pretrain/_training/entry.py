"""The function that Ray's workers unpickle. Light to import, as they do it before anything else."""

from typing import Any


def train_worker(arguments: dict[str, Any]) -> str:
    """Run the training loop, in a worker."""
    # Imported here, in the worker: on a TPU host a driver that touched jax would lock the chips.
    from pretrain._training.loop import run
    from ray_jax_launch import log_to_driver

    log_to_driver("pretrain")
    return run(**arguments)
