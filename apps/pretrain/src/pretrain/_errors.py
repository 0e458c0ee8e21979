"""The errors of the application, and one sentence for each error that the user can correct."""

import contextlib
import errno
import re
import reprlib
import sys
from collections.abc import Iterator, Sequence

from ray_jax_launch import PermanentError, without_credentials

# Errors of a write to an open file. They name no file.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_MOST_SHOWN = 80
_LONGEST_WORD = 250
_LONGEST_SENTENCE = 1200
# It bears deep values, and those whose `repr` fails. `short` cuts the texts, after it has hidden credentials.
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = sys.maxsize


def shown(value: object) -> str:
    """Return a value as an error shows it: in one line, and at most 80 characters of it.

    >>> shown([1, 2]), len(shown("x" * 5000))
    ('[1, 2]', 80)
    """
    try:
        return short(_repr.repr(value))
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a very large {type(value).__name__}"


def short(text: str) -> str:
    """Return a text of the command line as an error shows it: in one line, and at most 80 characters of it.

    An empty text has quotes, which an error without them would hide.
    """
    return one_line(_cut(without_credentials(text), _MOST_SHOWN)) or "''"


def alternatives(values: Sequence[object]) -> str:
    """Return at least one value, as a sentence lists them.

    >>> alternatives([1, 2, 4])
    '1, 2 or 4'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def one_line(text: str) -> str:
    """Return a message in one line, without credentials, and with the middle of what is too long left out.

    Every error of the commands is printed in this form, also those of the packages and of libraries.
    """
    text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    text = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: _cut(word[0], _MOST_SHOWN), without_credentials(text))
    return _cut(text, _LONGEST_SENTENCE)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - most // 4 - 1]}\N{HORIZONTAL ELLIPSIS}{text[-(most // 4) :]}"


class UsageError(ValueError):
    """Input that cannot be used. The message gives the constraint, the value, and a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class RunFailedError(RuntimeError):
    """A failure of a run that has begun, such as storage that is lost."""


class TrainingDivergedError(PermanentError, FloatingPointError):
    """The loss or the gradient is not finite. A restart from the checkpoint would give the same result."""


def rejection(error: Exception) -> str | None:
    """Return the sentence for an error that the user can correct, or None for any other error."""
    sentence = _sentence(error)
    return None if sentence is None else one_line(sentence)


@contextlib.contextmanager
def rejecting() -> Iterator[None]:
    """Turn an error of the system, such as that of a name that is too long, into a rejection of the user's input.

    Raises:
        UsageError: the block raised an OSError that the user can correct.
    """
    try:
        yield
    except OSError as error:
        sentence = rejection(error)
        if sentence is None:
            raise
        raise UsageError(sentence) from error


def _sentence(error: Exception) -> str | None:
    from owt_data import DataError
    from ray_jax_launch import DamagedCheckpointError, LaunchError, UnsavedCheckpointError

    if isinstance(error, DamagedCheckpointError | DataError | LaunchError | UnsavedCheckpointError | UsageError):
        return str(error)
    if isinstance(error, FileExistsError) and error.filename is not None:  # of `mkdir`
        return f"{error.filename} must be a folder, got something else. Move it away, or give another path."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} must be accessible, got {error.strerror}. Check it, or give another path."
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return f"the output must be writable, got {error.strerror}. Free some space, or write it elsewhere."
    if isinstance(error, OSError) and error.errno is None:  # pyarrow's errors of object storage have no number
        return f"the storage must be accessible, got {error}. Check its address, and the network."
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        reason = " ".join(str(error).split()) or "no memory"
        return f"the model and its batch must fit the memory, got {reason}. Lower the batch size."
    if isinstance(error, OSError):  # such as that of `tempfile`, which finds no folder that it can write to
        return f"files and the network must be usable, got {error.strerror}. Check the disk and the limits of `ulimit`."
    return None
