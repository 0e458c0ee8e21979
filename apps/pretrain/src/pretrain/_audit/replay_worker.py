"""The replay of every worker. The driver imports this module, and must not import jax: it would lock a TPU."""

from typing import Any


def replay_worker(arguments: dict[str, Any]) -> Any:
    """Compute steps of a run again in a worker: see `pretrain._audit.recompute.recompute`."""
    from pretrain._audit.recompute import recompute
    from ray_jax_launch import log_to_driver

    log_to_driver("pretrain")
    return recompute(**arguments)
