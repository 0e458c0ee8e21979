"""The command `eval`: the loss of a trained model on all of the validation tokens."""

import contextlib
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from nnx_gpt2 import split_params
from owt_data import DataError, load_tokenizer, open_tokens
from pretrain._commands.load import load_trained
from pretrain._config import MAX_COUNT
from pretrain._data_names import parse_data, token_files
from pretrain._errors import UsageError
from pretrain._run.metrics import rounded
from pretrain._training.validation import Validation


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of `eval`."""

    step: int
    """Step of the checkpoint."""

    val_loss: float
    """Mean loss in nats per token."""

    val_bits_per_byte: float | None
    """The same in bits per byte of text; None if the tokenizer's files are missing."""

    num_tokens: int
    """Number of predicted tokens."""


def evaluate(run: str, *, data: str | None, batch_size: int, console: Console) -> Evaluation:
    """Evaluate a run's newest checkpoint on all validation tokens. Each token except the first is predicted once.

    The loss is that of the end of a finished run (`full_val_loss`), to its 6 significant digits. Attention is
    restricted to documents if the run was trained with `mask_documents`.

    Args:
        run: the run's folder, URI or name.
        data: token files to evaluate on, in a form of `parse_data`; None takes the run's token files.
        batch_size: windows per step. Fewer are used if a step does not fit the memory.
        console: shows the progress.

    Raises:
        ValueError: an argument or the run cannot be used; see `rejection` for the subclasses.
    """
    if not 1 <= batch_size <= MAX_COUNT:
        raise UsageError(f"--batch-size must be from 1 to {MAX_COUNT}, got {batch_size}.")
    trained = load_trained(run)
    stored = trained.description.data
    path = stored.tokens if data is None else token_files(parse_data(data))
    tokens = open_tokens(path, tokenizer=stored.tokenizer)
    if data is None and stored.fingerprint not in (tokens.fingerprint, tokens.source_fingerprint):
        raise UsageError(f"{path} must hold the tokens of the run, got others. Restore the files, or give --data.")
    if tokens.tokenizer != stored.tokenizer:
        raise UsageError(
            f"--data must be tokens of the run's tokenizer, {stored.tokenizer}, got tokens of {tokens.tokenizer}. Give "
            "other data."
        )
    seq_len = trained.model.config.seq_len
    if tokens.val.num_windows(seq_len) == 0:
        raise UsageError(
            f"{path} must hold at least {seq_len + 1} validation tokens, got {len(tokens.val)}. Give other --data."
        )
    is_masked = trained.description.config.train.mask_documents
    validation = Validation(
        trained.model.config,
        tokens.val,
        num_tokens=None,
        batch_size=batch_size,
        end_of_text=load_tokenizer(stored.tokenizer).eot_token if is_masked else None,
    )
    params = split_params(trained.model)
    validation.fit(params)
    loss = validation.loss(
        params,
        lambda steps: track(steps, description="evaluating", console=console, disable=not console.is_terminal),
    )
    bits = None
    with contextlib.suppress(DataError):  # the files of the tokenizer are missing
        bits = validation.bits_per_byte(loss, trained.tokenizer)
    found = rounded({"val_loss": loss, "val_bits_per_byte": bits})
    return Evaluation(step=trained.step, num_tokens=validation.num_tokens, **found)
