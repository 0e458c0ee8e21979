"""The option `--tokenizer`."""

import os
import re
from typing import get_args

from owt_data import TokenizerName
from pretrain._errors import UsageError, short
from pretrain._suggestions import nearest

# The names differ in digits: gpt4 is no misspelled gpt2.
_LIKENESS = 0.85
_WORD = re.compile(r"[\w.+ -]*")


def check_tokenizer_name(name: str) -> None:
    """Check that a tokenizer is a known name, or may be a path. No file is looked up.

    Raises:
        UsageError: it is neither, or the end-of-text token after the path is empty.
    """
    names = get_args(TokenizerName)
    path, mark, token = name.partition("::")
    if mark and not token:
        raise UsageError(
            f"--tokenizer must name the end-of-text token after ::, got {short(name)}. Leave out the ::, or write "
            "PATH::TOKEN."
        )
    if path in names or path.endswith(".json") or not _WORD.fullmatch(path) or os.path.exists(path):  # noqa: PTH110
        return  # `owt_data` checks a path. Unlike `Path.exists`, `os.path.exists` takes a name of any length
    known = next((known for known in names if len(path) > 1 and known.startswith(path)), None)
    known = known or nearest(path, names, likeness=_LIKENESS)
    question = f" Did you mean {known}?" if known else ""
    raise UsageError(
        f"--tokenizer must be {', '.join(names)}, or the path of a tokenizer.json, got {short(name)}.{question}"
    )
