"""The table of a model's scores on tasks."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pretrain._judge.published import MODELS
from pretrain._judge.tasks import MetricScore, TaskScores
from pretrain._screen.printing import print_line, print_table


def show_scores(scores: Sequence[TaskScores], *, console: Console) -> None:
    """Print the scores with their standard errors, the figures of OpenAI's GPT-2, and the sources of these."""
    figures = [figure for task in scores for metric in task.metrics for figure in metric.published]
    models = [model for model in MODELS if any(figure.model == model for figure in figures)]
    table = Table(box=None, pad_edge=False)
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("documents", "shots", "score", "± error", *models):
        table.add_column(name, justify="right", no_wrap=True)
    for task in scores:
        for number, metric in enumerate(task.metrics):
            head = [task.task, _count(task.num_documents), _count(task.num_examples)] if number == 0 else [""] * 3
            table.add_row(head[0], metric.metric, *head[1:], *_numbers(metric, models))
    print_table(console, table)
    for source in dict.fromkeys(figure.source for figure in figures):
        of = dict.fromkeys(
            task.task for task in scores for metric in task.metrics for one in metric.published if one.source == source
        )
        print_line(console, f"GPT-2 on {', '.join(of)}: {source}")


def _numbers(metric: MetricScore, models: Sequence[str]) -> list[str]:
    values = {figure.model: figure.value for figure in metric.published}
    error = "" if metric.stderr is None else _score(metric.stderr)
    return [_score(metric.value), error, *(_score(values[model]) if model in values else "" for model in models)]


def _score(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.2f}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
