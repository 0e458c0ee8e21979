"""A model on this process's own devices: of a checkpoint of a run, of an exported folder, or of published weights."""

import os
from dataclasses import dataclass
from typing import Literal

from nnx_gpt2 import GPT2, merge
from owt_data import Tokenizer, load_tokenizer
from pretrain._config import PretrainConfig
from pretrain._errors import UsageError, rejecting, short, shown
from pretrain._run.description import RunDescription
from pretrain._run.find import find_checkpoint, find_run, find_unless_published, names_a_checkpoint
from pretrain._run.folder import RunFolder
from pretrain._run.published_tokenizer import published_tokenizer
from pretrain._surroundings.environment import start_jax
from pretrain._training.load_state import like_model, model_of
from pretrain._training.process import keep_programs
from ray_jax_launch import Checkpoints

WeightsKind = Literal["average", "last"]
"""The moving average of the parameters, which a run with `optimizer.average_decay` keeps, or those of the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A trained model, and its run if it is that of one."""

    name: str
    """The name that it was loaded by."""

    run: tuple[RunFolder, RunDescription] | None
    """The folder and the description of the run; None for an exported folder and for published weights."""

    step: int | None
    """Step of the checkpoint; None without a run."""

    model: GPT2
    """The model with the parameters of the checkpoint, or with their average."""

    is_average: bool
    """True if the parameters are the average."""

    tokenizer_name: str | None
    """Name of the tokenizer; None if the files do not tell."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder.

        Raises:
            UsageError: the model is not that of a run.
        """
        return self._of_run()[0]

    @property
    def description(self) -> RunDescription:
        """The run's configuration and data.

        Raises:
            UsageError: the model is not that of a run.
        """
        return self._of_run()[1]

    @property
    def config(self) -> PretrainConfig:
        """The configuration of the run.

        Raises:
            UsageError: the model is not that of a run.
        """
        return self.description.config

    def _of_run(self) -> tuple[RunFolder, RunDescription]:
        if self.run is None:
            raise UsageError(f"{self.name} must be a run, got weights, which have no configuration. Name a run.")
        return self.run

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            DataError: its files are missing, and cannot be downloaded.
            UsageError: the files of the model do not tell the tokenizer.
        """
        if self.tokenizer_name is None:
            raise UsageError(
                f"the tokenizer of {short(self.name)} must be gpt2 or bytes, with the end of text 50256 or 256, got "
                "another and no tokenizer.json with ids of the model. Export the model of a run, or take a model of "
                "gpt2."
            )
        return load_tokenizer(self.tokenizer_name)


def load_trained(run: str | os.PathLike[str], *, weights: WeightsKind | None = None) -> TrainedModel:
    """Load the model of a checkpoint of a run, of an exported folder, or of published weights.

    Args:
        run: the run's folder or URI, or its name in `runs`, for its newest checkpoint; or `RUN@STEP`, or `RUN@best` for
            the lowest validation loss; or a folder of `export`; or published weights, such as `gpt2-medium` or
            OWNER/NAME, which are downloaded once.
        weights: the parameters of a run; None is their average if the run keeps one, otherwise those of the last step.

    Raises:
        UsageError: the run or the checkpoint does not exist, cannot be read, or has a damaged description; or the run
            keeps no average; or the weights are not those of a GPT-2, or cannot be downloaded.
        ValueError: the checkpoints are damaged; see `rejection` for the subclasses.
    """
    name = run.__fspath__() if isinstance(run, os.PathLike) else run
    if not isinstance(name, str):
        raise UsageError(f"run must be a text or a path, got {shown(run)}. Give the run's folder, URI or name.")
    with rejecting():
        found = find_unless_published(
            name, lambda name: (find_checkpoint if names_a_checkpoint(name) else find_run)(name)
        )
    if found is None:
        if weights == "average":
            raise UsageError(f"--weights must be last for {short(name)}, which keeps no average, got average.")
        start_jax()
        keep_programs()
        return _published(name)
    folder, description, *step = found
    has_average = description.config.optimizer.average_decay > 0
    if weights == "average" and not has_average:
        raise UsageError(f"--weights must be last for {folder}, which keeps no average, got average.")
    is_average = has_average and weights != "last"
    start_jax()
    keep_programs()
    like = like_model(description.config, is_average=is_average)
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore_step(step[0], like) if step else checkpoints.restore_latest(like)
    if restored is None:
        raise UsageError(f"{folder} has no checkpoint yet. Continue its training.")
    return TrainedModel(
        name=name,
        run=(folder, description),
        step=restored.step,
        model=merge(description.config.model, model_of(restored.items)),
        is_average=is_average,
        tokenizer_name=description.data.tokenizer,
    )


def _published(name: str) -> TrainedModel:
    """Load weights in Hugging Face's format.

    Raises:
        UsageError: they are not those of a GPT-2, or cannot be downloaded.
    """
    try:
        model = GPT2.from_pretrained(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return TrainedModel(
        name=name,
        run=None,
        step=None,
        model=model,
        is_average=False,
        tokenizer_name=published_tokenizer(name, model.config.vocab_size),
    )
