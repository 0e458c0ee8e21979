"""Which errors of the storage are tried again."""

import errno
import os
from types import SimpleNamespace

import pytest

from ray_jax_launch import LaunchError
from ray_jax_launch._checkpoint.retry import retry


@pytest.fixture
def sleeps(monkeypatch):
    """The seconds slept between the attempts."""
    slept = []
    monkeypatch.setattr("ray_jax_launch._checkpoint.retry.time", SimpleNamespace(sleep=slept.append))
    return slept


def failing(*errors):
    """A function that raises these errors, one a call, and then works."""
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "read"

    return action


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, None])
def test_an_error_that_may_pass_is_tried_again_for_a_quarter_of_a_minute(number, sleeps):
    error = OSError("HTTP 503") if number is None else OSError(number, os.strerror(number))
    assert retry("file", failing(*[error] * 6)) == "read"
    assert 15 <= sum(sleeps) <= 20
    with pytest.raises(LaunchError, match="file must be accessible, got "):
        retry("file", failing(*[error] * 7))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG])
def test_an_error_that_stays_is_not_waited_for(number, sleeps):
    with pytest.raises(LaunchError, match=rf"file must be accessible, got \[Errno {number}\]"):
        retry("file", failing(OSError(number, os.strerror(number))))
    assert sleeps == []


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), OSError("AWS Error NO_SUCH_KEY during GetObject operation")]
)
def test_a_file_that_is_not_there_is_an_answer(error, sleeps):
    with pytest.raises(FileNotFoundError):
        retry("file", failing(error))
    assert sleeps == []


def test_a_bucket_that_is_not_there_is_not_waited_for(sleeps):
    with pytest.raises(LaunchError):
        retry("file", failing(OSError("AWS Error NO_SUCH_BUCKET during HeadObject operation")))
    assert sleeps == []
