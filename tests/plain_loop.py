"""Plain training loop in this process, without Ray, checkpoints and restarts: the reference for runs."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console

from nnx_gpt2 import GPT2Config, create_optimizer, create_train_state, make_mesh, make_train_step, put_batch
from pretrain import PretrainConfig
from pretrain._cli import parse_command
from pretrain._data import load_tokens
from pretrain._run.metrics import rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRun:
    """Result of a plain loop."""

    config: PretrainConfig
    model: GPT2Config
    data: Any
    """The tokens, as the application loads them."""
    params: Any
    """The parameters after the last step."""
    records: list[dict[str, Any]]
    """`step`, `loss` and `grad_norm_max` of every step, as a run that records each step writes them."""


def run_plain_loop(arguments: list[str]) -> PlainRun:
    """Train with the application's arguments on one device, on the windows that a run would read.

    The caller sets XDG_CACHE_HOME, the cache of token files.
    """
    config = parse_command(arguments)
    assert isinstance(config, PretrainConfig)
    data = load_tokens(config, Console(quiet=True))
    model = dataclasses.replace(config.model, vocab_size=data.vocab_size)
    max_steps, batch_size = config.train.max_steps, config.train.global_batch_size
    optimizer, mesh, key = create_optimizer(config.optimizer, max_steps), make_mesh(), jax.random.key(config.seed)
    state = create_train_state(model, optimizer, jax.random.fold_in(key, 2**32 - 1), mesh)
    end_of_text = data.vocab_size - 1 if config.train.mask_documents else None
    train_step = make_train_step(model, optimizer, mesh, end_of_text=end_of_text)
    order, records = config.train.order or "shuffle", []
    for step in range(max_steps):
        ids = np.arange(batch_size) + step * batch_size
        windows = data.train.windows(ids, seq_len=model.seq_len, order=order, seed=config.seed)
        state, metrics = train_step(state, put_batch(windows, mesh), key)
        found = {"step": step + 1, "loss": float(metrics["loss"]), "grad_norm_max": float(metrics["grad_norm"])}
        records.append(rounded(found))
    return PlainRun(config=config, model=model, data=data, params=state.params, records=records)
