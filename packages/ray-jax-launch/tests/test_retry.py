"""Retries after temporary errors of the storage."""

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ray_jax_launch import LaunchError
from ray_jax_launch._checkpoint.retry import retry


@pytest.fixture
def sleeps(monkeypatch):
    """Seconds between the attempts, which are not slept."""
    slept = []
    monkeypatch.setattr("ray_jax_launch._checkpoint.retry.time", SimpleNamespace(sleep=slept.append))
    return slept


def failing(*errors):
    """A function that raises one of the errors in each call, and then works."""
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "read"

    return action


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, None])
def test_a_temporary_error_is_retried_for_15_seconds(number, sleeps):
    error = OSError("HTTP 503") if number is None else OSError(number, os.strerror(number))
    assert retry("file", failing(*[error] * 6)) == "read"
    assert 15 <= sum(sleeps) <= 20
    with pytest.raises(LaunchError, match="file cannot be accessed: "):
        retry("file", failing(*[error] * 7))


@pytest.mark.parametrize(
    "number",
    [
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EFBIG,
        errno.EEXIST, errno.EMFILE, errno.ELOOP, errno.EINVAL,
    ],
)  # fmt: skip
def test_a_permanent_error_is_not_retried(number, sleeps):
    with pytest.raises(LaunchError, match=rf"file cannot be accessed: \[Errno {number}\]"):
        retry("file", failing(OSError(number, os.strerror(number))))
    assert sleeps == []


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file"), OSError("AWS Error NO_SUCH_KEY during GetObject operation")]
)
def test_a_missing_file_is_not_retried(error, sleeps):
    with pytest.raises(FileNotFoundError):
        retry("file", failing(error))
    assert sleeps == []


@pytest.mark.parametrize("answer", ["NO_SUCH_BUCKET", "ACCESS_DENIED"])
def test_a_permanent_answer_is_not_retried(answer, sleeps):
    with pytest.raises(LaunchError):
        retry("file", failing(OSError(f"AWS Error {answer} during HeadObject operation")))
    assert sleeps == []


def test_each_delay_is_logged_and_longer_than_the_one_before(sleeps: list[float], caplog: Any) -> None:
    error = OSError(errno.EIO, "bad disk")
    assert retry("file", failing(error, error, error)) == "read"
    assert sleeps == sorted({*sleeps})
    assert [record.message for record in caplog.records] == [
        f"file cannot be accessed ([Errno 5] bad disk): the next attempt is in {delay_s} s" for delay_s in sleeps
    ]
    assert len(sleeps) == 3
