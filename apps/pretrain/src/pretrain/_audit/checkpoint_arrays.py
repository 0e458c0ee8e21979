"""The arrays of a checkpoint, and the elements that differ between two checkpoints."""

import math
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from nnx_gpt2 import abstract_train_state, create_optimizer
from pretrain._audit.recorded_run import RecordedCheckpoint
from pretrain._audit.run_difference import ArrayDifference
from pretrain._run.folder import RunFolder
from pretrain._training.load_state import items
from ray_jax_launch import Checkpoints


def read_arrays(folder: RunFolder, checkpoint: RecordedCheckpoint, names: Collection[str]) -> dict[str, np.ndarray]:
    """Read arrays of a checkpoint, with all arrays of their items, into host memory.

    Args:
        folder: the run's folder.
        checkpoint: the checkpoint.
        names: names as in `RecordedCheckpoint.tensors`.

    Raises:
        DeletedCheckpointError: the run deleted the checkpoint.
        DamagedCheckpointError: it is damaged.
        LaunchError: the storage cannot be read.
    """
    config = checkpoint.description.config
    state = abstract_train_state(config.model, create_optimizer(config.optimizer, config.train.max_steps))
    wanted = {name.partition(".")[0] for name in names}
    like = {item: tree for item, tree in items(state).items() if item in wanted}
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore_step(checkpoint.step, like).items
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in names:
            arrays[name] = np.asarray(leaf)
    return arrays


def differing_elements(a: np.ndarray, b: np.ndarray) -> ArrayDifference:
    """Compare two arrays of one shape and type, bit for bit.

    >>> differing_elements(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.5, 1.0]))
    ArrayDifference(num_elements=2, size=3, largest=2.0)
    """
    bits = f"u{a.dtype.itemsize}"
    differs = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    largest = float(np.abs(_wide(a) - _wide(b)).max(initial=0.0, where=differs.reshape(a.shape)))
    return ArrayDifference(
        num_elements=int(differs.sum()), size=a.size, largest=largest if math.isfinite(largest) else None
    )


def _wide(x: Any) -> np.ndarray:
    return x.astype(np.float64)
