"""Scores of a model on tasks, by lm-eval."""

# lm-eval is an extra.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import contextlib
import io
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
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

_logger = logging.getLogger("pretrain")


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
    console.file = console.file  # not that of `_quiet`
    with waiting(console, "reading the tasks"), _reading(requested, "--tasks") as known:
        loaded = [(task, _load(task, known, "--tasks")) for task in requested]
    from pretrain._judge.language_model import LanguageModel  # an extra, which takes seconds

    language_model = LanguageModel(model, tokenizer, batch_size=batch_size, console=console)
    found: dict[str, TaskScores] = {}
    for task, tasks in loaded:
        with _quiet(), _rejecting_files(tasks["tasks"], "--tasks"):
            scores = _evaluated(language_model, tasks, task)
        _warn_of_missing(tasks["tasks"], scores)
        found |= scores
    return [*found.values()]


def read_tasks(requested: Sequence[RequestedTask], *, option: str) -> None:
    """Check that tasks exist, and read those of files with their data.

    Raises:
        OSError: data could not be read, such as from a hub that does not answer.
        UsageError: there is no such task, or its file is wrong, or does not fit its data.
    """
    with _reading(requested, option) as known:
        for task in requested:
            names = known.names_of(task, option)
            try:
                if task.is_path:
                    known.manager.load(names)
            except _UNREADABLE as error:
                if _is_of_network(error):
                    raise
                raise _unreadable(task, names, known, option, error) from error


@contextlib.contextmanager
def _reading(requested: Sequence[RequestedTask], option: str) -> Iterator["_Known"]:
    """Let lm-eval read tasks and their data, without what it prints."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # processes of `fork` would deadlock beside jax
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with _quiet(), _rejecting_files((task.name for task in requested), option):
        yield _Known(requested)


def _warn_of_missing(tasks: dict[str, Any], scores: dict[str, TaskScores]) -> None:
    """Warn of the metrics of a task that lm-eval has left out: it does not know them, or not for this type of task."""
    for name, task in tasks.items():
        given = (metric["metric"] for metric in task.get_config("metric_list") or [])
        found = {metric.metric.partition(",")[0] for metric in scores[name].metrics} if name in scores else set()
        missing = [metric for metric in given if isinstance(metric, str) and metric not in found]
        if missing and found:
            _logger.warning("lm-eval has no score of the metric %s for the task %s", ", ".join(missing), name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what lm-eval and `datasets` print, and their progress bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _rejecting_files(names: Iterable[str], option: str) -> Iterator[None]:
    """Raise UsageError for YAML or a template of a task that is wrong, or does not fit the task's data."""
    from yaml import YAMLError  # of the extra

    try:
        yield
    except (TemplateError, YAMLError) as error:
        raise UsageError(
            f"{option} must name tasks with valid YAML and templates, got {short(', '.join(names))}: "
            f"{one_line(' '.join(str(error).split())).rstrip('.')}."
        ) from error


class _Known:
    """The tasks of lm-eval, whose list takes seconds to read, and those of files, with it or without it."""

    def __init__(self, requested: Sequence[RequestedTask]) -> None:
        from lm_eval.tasks import TaskManager  # an extra

        folders: list[str | Path] = [task.name for task in requested if task.is_path and Path(task.name).is_dir()]
        self.manager = TaskManager(include_path=folders, include_defaults=not all(task.is_path for task in requested))

    def names_of(self, task: RequestedTask, option: str) -> list[str]:
        """Return the names by which lm-eval knows the tasks of a name, a file or a folder.

        Raises:
            UsageError: there is none.
        """
        path = Path(task.name)
        if task.is_path:
            if not path.exists():
                raise UsageError(
                    f"{option} must name tasks, or YAML files and folders that exist, got {short(task.name)}."
                )
            names = self._names_in(path) if path.is_dir() else [task.name]
            if not names:
                raise UsageError(
                    f"{option} must name folders with tasks in .yaml files, got {short(task.name)} without one."
                )
            return names
        if task.name not in self.manager.task_index:
            similar = nearest(task.name, self.manager.all_tasks)
            question = f" Did you mean {similar}?" if similar else ""
            raise UsageError(
                f"{option} must name tasks of lm-eval, or YAML files and folders, got {short(task.name)}.{question}"
            )
        return [task.name]

    def _names_in(self, folder: Path) -> list[str]:
        """Return the tasks of the files below a folder."""
        place = folder.resolve()
        return [
            name
            for name, entry in self.manager.task_index.items()
            if entry.yaml_path is not None and entry.yaml_path.resolve().is_relative_to(place)
        ]


def _load(task: RequestedTask, known: _Known, option: str) -> Any:
    """Load a task and its data.

    Raises:
        UsageError: there is no such task, or it cannot be read.
    """
    names = known.names_of(task, option)
    try:
        return known.manager.load(names)
    except _UNREADABLE as error:
        raise _unreadable(task, names, known, option, error) from error


def _is_of_network(error: BaseException) -> bool:
    """Return whether data could not be read, though it may exist, such as that of a hub that does not answer."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def _unreadable(
    task: RequestedTask, names: Sequence[str], known: _Known, option: str, error: BaseException
) -> UsageError:
    """Return the error for a task that cannot be read, with what helps: its file, or the network for its data."""
    reason = one_line(str(error).splitlines()[0] if str(error).strip() else "").rstrip(".")
    if not isinstance(error, OSError):
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    entry = known.manager.task_index.get(names[0])
    data = entry.cfg.get("dataset_path") if entry is not None and entry.cfg else None
    of = f" (data {data})" if data else ""
    remedy = (
        "Correct the file; lm-eval's docs/new_task_guide.md has its form."
        if task.is_path and not _is_of_network(error)
        else "Connect to the network for its first use: the data then stays in the cache of `datasets`, which HF_HOME "
        "may name."
    )
    return UsageError(
        f"{option} must name tasks whose files and data can be read, got {short(task.name)}{of}: {reason}. {remedy}"
    )


def _evaluated(language_model: Any, tasks: Any, requested: RequestedTask) -> dict[str, TaskScores]:
    from lm_eval.evaluator import evaluate  # an extra

    random.seed(_SEED)
    np.random.seed(_NUMPY_SEED)  # noqa: NPY002 - tasks draw their examples from it
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_EXAMPLES_SEED)
    results: Any = evaluate(
        language_model, tasks, limit=requested.limit, bootstrap_iters=_NUM_RESAMPLED, log_samples=False
    )
    # A task of a file may have the name of another one.
    figures = _no_figures if requested.is_path else published_figures
    return {name: _scores(name, values, results, figures) for name, values in results["results"].items()}


def _no_figures(task: str, metric: str) -> tuple[Figure, ...]:
    return ()


def _scores(
    name: str, values: dict[str, Any], results: Any, figures: Callable[[str, str], tuple[Figure, ...]]
) -> TaskScores:
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
                published=figures(name, metric) if chosen == "none" else (),
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
