"""The names that `--data` gives: one name, two splits, or a mixture."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain._errors import UsageError, shown
from ray_jax_launch import check_no_credentials, is_uri

# A part of several names begins with a label and an equals sign. A path or a URI has another character before `=`.
_LABEL = re.compile(r"[A-Za-z0-9_-]+=")
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

    weights: dict[str, float]
    """Weight of each name."""


def parse_data(text: str) -> Plain | Splits | Mixture:
    """Read `NAME`, `train=NAME,val=NAME`, or a mixture such as `web=0.7:NAME,code=0.3:NAME`.

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
    return Mixture(tuple(names), {name: float(weight) for weight, _, name in weighted})


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
    if len(names) == 1:
        return "a mixture has several names"
    for label, value in names.items():
        weight, colon, name = value.partition(":")
        if not colon or not name:
            return f"{label} must be WEIGHT:NAME, with a number and a colon"
        if not 0 < _number(weight) < math.inf:
            return f"the weight of {label} must be a number above 0"
    if len({value.partition(":")[2] for value in names.values()}) < len(names):
        return "a name occurs twice"
    return None


def token_files(data: Plain | Splits | Mixture) -> str | list[str] | dict[str, float]:
    """Return the names of token files as `open_tokens` takes them."""
    match data:
        case Plain(name):
            return name
        case Splits(train, val):
            return [f"train={train}", f"val={val}"]
        case Mixture(_, weights):
            return weights


def names_of(data: Plain | Splits | Mixture) -> list[str]:
    """Return all names of data."""
    match data:
        case Plain(name):
            return [name]
        case Splits(train, val):
            return [train, val]
        case Mixture(_, weights):
            return list(weights)


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


def _number(text: str) -> float:
    """Return a number, or 0 for other text."""
    try:
        return float(text)
    except ValueError:
        return 0.0
