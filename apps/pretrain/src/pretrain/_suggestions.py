"""Similar names, for names that do not exist."""

import difflib
from collections.abc import Iterable, Sequence

from pretrain._errors import shown

_LIKENESS = 0.6


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name, or None if no name is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=_LIKENESS)), None)


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
    last = name.rpartition(".")[2]
    lasts: dict[str, str] = {}
    for known in names:
        lasts.setdefault(known.rpartition(".")[2], known)
    initials: dict[str, str] = {}
    for known_last, known in lasts.items():
        initials.setdefault("".join(word[0] for word in known_last.split("-")), known)
    section = name.rpartition(".")[0]
    same_section = [known for known in names if section and known.rpartition(".")[0] == section]
    if known := lasts.get(last) or (initials.get(last) if len(last) > 1 else None):
        return known
    if known := next((known for known_last, known in lasts.items() if known_last.endswith(f"-{last}")), None):
        return known
    if known := nearest(name, same_section):
        return known
    known_last = nearest(last, lasts)
    return lasts[known_last] if known_last else nearest(name, names)


def did_you_mean(name: object, names: Iterable[str], otherwise: str) -> str:
    """Return the remedy for a wrong name, or another wrong value: the most similar name, or another sentence."""
    known = nearest(name if isinstance(name, str) else shown(name), names)
    return f"Did you mean {known}?" if known else otherwise
