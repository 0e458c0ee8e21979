"""The state that a start of a run begins with: that of its newest checkpoint, of another run, of weights, or random."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_gpt2 import (
    GPT2,
    TrainState,
    abstract_train_state,
    averaged_params,
    create_optimizer,
    root_digest,
    split_params,
    tensor_digests,
)
from pretrain._config import PretrainConfig
from pretrain._run.checkpoint_digests import DIGESTS, TENSORS
from pretrain._run.description import RUN, Origin, parse_description
from pretrain._training.best_validation import without_checkpoints
from pretrain._training.setup import Setup
from ray_jax_launch import Checkpoints

# Counters of the state in a checkpoint's metadata, beside the step.
COUNTERS = ("num_skipped", "num_skipped_in_a_row")


_NEW: dict[str, Any] = {"record": {}, "unrecorded": {}, "best": {}}


def first_step(checkpoints: Checkpoints, origin: Origin | None) -> int:
    """Return the step of the state that `load_state` returns."""
    saved = checkpoints.latest_step()
    if saved is None:
        return 0 if origin is None else origin.start_step
    return saved


def load_state(checkpoints: Checkpoints, origin: Origin | None, setup: Setup) -> tuple[TrainState, dict[str, Any]]:
    """Return the state of the newest checkpoint, or that which the run begins with, and its metadata. A collective.

    Args:
        checkpoints: the checkpoints of the run.
        origin: the checkpoint or the weights that a run without checkpoints starts from; None for random parameters,
            which follow from the seed.
        setup: the parts of the run.

    Returns:
        The state, and its metadata: `record`, of its step; `unrecorded`, of `StepMeter.wait_for_unrecorded`;
        `best`, of `BestValidation.to_json`.
    """
    step = checkpoints.latest_step()
    return start_state(origin, setup) if step is None else restore(checkpoints, step, setup.like)


def start_state(origin: Origin | None, setup: Setup) -> tuple[TrainState, dict[str, Any]]:
    """Return the state that a run begins with, and its metadata: see `load_state`. A collective."""
    if origin is None:
        return setup.new_state(), _NEW
    if origin.step is None:
        return setup.new_state(params=_published(origin.place, setup.config)), _NEW
    with Checkpoints(origin.checkpoints, read_only=True) as parent:
        if origin.weights_only:
            return setup.new_state(params=_weights(parent, origin.step, setup)), _NEW
        state, metadata = restore(parent, origin.step, setup.like)
    record = {name: value for name, value in metadata["record"].items() if name != "time_s"}
    # The best checkpoint of the parent is none of this run.
    return state, metadata | {"record": record, "best": without_checkpoints(metadata["best"])}


def restore(checkpoints: Checkpoints, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Read the state of a checkpoint, and its metadata. A collective."""
    found = checkpoints.restore_step(step, items(like))
    counters = {"step": step, **{name: found.metadata[name] for name in COUNTERS}}
    state = TrainState(
        **{name: jax.device_put(jnp.int32(value), like.step.sharding) for name, value in counters.items()},
        **found.items,
    )
    return state, found.metadata


def items(state: TrainState) -> dict[str, Any]:
    """Return the items of a checkpoint: the arrays of a state, by the names of its fields."""
    return {"params": state.params, "opt_state": state.opt_state}


def metadata_of(state: TrainState) -> dict[str, Any]:
    """Return what the metadata of a checkpoint tell about a state: its digests and counters. A collective."""
    return {
        DIGESTS: digests_of(items(state)),
        **{name: int(getattr(state, name)) for name in COUNTERS},
    }


def digests_of(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of the items of a checkpoint: see `DIGESTS`. A collective."""
    tensors = {name: tensor_digests(tree) for name, tree in items.items()}
    return {name: root_digest(of_item) for name, of_item in tensors.items()} | {TENSORS: tensors}


def _weights(checkpoints: Checkpoints, step: int, setup: Setup) -> Any:
    """Read the model of a checkpoint, whose windows may be longer than those of this run."""
    description = json.dumps(checkpoints.broadcast_metadata(step)[RUN])
    config = parse_description(description, f"the description in checkpoint {step}").config
    return model_of(checkpoints.restore_step(step, like_model(config, setup.mesh)).items)


def like_model(
    config: PretrainConfig, mesh: jax.sharding.Mesh | None = None, *, is_average: bool | None = None
) -> dict[str, Any]:
    """Return the shapes of the items of a checkpoint that hold its model: see `model_of`.

    Args:
        config: the configuration of the run.
        mesh: the mesh of the model.
        is_average: take the average of the parameters, not the last ones; None takes it if the run keeps one.
    """
    optimizer = create_optimizer(config.optimizer, config.train.max_steps)
    state = abstract_train_state(config.model, optimizer, mesh)
    if is_average is None:
        is_average = config.optimizer.average_decay > 0
    return {"opt_state": state.opt_state} if is_average else {"params": state.params}


def model_of(items: dict[str, Any]) -> Any:
    """Return the parameters of the model: their average if the run keeps one, otherwise the last ones."""
    return averaged_params(items["opt_state"]) if "opt_state" in items else items["params"]


def _published(name: str, config: PretrainConfig) -> Any:
    model = config.model
    return split_params(
        GPT2.from_pretrained(name, seq_len=model.seq_len, scan_layers=model.scan_layers, param_dtype=model.param_dtype)
    )
