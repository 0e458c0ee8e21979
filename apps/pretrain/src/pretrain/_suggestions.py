"""Similar names, for names that do not exist."""

import difflib
from collections.abc import Iterable, Sequence

from pretrain._errors import shown

_LIKENESS = 0.6


def nearest(name: str, names: Iterable[str], *, likeness: float = _LIKENESS) -> str | None:
    """Return the most similar name, or None if no name is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=likeness)), None)


def nearest_option(name: str, names: Sequence[str]) -> str | None:
    """Return the most similar name of an option, or None if no name is similar.

    The last component counts first, because a name is often given in the wrong section or without one.

    >>> nearest_option("train.learning-rate", ["train.max-steps", "optimizer.learning-rate"])
    'optimizer.learning-rate'
    >>> nearest_option("lr", ["train.max-steps", "optimizer.learning-rate"])
    'optimizer.learning-rate'
    >>> nearest_option("batch-size", ["train.global-batch-size", "train.micro-batch-size"])
    'train.global-batch-size'

    Args:
        name: the name that does not exist.
        names: the names of all options, frequent ones first.
    """
    section, _, last = name.rpartition(".")
    lasts = {known: known.rpartition(".")[2] for known in names}
    for known, known_last in lasts.items():
        if known_last == last:
            return known
    for known, known_last in lasts.items():
        if len(last) > 1 and last == "".join(word[0] for word in known_last.split("-")):
            return known
    for known, known_last in lasts.items():
        if known_last.endswith(f"-{last}"):
            return known
    if section and (known := nearest(name, [known for known in names if known.startswith(f"{section}.")])):
        return known
    similar = nearest(last, lasts.values())
    return next((known for known in names if lasts[known] == similar), None) or nearest(name, names)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return the remedy for a wrong name or value, after a space; an empty text if no name is similar."""
    known = nearest(name if isinstance(name, str) else shown(name), names)
    return f" Did you mean {known}?" if known else ""
