"""The command `eval`: the loss of a trained model on all tokens of a split, or its scores on tasks of lm-eval."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from nnx_gpt2 import split_params
from owt_data import DataError, MixtureWeight
from pretrain._commands.evaluation_data import Split, tokens_of, tokens_of_run
from pretrain._commands.load import load_trained
from pretrain._config import MAX_COUNT, PrepareConfig
from pretrain._errors import UsageError, short
from pretrain._formats import loss as loss_text
from pretrain._judge.task_table import show_scores
from pretrain._judge.tasks import TaskScores, evaluate_tasks
from pretrain._run.metrics import rounded
from pretrain._screen.printing import print_table
from pretrain._task_names import check_installed, parse_tasks
from pretrain._training.validation import Validation

# Its exponential is the largest that a float holds.
_MOST_LOSS = 709.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of `eval`."""

    step: int | None
    """Step of the checkpoint; None for an exported folder and for published weights."""

    data: str | list[str] | dict[str, MixtureWeight]
    """The data as it was given, or the names of the run's token files."""

    split: Split
    """The part of the data: its validation tokens, or all."""

    val_loss: float
    """Mean loss in nats per token."""

    val_perplexity: float
    """Its exponential."""

    val_bits_per_byte: float | None
    """The same in bits per byte of text; None if the tokenizer's files are missing."""

    num_tokens: int
    """Number of predicted tokens."""

    source_losses: dict[str, float]
    """Mean loss of each name of a mixture, by its label; empty for other data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEvaluation:
    """The result of `eval --tasks`."""

    model: str
    """The run, the folder or the name of the model."""

    step: int | None
    """Step of the checkpoint; None for an exported folder and for published weights."""

    tasks: list[TaskScores]
    """The scores."""

    lm_eval: str
    """Version of lm-eval."""


def show_evaluation(  # noqa: PLR0913 - the arguments of an evaluation are independent
    run: str,
    *,
    data: str | None = None,
    split: Split | None = None,
    text_column: str | None = None,
    batch_size: int,
    tasks: tuple[str, ...] = (),
    limit: int | None = None,
    as_json: bool = False,
    console: Console,
) -> None:
    """Print the loss of a model on tokens as JSON, or its scores on tasks as a table or as JSON.

    Args:
        run: the model, as for `load_trained`.
        data: see `evaluate`.
        split: see `evaluate`.
        text_column: see `evaluate`.
        batch_size: windows that are computed at once.
        tasks: tasks of lm-eval, as for `parse_tasks`; none evaluates the loss.
        limit: number of documents of a task.
        as_json: print the scores as JSON.
        console: shows the result. The progress goes to standard error.

    Raises:
        ValueError: an argument or the model cannot be used; see `rejection` for the subclasses.
    """
    progress = Console(stderr=True, emoji=False)
    found: Any
    if tasks:
        if data is not None or split is not None or text_column is not None:
            raise UsageError(
                "--tasks must be given without --data, --split and --text-column: a task has its own data."
            )
        found = evaluate_on_tasks(run, tasks, limit=limit, batch_size=batch_size, console=progress)
        if not as_json:
            show_scores(found.tasks, console=console)
            return
    else:
        if limit is not None:
            raise UsageError(f"--limit must be given with --tasks, got {limit} alone. Leave it out.")
        found = evaluate(run, data=data, split=split, text_column=text_column, batch_size=batch_size, console=progress)
    console.file.write(json.dumps(dataclasses.asdict(found)) + "\n")


def evaluate_on_tasks(
    run: str, tasks: tuple[str, ...], *, limit: int | None, batch_size: int, console: Console
) -> TaskEvaluation:
    """Score a model on tasks of lm-eval.

    Args:
        run: the model, as for `load_trained`.
        tasks: the tasks, as for `parse_tasks`.
        limit: number of documents of a task; None takes all.
        batch_size: windows of the model's context that are computed at once.
        console: shows the progress.

    Raises:
        ValueError: an argument or the model cannot be used; see `rejection` for the subclasses.
    """
    _check_batch_size(batch_size)
    if limit is not None and not 1 <= limit <= MAX_COUNT:
        raise UsageError(f"--limit must be from 1 to {MAX_COUNT}, got {limit}.")
    requested = parse_tasks(tasks, limit)
    check_installed()
    trained = load_trained(run)
    scores = evaluate_tasks(trained.model, trained.tokenizer, requested, batch_size=batch_size, console=console)
    return TaskEvaluation(model=run, step=trained.step, tasks=scores, lm_eval=version("lm_eval"))


def _check_batch_size(batch_size: int) -> None:
    if not 1 <= batch_size <= MAX_COUNT:
        raise UsageError(f"--batch-size must be from 1 to {MAX_COUNT}, got {batch_size}.")


def evaluate(
    run: str,
    *,
    data: str | None,
    batch_size: int,
    console: Console,
    split: Split | None = None,
    text_column: str | None = None,
) -> Evaluation:
    """Evaluate a model on all tokens of a split. Each token except the first is predicted once.

    The loss is that of the end of a finished run (`full_val_loss`), to its 6 significant digits. Attention is
    restricted to documents if the run was trained with `mask_documents`.

    Args:
        run: the model, as for `load_trained`. One that is not that of a run needs `data`.
        data: token files or text to evaluate on, in a form of `parse_data`; None takes the run's token files.
        batch_size: windows per step. Fewer are used if a step does not fit the memory.
        console: shows the progress.
        split: the part of the data; None takes the validation tokens, or all of data that has none of its own.
        text_column: column with the text of `data`; None takes that of the run.

    Raises:
        ValueError: an argument or the run cannot be used; see `rejection` for the subclasses.
    """
    _check_batch_size(batch_size)
    trained = load_trained(run)
    tokenizer = trained.tokenizer_name
    if data is None:
        if trained.run is None:
            raise UsageError(f"--data must be given for {short(run)}, which is not a run, got none.")
        stored = trained.description.data
        data_name, found = stored.tokens, tokens_of_run(stored, split or "val", trained.config.data)
    else:
        config = PrepareConfig() if trained.run is None else trained.config.prepare
        config = dataclasses.replace(config, tokenizer=tokenizer or trained.tokenizer.name)
        if text_column is not None:
            config = dataclasses.replace(config, text_column=text_column)
        data_name, found = data, tokens_of(data, split, config, console)
    tokens, seq_len = found.tokens, trained.model.config.seq_len
    if tokens.num_windows(seq_len) == 0:
        kind = "validation tokens" if found.split == "val" else "tokens"
        raise UsageError(f"{data_name} must hold at least {seq_len + 1} {kind}, got {len(tokens)}. Give other --data.")
    is_masked = trained.run is not None and trained.config.train.mask_documents
    validation = Validation(
        trained.model.config,
        tokens,
        num_tokens=None,
        batch_size=batch_size,
        end_of_text=trained.tokenizer.eot_token if is_masked else None,
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
    perplexity = math.exp(min(loss, _MOST_LOSS))
    losses = rounded({"val_loss": loss, "val_perplexity": perplexity, "val_bits_per_byte": bits})
    source_losses = rounded(of_windows.of_sources)
    show_source_losses(source_losses, losses["val_loss"], console)
    return Evaluation(
        step=trained.step,
        data=data_name,
        split=found.split,
        num_tokens=validation.num_tokens,
        source_losses=source_losses,
        **losses,
    )


def show_source_losses(of_sources: Mapping[str, float], of_all: float, console: Console) -> None:
    """Print a table of the loss of each name of a mixture, and of all; nothing for other data."""
    if not of_sources or not console.is_terminal:
        return
    table = Table("data", "val loss", box=None, pad_edge=False)
    for name, value in {**of_sources, "all": of_all}.items():
        table.add_row(name, loss_text(value))
    print_table(console, table)
