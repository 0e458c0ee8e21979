"""The train step of a configuration. `plan` needs it too, without Ray."""

from typing import Any

import jax

from nnx_gpt2 import TreeTrainStep, create_optimizer, make_train_step
from pretrain._config import PretrainConfig


def train_step_of(config: PretrainConfig, mesh: jax.sharding.Mesh, end_of_text: int | None) -> Any:
    """Return the train step of a configuration.

    Args:
        config: the resolved configuration.
        mesh: the devices.
        end_of_text: the last token of each document, to restrict attention to a document; None does not.
    """
    train = config.train
    optimizer = create_optimizer(config.optimizer, train.max_steps)
    options: dict[str, Any] = {"grad_accum_steps": train.grad_accum_steps, "end_of_text": end_of_text}
    if train.num_shards is None:
        return make_train_step(config.model, optimizer, mesh, **options)
    return TreeTrainStep(config.model, optimizer, mesh, num_shards=train.num_shards, **options)
