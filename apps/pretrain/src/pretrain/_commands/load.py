"""The model of a checkpoint of a run, on this process's own devices."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnx_gpt2 import GPT2, abstract_train_state, create_optimizer, merge
from owt_data import load_tokenizer
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, rejecting, shown
from pretrain._run.description import RunDescription
from pretrain._run.find import find_checkpoint, find_run, names_a_checkpoint
from pretrain._run.folder import RunFolder
from pretrain._surroundings.environment import start_jax
from ray_jax_launch import Checkpoints

if TYPE_CHECKING:
    import tiktoken


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A trained model and its run."""

    folder: RunFolder
    """The run's folder."""

    description: RunDescription
    """The run's configuration and data."""

    step: int
    """Step of the checkpoint."""

    model: GPT2
    """The model with the parameters of the checkpoint."""

    @property
    def config(self) -> PretrainConfig:
        """The configuration of the run."""
        return self.description.config

    @property
    def tokenizer(self) -> "tiktoken.Encoding":
        """The tokenizer of the run.

        Raises:
            DataError: its files are missing, and cannot be downloaded.
        """
        return load_tokenizer(self.description.data.tokenizer)


def load_trained(run: str | os.PathLike[str]) -> TrainedModel:
    """Load the model of a checkpoint of a run.

    Args:
        run: the run's folder or URI, or its name in `runs`, for its newest checkpoint; or `RUN@STEP`, or `RUN@best` for
            the lowest validation loss.

    Raises:
        UsageError: the run or the checkpoint does not exist, cannot be read, or has a damaged description.
        ValueError: the checkpoints are damaged; see `rejection` for the subclasses.
    """
    name = run.__fspath__() if isinstance(run, os.PathLike) else run
    if not isinstance(name, str):
        raise UsageError(f"run must be a text or a path, got {shown(run)}. Give the run's folder, URI or name.")
    with rejecting():
        chosen = find_checkpoint(name) if names_a_checkpoint(name) else None
        folder, description = find_run(name) if chosen is None else chosen[:2]
    config = description.config.model
    start_jax()
    optimizer = create_optimizer(description.config.optimizer, description.config.train.max_steps)
    like = {"params": abstract_train_state(config, optimizer).params}
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore_latest(like) if chosen is None else checkpoints.restore_step(chosen.step, like)
    if restored is None:
        raise UsageError(f"{folder} has no checkpoint yet. Continue its training.")
    model = merge(config, restored.items["params"])
    return TrainedModel(folder=folder, description=description, step=restored.step, model=model)
