"""The command `eval`: a trained model's loss over all of the validation tokens."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track

from nnx_gpt2 import make_eval_step
from owt_data import TokenData, num_windows, open_tokens, window_starts
from pretrain._errors import UsageError
from pretrain._trained import load_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What `eval` found."""

    step: int
    """Updates that the model has seen."""

    val_loss: float
    """Mean loss in nats per token."""

    num_tokens: int
    """Tokens predicted."""


def evaluate(run: str, *, data: str | None, batch_size: int, console: Console) -> Evaluation:
    """Evaluate a run's newest checkpoint over every whole window of the validation tokens, once.

    Args:
        run: the run's folder or name.
        data: token files to evaluate on instead of the run's own.
        batch_size: windows per step.
        console: shows the progress.

    Raises:
        ValueError: a subclass says what is wrong.
    """
    if batch_size < 1:
        raise UsageError(f"expected a batch size of at least 1, got {batch_size}")
    trained = load_trained(run)
    stored = trained.description["data"]
    path = data or _data_path(stored["train"], stored["val"])
    tokens: TokenData = open_tokens(path, tokenizer=stored["tokenizer"])
    if data is None and tokens.fingerprint != stored["fingerprint"]:
        raise UsageError(f"expected the tokens that the run was trained on in {path}, which have changed since")
    if tokens.vocab_size > trained.model.config.vocab_size:
        raise UsageError(
            f"expected tokens of the tokenizer {stored['tokenizer']}, got those of {tokens.tokenizer}: name other data"
        )
    seq_len = trained.model.config.seq_len
    count = num_windows(len(tokens.val), seq_len)
    if count == 0:
        raise UsageError(f"expected at least {seq_len + 1} validation tokens in {path}, got {len(tokens.val)}")
    eval_step = make_eval_step(trained.model.config)
    params = nnx.to_pure_dict(nnx.state(trained.model))
    losses = []
    for first in track(
        range(0, count, batch_size), description="evaluating", console=console, disable=not console.is_terminal
    ):
        indices = np.arange(first, first + batch_size) % count
        starts = window_starts(indices, order="sequential", seed=0, num_tokens=len(tokens.val), seq_len=seq_len)
        losses.append(np.asarray(eval_step(params, jax.device_put(tokens.val.read_windows(starts, seq_len)))))
    mean = np.concatenate(losses)[:count].mean(dtype=np.float64)
    return Evaluation(step=trained.step, val_loss=float(mean), num_tokens=count * seq_len)


def _data_path(train: str, val: str) -> str:
    """What `open_tokens` was given: a folder, or one file that both parts are of."""
    return train if train == val else str(Path(train).parent)
