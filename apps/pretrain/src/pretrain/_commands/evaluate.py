"""The command `eval`: a trained model's loss over all of the validation tokens."""

from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from nnx_gpt2 import split_params
from owt_data import load_tokenizer, open_tokens
from pretrain._commands.load import load_trained
from pretrain._errors import UsageError
from pretrain._training.validation import Validation


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
    """Evaluate a run's newest checkpoint over every complete window of the validation tokens, once.

    Attention stays within documents if the run was trained so.

    Args:
        run: the run's folder or name.
        data: token files to evaluate on instead of the run's own.
        batch_size: windows per step, or fewer where these do not fit the memory.
        console: shows the progress.

    Raises:
        ValueError: a subclass says what is wrong.
    """
    if batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, got {batch_size}. Give another.")
    trained = load_trained(run)
    stored = trained.description.data
    path = data or stored.tokens
    tokens = open_tokens(path, tokenizer=stored.tokenizer)
    if data is None and tokens.fingerprint != stored.fingerprint:
        raise UsageError(f"{path} must hold the tokens of the run, got others. Restore them, or name --data.")
    if tokens.tokenizer != stored.tokenizer:
        raise UsageError(
            f"--data must be tokens of the run's tokenizer, {stored.tokenizer}, got those of {tokens.tokenizer}. Name "
            "other data."
        )
    seq_len = trained.model.config.seq_len
    count = tokens.val.num_windows(seq_len)
    if count == 0:
        raise UsageError(
            f"{path} must hold at least {seq_len + 1} validation tokens, got {len(tokens.val)}. Name other --data."
        )
    is_masked = trained.description.config.train.mask_documents
    validation = Validation(
        trained.model.config,
        tokens.val,
        num_windows=count,
        batch_size=batch_size,
        end_of_text=load_tokenizer(stored.tokenizer).eot_token if is_masked else None,
    )
    params = split_params(trained.model)
    validation.fit(params)
    loss = validation.loss(
        params,
        lambda steps: track(steps, description="evaluating", console=console, disable=not console.is_terminal),
    )
    return Evaluation(step=trained.step, val_loss=loss, num_tokens=count * seq_len)
