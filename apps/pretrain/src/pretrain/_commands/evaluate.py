"""The command `eval`: the loss of a trained model on all tokens of a split."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from nnx_gpt2 import split_params
from owt_data import DataError, MixtureWeight, load_tokenizer
from pretrain._commands.evaluation_data import Split, tokens_of, tokens_of_run
from pretrain._commands.load import load_trained
from pretrain._config import MAX_COUNT
from pretrain._errors import UsageError
from pretrain._formats import loss as loss_text
from pretrain._run.metrics import rounded
from pretrain._screen.printing import print_table
from pretrain._training.validation import Validation


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of `eval`."""

    step: int
    """Step of the checkpoint."""

    data: str | list[str] | dict[str, MixtureWeight]
    """The data as it was given, or the names of the run's token files."""

    split: Split
    """The part of the data: its validation tokens, or all."""

    val_loss: float
    """Mean loss in nats per token."""

    val_bits_per_byte: float | None
    """The same in bits per byte of text; None if the tokenizer's files are missing."""

    num_tokens: int
    """Number of predicted tokens."""

    source_losses: dict[str, float]
    """Mean loss of each name of a mixture, by its label; empty for other data."""


def evaluate(
    run: str,
    *,
    data: str | None,
    batch_size: int,
    console: Console,
    split: Split | None = None,
    text_column: str | None = None,
) -> Evaluation:
    """Evaluate a run's newest checkpoint on all tokens of a split. Each token except the first is predicted once.

    The loss is that of the end of a finished run (`full_val_loss`), to its 6 significant digits. Attention is
    restricted to documents if the run was trained with `mask_documents`.

    Args:
        run: the run's folder, URI or name.
        data: token files or text to evaluate on, in a form of `parse_data`; None takes the run's token files.
        batch_size: windows per step. Fewer are used if a step does not fit the memory.
        console: shows the progress.
        split: the part of the data; None takes the validation tokens, or all of data that has none of its own.
        text_column: column with the text of `data`; None takes that of the run.

    Raises:
        ValueError: an argument or the run cannot be used; see `rejection` for the subclasses.
    """
    if not 1 <= batch_size <= MAX_COUNT:
        raise UsageError(f"--batch-size must be from 1 to {MAX_COUNT}, got {batch_size}.")
    trained = load_trained(run)
    stored = trained.description.data
    if data is None:
        found = tokens_of_run(stored, split or "val", trained.config.data)
    else:
        config = dataclasses.replace(trained.config.prepare, tokenizer=stored.tokenizer)
        if text_column is not None:
            config = dataclasses.replace(config, text_column=text_column)
        found = tokens_of(data, split, config, console)
    tokens, seq_len = found.tokens, trained.model.config.seq_len
    if tokens.num_windows(seq_len) == 0:
        kind = "validation tokens" if found.split == "val" else "tokens"
        raise UsageError(
            f"{data or stored.tokens} must hold at least {seq_len + 1} {kind}, got {len(tokens)}. Give other --data."
        )
    is_masked = trained.description.config.train.mask_documents
    validation = Validation(
        trained.model.config,
        tokens,
        num_tokens=None,
        batch_size=batch_size,
        end_of_text=load_tokenizer(stored.tokenizer).eot_token if is_masked else None,
        sources=found.sources,
    )
    params = split_params(trained.model)
    validation.fit(params)
    loss, of_windows = validation.evaluate(
        params,
        lambda steps: track(steps, description="evaluating", console=console, disable=not console.is_terminal),
    )
    bits = None
    with contextlib.suppress(DataError):  # the files of the tokenizer are missing
        bits = validation.bits_per_byte(loss, trained.tokenizer)
    losses = rounded({"val_loss": loss, "val_bits_per_byte": bits})
    source_losses = rounded(of_windows.of_sources)
    show_source_losses(source_losses, losses["val_loss"], console)
    return Evaluation(
        step=trained.step,
        data=data or stored.tokens,
        split=found.split,
        num_tokens=validation.num_tokens,
        source_losses=source_losses,
        **losses,
    )


def show_source_losses(of_sources: Mapping[str, float], of_all: float, console: Console) -> None:
    """Print a table of the loss of each name of a mixture, and of all; nothing for other data."""
    if not of_sources:
        return
    table = Table("data", "val loss", box=None, pad_edge=False)
    for name, value in {**of_sources, "all": of_all}.items():
        table.add_row(name, loss_text(value))
    print_table(console, table)
