"""Scores of a model on tasks, by lm-eval."""

# lm-eval is an extra.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import contextlib
import io
import logging
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from rich.console import Console

from nnx_gpt2 import GPT2
from owt_data import Tokenizer
from pretrain._errors import UsageError, one_line, short
from pretrain._judge.published import Figure, published_figures
from pretrain._screen.printing import waiting
from pretrain._suggestions import nearest
from pretrain._task_names import RequestedTask

# The standard error of a perplexity is that of samples with replacement. Those of an accuracy need none.
_NUM_RESAMPLED = 1_000
# The seeds of lm-eval's own command.
_SEED, _NUMPY_SEED, _EXAMPLES_SEED = 0, 1234, 1234
# What reading a task, and the data that it names, raises: of `datasets`, of its download, and of the code of a task.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, AssertionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricScore:
    """A score of a model on a task."""

    metric: str
    """The metric, such as `acc`, with its filter if it has one, such as `exact_match,strict-match`."""

    value: float
    """The score."""

    stderr: float | None
    """Its standard error; None if lm-eval has none for this metric."""

    published: tuple[Figure, ...]
    """The figures of OpenAI's GPT-2, if they are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScores:
    """The scores of a model on a task."""

    task: str
    """The name of the task."""

    num_documents: int | None
    """The number of documents that were scored; None for a group of tasks."""

    num_examples: int | None
    """Examples in the prompt; None for a group of tasks with different numbers."""

    version: str | None
    """Version of the task."""

    metrics: list[MetricScore] = field(default_factory=list)
    """The scores."""


def evaluate_tasks(
    model: GPT2,
    tokenizer: Tokenizer,
    requested: Sequence[RequestedTask],
    *,
    batch_size: int,
    console: Console,
) -> list[TaskScores]:
    """Score a model on tasks.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        requested: the tasks.
        batch_size: windows of the model's context that are computed at once.
        console: shows the progress.

    Raises:
        UsageError: a task does not exist, or its files or its data cannot be read or do not fit each other.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # processes of `fork` would deadlock beside jax
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    console.file = console.file  # not that of `_quiet`
    with waiting(console, "reading the tasks"), _quiet(), _rejecting_files(task.name for task in requested):
        known = _Known(requested)
        loaded = [(task.limit, _load(task, known)) for task in requested]
    from pretrain._judge.language_model import LanguageModel  # an extra, which takes seconds

    language_model = LanguageModel(model, tokenizer, batch_size=batch_size, console=console)
    found: dict[str, TaskScores] = {}
    for limit, tasks in loaded:
        with _quiet(), _rejecting_files(tasks["tasks"]):
            found |= _evaluated(language_model, tasks, limit)
    return [*found.values()]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what lm-eval and `datasets` print, and their progress bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _rejecting_files(names: Iterable[str]) -> Iterator[None]:
    """Raise UsageError for YAML or a template of a task that is wrong, or does not fit the task's data."""
    from yaml import YAMLError  # of the extra

    try:
        yield
    except (TemplateError, YAMLError) as error:
        raise UsageError(
            f"--tasks must name tasks with valid YAML and templates, got {short(', '.join(names))}: "
            f"{one_line(' '.join(str(error).split())).rstrip('.')}."
        ) from error


class _Known:
    """The tasks of lm-eval, whose list takes seconds to read, and those of files, with it or without it."""

    def __init__(self, requested: Sequence[RequestedTask]) -> None:
        from lm_eval.tasks import TaskManager  # an extra

        folders: list[str | Path] = [task.name for task in requested if task.is_path and Path(task.name).is_dir()]
        self.manager = TaskManager(include_path=folders, include_defaults=not all(task.is_path for task in requested))

    def names_in(self, folder: Path) -> list[str]:
        """Return the tasks of the files below a folder."""
        place = folder.resolve()
        return [
            name
            for name, entry in self.manager.task_index.items()
            if entry.yaml_path is not None and entry.yaml_path.resolve().is_relative_to(place)
        ]


def _load(task: RequestedTask, known: _Known) -> Any:
    """Load a task and its data.

    Raises:
        UsageError: there is no such task, or it cannot be read.
    """
    path = Path(task.name)
    names = [task.name]
    if task.is_path:
        if not path.exists():
            raise UsageError(f"--tasks must name tasks, or YAML files and folders that exist, got {short(task.name)}.")
        names = known.names_in(path) if path.is_dir() else names
        if not names:
            raise UsageError(
                f"--tasks must name folders with tasks in .yaml files, got {short(task.name)} without one."
            )
    elif task.name not in known.manager.task_index:
        similar = nearest(task.name, known.manager.all_tasks)
        question = f" Did you mean {similar}?" if similar else ""
        raise UsageError(
            f"--tasks must name tasks of lm-eval, or YAML files and folders, got {short(task.name)}.{question}"
        )
    try:
        return known.manager.load(names)
    except _UNREADABLE as error:
        reason = one_line(str(error).splitlines()[0] if str(error).strip() else type(error).__name__).rstrip(".")
        entry = known.manager.task_index.get(names[0])
        data = entry.cfg.get("dataset_path") if entry is not None and entry.cfg else None
        of = f" (data {data})" if data else ""
        raise UsageError(
            f"--tasks must name tasks whose files and data can be read, got {short(task.name)}{of}: {reason}. Connect "
            "to the network for its first use: the data then stays in the cache of `datasets`, which HF_HOME may name."
        ) from error


def _evaluated(language_model: Any, tasks: Any, limit: int | None) -> dict[str, TaskScores]:
    from lm_eval.evaluator import evaluate  # an extra

    random.seed(_SEED)
    np.random.seed(_NUMPY_SEED)  # noqa: NPY002 - tasks draw their examples from it
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_EXAMPLES_SEED)
    results: Any = evaluate(language_model, tasks, limit=limit, bootstrap_iters=_NUM_RESAMPLED, log_samples=False)
    return {name: _scores(name, values, results) for name, values in results["results"].items()}


def _scores(name: str, values: dict[str, Any], results: Any) -> TaskScores:
    metrics: list[MetricScore] = []
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(value, str | bool):
            continue
        error = values.get(f"{metric}_stderr,{chosen}")
        metrics.append(
            MetricScore(
                metric=metric if chosen == "none" else key,
                value=float(value),
                stderr=float(error) if isinstance(error, int | float) else None,
                published=published_figures(name, metric) if chosen == "none" else (),
            )
        )
    num_documents, version = results["n-samples"].get(name, {}), results["versions"].get(name)
    return TaskScores(
        task=name,
        num_documents=num_documents.get("effective"),
        num_examples=results["n-shot"].get(name),
        version=None if version is None else str(version),
        metrics=metrics,
    )
