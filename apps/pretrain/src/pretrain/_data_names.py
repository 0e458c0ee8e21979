"""The names that `--data` gives: one name, two splits, or a mixture."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from owt_data import MixtureWeight
from pretrain._errors import UsageError, shown
from ray_jax_launch import check_no_credentials, is_uri

# A part of several names begins with a label and an equals sign. A path or a URI has another character before `=`.
_LABEL = re.compile(r"[A-Za-z0-9_-]+=")
# A weight that changes: digits alone, so that each number can be read. An exponent has its sign or none.
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_CHANGING = re.compile(rf"{_DECIMAL}(?:>{_DECIMAL}@\d{{1,10}})+", re.ASCII)
_MOST_STEPS = 2**31 - 1
_LONGEST_LABEL = 100  # a folder's name has at most 255 characters, with a preset or a digest


@dataclass(frozen=True, slots=True)
class Plain:
    """One name. Its tokens are split into training and validation."""

    name: str


@dataclass(frozen=True, slots=True)
class Splits:
    """A name for each split."""

    train: str
    """Name of the training data."""

    val: str
    """Name of the validation data."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names with weights."""

    labels: tuple[str, ...]
    """Label of each name."""

    weights: dict[str, float | list[tuple[int, float]]]
    """Weight of each name: a number; or pairs of a number of steps, and the weight after these steps. The first pair is
    that of 0 steps."""

    def of_windows(self, batch_size: int) -> dict[str, MixtureWeight]:
        """Return the weights as `open_tokens` takes them.

        Args:
            batch_size: windows of a step.
        """
        return {
            name: [(step * batch_size, number) for step, number in weight] if isinstance(weight, list) else weight
            for name, weight in self.weights.items()
        }


def parse_data(text: str) -> Plain | Splits | Mixture:
    """Read `NAME`, `train=NAME,val=NAME`, or a mixture such as `web=0.7:NAME,code=0.3:NAME`.

    A weight may change: `0.7>0.3@5000` is 0.7 for the first 5,000 steps, and 0.3 after them.

    The name of an existing file or folder is a plain name, even if it has commas and equals signs.

    Raises:
        UsageError: the text has several names, and another form.
        LaunchError: a name is a URI with credentials.
    """
    check_no_credentials("data", text)
    if os.path.exists(text) or is_uri(text) or not (_LABEL.match(text) or "," in text):  # noqa: PTH110 - false if too long
        # `prepare` reads `train=` at the beginning of a name as a split, even if a file has this name.
        return Plain(f"./{text}" if text.startswith(("train=", "val=")) else text)
    parts = re.split(rf",(?={_LABEL.pattern})", text)
    names = dict(part.split("=", 1) for part in parts if _LABEL.match(part))
    if len(names) == len(parts) == 2 and names.keys() == {"train", "val"} and all(names.values()):
        return Splits(**names)
    if problem := _problem(parts, names):
        raise UsageError(
            "data must be one name, train=NAME,val=NAME, or names with labels and positive weights, such as "
            f"web=0.7:NAME,code=0.3:NAME, got {shown(text)}: {problem}."
        )
    weighted = [value.partition(":") for value in names.values()]
    return Mixture(tuple(names), {name: _weight(weight) for weight, _, name in weighted})


def _problem(parts: Sequence[str], names: Mapping[str, str]) -> str | None:
    """Return the first error in the parts of a text with labels."""
    for part in parts:
        if not _LABEL.match(part):
            return f"{shown(part)} has no label"
    if len(names) < len(parts):
        return "a label occurs twice"
    if names.keys() <= {"train", "val"}:
        empty = next((split for split in ("train", "val") if not names.get(split)), None)
        return f"{empty} has no name"
    for label, value in names.items():
        if _number(value) > 0:  # a shell has written the rest to a file, whose name is what follows `>`
            return f"{label} must be WEIGHT:NAME, with a number and a colon; a value with > needs quotes"
    if len(names) == 1:
        return "a mixture has several names"
    changes: list[list[tuple[int, float]]] = []
    for label, value in names.items():
        weight, colon, name = value.partition(":")
        if not colon or not name:
            return f"{label} must be WEIGHT:NAME, with a number and a colon"
        if ">" in weight:
            if not _CHANGING.fullmatch(weight) or not _is_valid(_changes(weight)):
                return f"the weight of {label} must be numbers at ascending steps, as in 0.7>0.3@5000>0.1@8000"
            if not 0 < max(number for _, number in _changes(weight)) < math.inf:
                return f"the weight of {label} must be above 0 at some step, and finite"
        elif not 0 < _number(weight) < math.inf:
            return f"the weight of {label} must be a number above 0"
        changes.append(_changes(weight))
    if len({value.partition(":")[2] for value in names.values()}) < len(names):
        return "a name occurs twice"
    for step in sorted({step for of_name in changes for step, _ in of_name}):
        if not any(_at(of_name, step) for of_name in changes):
            return f"all weights are 0 after {step} steps"
    return None


def token_files(data: Plain | Splits | Mixture, batch_size: int) -> str | list[str] | dict[str, MixtureWeight]:
    """Return the names of token files as `open_tokens` takes them.

    Args:
        data: the names.
        batch_size: windows of a step.
    """
    match data:
        case Plain(name):
            return name
        case Splits(train, val):
            return [f"train={train}", f"val={val}"]
        case Mixture():
            return data.of_windows(batch_size)


def names_of(data: Plain | Splits | Mixture) -> list[str]:
    """Return all names of data."""
    match data:
        case Plain(name):
            return [name]
        case Splits(train, val):
            return [train, val]
        case Mixture(_, weights):
            return list(weights)


def labels_of(text: str) -> tuple[str, ...]:
    """Return the labels of a mixture in the form of `parse_data`, or none for other data."""
    data = parse_data(text)
    return data.labels if isinstance(data, Mixture) else ()


def label_of(data: Plain | Splits | Mixture) -> str:
    """Return a name of at most 100 characters for data, usable as part of a folder's name."""
    match data:
        case Plain(name):
            words = Path(name).stem or name
        case Splits(train, val):
            # Their folder, the configuration of their dataset, or the beginning of both file names.
            common = os.path.commonprefix([train, val])  # noqa: RUF071 - characters are compared, not folders
            words = re.split("[/:]", common.rstrip("/:"))[-1]
        case Mixture(labels, _):
            words = "-".join(labels)
    return re.sub(r"[^A-Za-z0-9]+", "-", words)[:_LONGEST_LABEL].strip("-").lower() or "data"


def _weight(text: str) -> float | list[tuple[int, float]]:
    """Return the value of a weight that `_problem` has checked."""
    return _changes(text) if ">" in text else float(text)


def _changes(text: str) -> list[tuple[int, float]]:
    """Return the numbers of steps of a weight that changes, with the weights after these steps.

    >>> _changes("0.7>0.3@5000")
    [(0, 0.7), (5000, 0.3)]
    """
    first, *later = text.split(">")
    pairs = [part.partition("@") for part in later]
    return [(0, float(first)), *((int(step), float(number)) for number, _, step in pairs)]


def _is_valid(changes: list[tuple[int, float]]) -> bool:
    """Return whether the steps of a weight ascend."""
    steps = [step for step, _ in changes]
    return sorted(set(steps)) == steps and steps[-1] <= _MOST_STEPS


def _at(changes: list[tuple[int, float]], step: int) -> float:
    """Return a weight after a number of steps."""
    return next(number for start, number in reversed(changes) if start <= step)


def _number(text: str) -> float:
    """Return a number, or 0 for other text."""
    try:
        return float(text)
    except ValueError:
        return 0.0
