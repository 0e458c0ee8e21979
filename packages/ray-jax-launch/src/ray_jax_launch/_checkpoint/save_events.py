"""Events of complete and of failed checkpoints, for the code that runs the loop. Imports nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_functions: list[tuple[Callable[[Any, int], Any], Callable[[Exception], Any]]] = []


@contextlib.contextmanager
def notify_of_saves(on_step: Callable[[Any, int], Any], on_failure: Callable[[Exception], Any]) -> Iterator[None]:
    """Call functions when a checkpoint is complete, and when a save in the background has failed.

    Args:
        on_step: gets the folder and step of each checkpoint that this process completes, or continues from.
        on_failure: gets the error of a save, in a thread of the save.
    """
    functions = on_step, on_failure
    _functions.append(functions)
    try:
        yield
    finally:
        _functions.remove(functions)


def notify(folder: Any, step: int) -> None:
    """Report a complete checkpoint in a folder, or at a URI."""
    for on_step, _ in _functions:
        on_step(folder, step)


def notify_of_failure(error: Exception) -> None:
    """Report a save that has failed."""
    for _, on_failure in _functions:
        on_failure(error)
