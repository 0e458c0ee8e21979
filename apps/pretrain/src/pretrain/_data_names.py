"""The names that `--data` gives: one name, two splits, or a mixture."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pretrain._errors import UsageError

# A part of several names begins with a label and an equals sign. A path or a URI has another character before `=`.
_LABEL = re.compile(r"[A-Za-z0-9_-]+=")


@dataclass(frozen=True, slots=True)
class Plain:
    """One name. Its tokens are split into training and validation."""

    name: str
    """The name."""


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
    """
    if not _LABEL.match(text) or os.path.exists(text):  # noqa: PTH110 - false for a name that is too long
        # `prepare` reads `train=` at the beginning of a name as a split, even if a file has this name.
        return Plain(f"./{text}" if text.startswith(("train=", "val=")) else text)
    parts = [part.partition("=") for part in re.split(rf",(?={_LABEL.pattern})", text)]
    labels = [label for label, _, _ in parts]
    names = {label: name for label, _, name in parts}
    if sorted(labels) == ["train", "val"] and all(names.values()):
        return Splits(**names)
    weighted = [name.partition(":") for name in names.values()]
    weights = {name: _weight(number) for number, _, name in weighted if name}
    if len(weights) < max(2, len(parts)) or min(weights.values()) <= 0:
        raise UsageError(
            "data must be one name, train=NAME,val=NAME, or different names with labels and positive weights, such as "
            f"web=0.7:NAME,code=0.3:NAME, got {text!r}. Choose one of these forms."
        )
    return Mixture(tuple(labels), weights)


def label_of(data: Plain | Splits | Mixture) -> str:
    """Return a short name for data, usable as a folder's name."""
    match data:
        case Plain(name):
            words = Path(name).stem or name
        case Splits(train, val):
            # Their folder, the configuration of their dataset, or the beginning of both file names.
            common = os.path.commonprefix([train, val])  # noqa: RUF071 - characters are compared, not folders
            words = re.split("[/:]", common.rstrip("/:"))[-1]
        case Mixture(labels, _):
            words = "-".join(labels)
    return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-").lower() or "data"


def _weight(number: str) -> float:
    """Return a number, or 0 for text that is not a finite number."""
    try:
        weight = float(number)
    except ValueError:
        return 0.0
    return weight if weight < float("inf") else 0.0
