"""The model of a checkpoint of a run, on this process's own devices."""

import os
from dataclasses import dataclass

from nnx_gpt2 import GPT2, merge
from owt_data import Tokenizer, load_tokenizer
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, rejecting, shown
from pretrain._run.description import RunDescription
from pretrain._run.find import find_checkpoint, find_run, names_a_checkpoint
from pretrain._run.folder import RunFolder
from pretrain._surroundings.environment import start_jax
from pretrain._training.load_state import like_model, model_of
from pretrain._training.process import keep_programs
from ray_jax_launch import Checkpoints


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
    """The model with the parameters of the checkpoint, or with their average if the run keeps one."""

    @property
    def config(self) -> PretrainConfig:
        """The configuration of the run."""
        return self.description.config

    @property
    def tokenizer(self) -> Tokenizer:
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
    start_jax()
    keep_programs()
    like = like_model(description.config)
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore_latest(like) if chosen is None else checkpoints.restore_step(chosen.step, like)
    if restored is None:
        raise UsageError(f"{folder} has no checkpoint yet. Continue its training.")
    model = merge(description.config.model, model_of(restored.items))
    return TrainedModel(folder=folder, description=description, step=restored.step, model=model)
