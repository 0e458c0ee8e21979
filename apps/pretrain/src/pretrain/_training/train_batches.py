"""The training batches of one process, in the order of steps.

Ray takes a second to import. `sample` and `eval` import this module, and need no Ray.
"""

from collections.abc import Iterator

import jax
import numpy as np
from numpy.typing import NDArray

from owt_data import Batches, DataError, TokenData, read_steps
from pretrain._config import PretrainConfig
from ray_jax_launch import LaunchError


def train_batches(
    config: PretrainConfig, data: TokenData, start: int, *, uses_ray_data: bool
) -> Iterator[NDArray[np.integer]]:
    """Yield this process's rows of the batch of each step after `start`, as `uint16[rows, seq_len + 1]`.

    Args:
        config: the configuration.
        data: the tokens.
        start: the steps before.
        uses_ray_data: True if tasks of Ray Data read all but the first ones, False if a thread does.

    Raises:
        LaunchError: the tokens cannot be read, or the text of a stream cannot be tokenized.
        RuntimeError: the batch of a step is missing.
    """
    stop = config.train.max_steps
    if start == stop:
        return
    batches = batches_of(config, rank=jax.process_index(), world_size=jax.process_count())
    read = read_steps
    if uses_ray_data:
        from owt_data import read_steps_by_tasks as read
    try:
        steps = read(data.train, batches, start_step=start, stop_step=stop)
        for expected in range(start, stop):
            step, rows = next(steps, (None, None))
            if step != expected or rows is None:
                raise RuntimeError(f"the next batch must be that of step {expected}, got {step}. Report this error.")
            yield rows
    except DataError as error:
        raise LaunchError(str(error)) from error


def batches_of(config: PretrainConfig, *, rank: int = 0, world_size: int = 1) -> Batches:
    """Return the batches of a worker of a run."""
    assert config.train.order is not None, "it is resolved"
    return Batches(
        seq_len=config.model.seq_len,
        global_batch_size=config.train.global_batch_size,
        rank=rank,
        world_size=world_size,
        order=config.train.order,
        seed=config.seed,
    )


def check_readable(data: TokenData, seq_len: int) -> None:
    """Read one window of each split, to find missing files before anything is computed.

    Args:
        data: the tokens.
        seq_len: inputs per window.

    Raises:
        LaunchError: this node does not see the token files, or the text of a stream cannot be tokenized.
    """
    try:
        for tokens in (data.train, data.val):
            tokens.windows(np.zeros(1, np.int64), seq_len=seq_len, order="sequential-first", seed=0)
    except (FileNotFoundError, DataError) as error:
        cause = error if isinstance(error, FileNotFoundError) else error.__cause__
        if not isinstance(cause, FileNotFoundError) or cause.filename is None:
            raise LaunchError(str(error)) from error
        import ray

        raise LaunchError(
            f"data must be a folder that all nodes share, got {cause.filename}, which node "
            f"{ray.util.get_node_ip_address()} does not see. Give --data a folder on a network file system, s3:// or "
            "gs://, or --prepare.cache-path one for prepared text."
        ) from error
