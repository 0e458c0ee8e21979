"""The steps of a recorded run, computed again in this process."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import TrainState, put_batch
from pretrain._audit.run_tokens import RunTokens
from pretrain._config import MeshConfig
from pretrain._errors import UsageError
from pretrain._resolve.devices import check_shares
from pretrain._surroundings.environment import start_jax
from pretrain._training.load_state import restore
from pretrain._training.setup import set_up
from pretrain._training.train_batches import train_batches
from ray_jax_launch import Checkpoints, checkpoint_steps


class Rerun:
    """A run from a checkpoint on, on the devices of this process. No file of the run is written.

    Args:
        tokens: the run's tokens.
        step: the last step that is not computed again. The newest checkpoint up to it is the start, or else the random
            parameters of the run.

    Raises:
        UsageError: the run has no such checkpoint and does not start from random parameters, or the devices of this
            machine cannot share its batch.
        LaunchError: the model does not fit the memory.
    """

    def __init__(self, tokens: RunTokens, step: int) -> None:
        folder, config, data = tokens.folder, tokens.description.config, tokens.data
        start_jax(with_fixed_threads=config.train.num_shards is not None)
        if jax.device_count() % (config.mesh.fsdp * config.mesh.tensor):  # those of another machine
            config = dataclasses.replace(config, mesh=MeshConfig())
        check_shares(config, [jax.device_count() // config.mesh.tensor])
        self.setup = set_up(config, data)
        saved = [one for one in checkpoint_steps(folder.checkpoints) if one <= step]
        if not saved and tokens.description.origin is not None:
            raise UsageError(
                f"{folder} has no checkpoint before step {step + 1}, and does not start from random parameters. Give a "
                "later step."
            )
        self.checkpoint = saved[-1] if saved else None
        """The step of the checkpoint; None for random parameters."""
        self.step = self.checkpoint or 0
        """The last step that is computed."""
        self.state: TrainState
        """The state after this step."""
        if self.checkpoint is None:
            self.state = self.setup.new_state()
        else:
            with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
                self.state, _ = restore(checkpoints, self.checkpoint, self.setup.like)
        self.batches: Iterator[NDArray[np.integer]] = train_batches(config, data, self.step, uses_ray_data=False)
        """The batches of the steps that follow."""

    def compute(self, windows: NDArray[np.integer]) -> float:
        """Compute the next step, and return its loss; NaN if it is skipped.

        Args:
            windows: its batch, `uint16[B, seq_len + 1]`.
        """
        before = int(self.state.num_skipped)
        self.state, metrics = self.setup.train_step(self.state, put_batch(windows, self.setup.mesh), self.setup.key)
        self.step += 1
        return float(metrics["loss"]) if int(metrics["num_skipped"]) == before else float("nan")
