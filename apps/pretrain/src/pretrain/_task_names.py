"""Names of tasks of lm-eval, in a command line or in a configuration."""

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pretrain._errors import UsageError, short

_ITEM = re.compile(r"(?P<name>.+?)(?::(?P<limit>[0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class RequestedTask:
    """A task, a group of tasks, or task files."""

    name: str
    """A name of lm-eval, a YAML file of a task, or a folder of them."""

    limit: int | None
    """The number of documents to take, from the first one on; None takes all."""

    @property
    def is_path(self) -> bool:
        """True for a file or a folder."""
        return self.name.endswith((".yaml", ".yml")) or "/" in self.name or Path(self.name).is_dir()


def parse_tasks(texts: Iterable[str], limit: int | None = None, *, option: str = "--tasks") -> list[RequestedTask]:
    """Parse names of tasks, with commas between them.

    >>> [(task.name, task.limit) for task in parse_tasks(["hellaswag:500,piqa", "own/task.yaml"], limit=20)]
    [('hellaswag', 500), ('piqa', 20), ('own/task.yaml', 20)]

    Args:
        texts: the names, each with its number of documents as NAME:N if it has one.
        limit: number of documents of the other tasks; None takes all.
        option: the name of the option, for errors.

    Raises:
        UsageError: there is no name, or a number is 0.
    """
    requested: list[RequestedTask] = []
    for text in texts:
        for item in text.split(","):
            found = _ITEM.fullmatch(item.strip())
            if found is None or (found["limit"] is not None and int(found["limit"]) == 0):
                raise UsageError(
                    f"{option} must be names such as piqa or hellaswag:500, with at least 1, got {short(text)}."
                )
            requested.append(RequestedTask(found["name"], limit if found["limit"] is None else int(found["limit"])))
    if not requested:
        raise UsageError(f"{option} must be at least 1 name, such as hellaswag:500, got none.")
    return requested


def check_installed() -> None:
    """Check that lm-eval is installed, without importing it: it takes seconds.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "tasks must have lm-eval, which is not installed. Install it with the extra eval, as in `uv run --extra "
            "eval apps/pretrain ...`, or leave the tasks out."
        )
