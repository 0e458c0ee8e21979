"""A model out of a run's newest checkpoint, on this process's own devices."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_gpt2 import GPT2, GPT2Config, OptimizerConfig, abstract_train_state, create_optimizer, merge
from pretrain._errors import UsageError
from pretrain._run import RunFolder, check_layout, locate, read_description
from ray_jax_launch import Checkpoints, is_uri

DEFAULT_STORAGE = Path("runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model and where it comes from."""

    folder: RunFolder
    """Its run."""

    description: dict[str, Any]
    """The run's `config.json`."""

    step: int
    """Updates that the model has seen."""

    model: GPT2
    """The model."""


def load_trained(name: str) -> TrainedModel:
    """Load the newest checkpoint of a run.

    Args:
        name: the run's folder or URI, or its name in `runs`.

    Raises:
        UsageError: there is no such run, it has no checkpoint yet, or its `config.json` is damaged.
    """
    candidates = [locate(name)] if is_uri(name) else [locate(name), locate(str(DEFAULT_STORAGE / name))]
    for candidate in candidates:
        candidate.pull()
    folder = next((candidate for candidate in candidates if candidate.config.exists()), None)
    if folder is None:
        raise UsageError(f"expected the folder or URI of a run, or the name of one in {DEFAULT_STORAGE}, got {name}")
    description = read_description(folder)
    check_layout(description, folder)
    config = GPT2Config(**description["config"]["model"])
    optimizer = create_optimizer(
        OptimizerConfig(**description["config"]["optimizer"]), description["config"]["train"]["max_steps"]
    )
    like = abstract_train_state(config, optimizer).params
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore_latest({"params": like})
    if restored is None:
        raise UsageError(f"the run must have a checkpoint, got none in {folder}. Train it further.")
    model = merge(config, restored.items["params"])
    return TrainedModel(folder=folder, description=description, step=restored.step, model=model)
