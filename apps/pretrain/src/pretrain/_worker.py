"""What Ray's processes unpickle. Light to import: they do it before anything else, one after the other."""

from typing import Any

from ray.data import Dataset

from owt_data import TokenData, step_windows
from pretrain._config import PretrainConfig
from pretrain._run import RunFolder
from ray_jax_launch import intact_step, latest_step


def train_worker(arguments: dict[str, Any]) -> str:
    """Run the training loop, in a worker."""
    # Imported here, in the worker: on a TPU host a driver that touched jax would lock the chips.
    from pretrain._loop import run

    return run(**arguments)


def train_windows(config: PretrainConfig, data: TokenData, folder: RunFolder, rank: int, world_size: int) -> Dataset:
    """A worker's share of the steps that are still to be made. Called for rank 0 first, before any worker begins."""
    start = intact_step(folder.checkpoints, set_aside=True) if rank == 0 else latest_step(folder.checkpoints)
    return step_windows(
        data.train,
        seq_len=config.model.seq_len,
        global_batch_size=config.train.global_batch_size,
        rank=rank,
        world_size=world_size,
        start_step=start or 0,
        stop_step=config.train.max_steps,
        order=config.train.order,
        seed=config.seed,
    )
