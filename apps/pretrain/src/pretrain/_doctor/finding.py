"""The finding of a check."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The finding of a check, and one thing to do."""

    name: str
    """The thing that was checked, such as `storage`."""

    state: State
    """`warn` if a run works, but worse or not everywhere; `fail` if it does not."""

    found: str
    """A description, in one line."""

    remedy: str = ""
    """One thing to do; empty if all is well."""


def ok(name: str, found: str) -> Finding:
    """Return a finding of something that is as it must be."""
    return Finding(name=name, state="ok", found=found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """Return a finding of something that a run works with, but worse or not everywhere."""
    return Finding(name=name, state="warn", found=found, remedy=remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """Return a finding of something that a run does not work with."""
    return Finding(name=name, state="fail", found=found, remedy=remedy)
