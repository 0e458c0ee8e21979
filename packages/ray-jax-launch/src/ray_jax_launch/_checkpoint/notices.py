"""Notices of complete checkpoints, for the code that runs the loop. Imports nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_functions: list[Callable[[Any, int], Any]] = []


@contextlib.contextmanager
def notify_of_steps(function: Callable[[Any, int], Any]) -> Iterator[None]:
    """Call a function with the folder and step of each checkpoint that this process completes, or continues from."""
    _functions.append(function)
    try:
        yield
    finally:
        _functions.remove(function)


def notify(folder: Any, step: int) -> None:
    """Report a complete checkpoint in a folder, or at a URI."""
    for function in _functions:
        function(folder, step)
