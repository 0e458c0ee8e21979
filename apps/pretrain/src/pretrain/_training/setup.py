"""The parts of a run that one worker needs for its steps: mesh, step, validations and sampler."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import (
    TrainState,
    abstract_train_state,
    create_optimizer,
    create_train_state,
    has_bfloat16,
    make_mesh,
    put_batch,
)
from owt_data import DataError, TokenData, Tokenizer, load_tokenizer
from pretrain._config import PretrainConfig
from pretrain._data import validation_sources
from pretrain._training.configured_step import train_step_of
from pretrain._training.device_memory import check_memory
from pretrain._training.process import keep_freed_memory, keep_programs
from pretrain._training.sampling import Sampler
from pretrain._training.train_batches import check_readable
from pretrain._training.validation import Validation

# The key of the initial parameters. No step has this number, so that no other key is the same.
_INITIALIZATION = 2**32 - 1

_logger = logging.getLogger("pretrain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Mesh, step, validations and sampler of a run, all the same at each of its starts on the same devices."""

    config: PretrainConfig
    data: TokenData
    mesh: jax.sharding.Mesh
    device: Any
    """A device of this process."""
    tokenizer: Tokenizer | None
    """None if its files are missing: there are no samples then, and no bits per byte."""
    key: jax.Array
    """The key of dropout."""
    train_step: Any
    new_state: Callable[..., TrainState]
    """Creates the state of step 0, with random parameters or with `params`."""
    like: TrainState
    """Shapes, types and shardings of the state."""
    validation: Validation
    """On some validation tokens."""
    full_validation: Validation
    """On all validation tokens."""
    sampler: Sampler

    def first_windows(self, batches: Iterator[NDArray[np.integer]]) -> jax.Array:
        """Take the next batch, and return it on the devices once the step is compiled for it."""
        windows = put_batch(next(batches), self.mesh)
        # The compiler for GPUs times kernels, and nothing else may run on the GPU at that time.
        if self.device.platform != "gpu":
            self.train_step.lower(self.like, windows, self.key).compile()
        return windows


def set_up(config: PretrainConfig, data: TokenData) -> Setup:
    """Make what the steps of a run need. No step is compiled. A collective: every process must call it.

    Args:
        config: the resolved configuration.
        data: the tokens.

    Raises:
        LaunchError: the model does not fit the devices, or this node does not see the tokens.
        DataError: documents are masked, and the tokenizer cannot be loaded.
    """
    train = config.train
    keep_programs()
    keep_freed_memory()
    mesh = make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    check_memory(config, mesh)
    device = mesh.local_devices[0]
    warn_of_bfloat16(config, device)
    optimizer = create_optimizer(config.optimizer, train.max_steps)
    tokenizer = None
    with contextlib.suppress(DataError):
        tokenizer = load_tokenizer(data.tokenizer)  # it stays in memory: the network and the cache may fail later
    end_of_text = load_tokenizer(data.tokenizer).eot_token if train.mask_documents else None
    check_readable(data, config.model.seq_len)
    validation, full_validation = (
        Validation(
            config.model,
            data.val,
            num_tokens=num_tokens,
            batch_size=train.global_batch_size,
            fill_steps=True,
            mesh=mesh,
            num_shards=train.num_shards,
            end_of_text=end_of_text,
            sources=validation_sources(config.data, data),
        )
        for num_tokens in (train.eval_tokens, None)
    )
    key = jax.random.key(config.seed)
    return Setup(
        config=config,
        data=data,
        mesh=mesh,
        device=device,
        tokenizer=tokenizer,
        key=key,
        train_step=train_step_of(config, mesh, end_of_text),
        new_state=partial(create_train_state, config.model, optimizer, jax.random.fold_in(key, _INITIALIZATION), mesh),
        like=abstract_train_state(config.model, optimizer, mesh),
        validation=validation,
        full_validation=full_validation,
        sampler=Sampler(config, tokenizer, mesh),
    )


def warn_of_bfloat16(config: PretrainConfig, device: Any) -> None:
    """Log a warning on rank 0 if the configuration computes in bfloat16 and the device has no units for it.

    Args:
        config: the configuration.
        device: a device of jax.
    """
    if config.model.dtype == "bfloat16" and not has_bfloat16(device) and jax.process_index() == 0:
        _logger.warning(
            "%s computes bfloat16 slowly (compute capability %s): --model.dtype float32 is faster, with another --name",
            device.device_kind,
            device.compute_capability,
        )
