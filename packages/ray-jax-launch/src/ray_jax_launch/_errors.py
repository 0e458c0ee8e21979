"""Errors of this package that a caller can catch or raise, and the form of a value in them."""

import re
from typing import Any

_MOST_CHARACTERS = 80
# A path of one name can have 255 characters, and no line shows more.
_LONG_WORD = re.compile(r"\S{400,}")


def shown(value: object) -> str:
    """Return a value as an error shows it: in one line, and at most 80 characters of it.

    >>> shown([1, 2]), len(shown("x" * 5000))
    ('[1, 2]', 80)
    """
    try:
        return in_a_line(repr(value))
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or a deep list
        return f"a very large {type(value).__name__}"
    except Exception:  # the value's own
        return f"one {type(value).__name__}, which has no text"


def in_a_line(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text in one line, and at most so many characters of it."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in _cut(text, most))


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - most // 4 - 1]}\N{HORIZONTAL ELLIPSIS}{text[-(most // 4) :]}"


def _cut_word(word: re.Match[str]) -> str:
    return _cut(word[0], _MOST_CHARACTERS)


class LaunchError(ValueError):
    """An argument or the environment is not valid. The message names the constraint, the value and the remedy.

    A loop may raise it too, for an error that only a worker can see. `launch` then raises it and does not restart. The
    middle of a word of more than 400 characters, such as a path, is left out.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_LONG_WORD.sub(_cut_word, arg) if isinstance(arg, str) else arg for arg in args))


class OutOfMemoryError(LaunchError):
    """The computation of a loop does not fit in memory. `launch` does not restart, which would not help."""


class PermanentError(RuntimeError):
    """A failure of a loop that a restart would repeat, such as a loss that is not finite.

    Raise it or a subclass in a loop. `launch` then does not restart, and raises `TrainingFailed`.
    """


class StopRequestedError(PermanentError):
    """The driver has ended the launch by `request_stop`. The message is the reason."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written. From a search for an undamaged checkpoint: all are damaged."""


class DeletedCheckpointError(ValueError):
    """A checkpoint was deleted while it was read, because the run has a newer checkpoint."""


class MismatchedCheckpointError(LaunchError):
    """A checkpoint does not hold the arrays that are to be restored: another model wrote it."""


class UnsavedCheckpointError(RuntimeError):
    """A checkpoint could not be written. `__cause__` is the error that prevented it."""


class StorageFullError(UnsavedCheckpointError, PermanentError):
    """A checkpoint could not be written to full storage. `launch` does not restart, and raises it as it is."""


class TrainingFailed(RuntimeError):
    """A worker failed more often than `max_failures` allows.

    Attributes:
        rank: the first worker that failed, or None if the launch itself failed.
        details: traceback of this worker.
        log_folder: folder of Ray's full logs on each node; empty without Ray.
    """

    def __init__(self, message: str, rank: int | None, details: str, log_folder: str) -> None:
        super().__init__(f"{message} (full logs: {log_folder})" if log_folder else message)
        self.rank = rank
        self.details = details
        self.log_folder = log_folder

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to pickle it, for a launch in another process: `__init__` takes other arguments than the text."""
        return type(self)._restored, (str(self), self.rank, self.details, self.log_folder)

    @classmethod
    def _restored(cls, text: str, rank: int | None, details: str, log_folder: str) -> "TrainingFailed":
        error = cls(text, rank, details, "")
        error.log_folder = log_folder
        return error
