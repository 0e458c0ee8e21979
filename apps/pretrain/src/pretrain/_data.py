"""From what `--data` names to tokens."""

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from rich.console import Console

from owt_data import (
    DataError,
    PrepareOptions,
    TokenData,
    find_source,
    is_prepared,
    open_tokens,
    prepare,
    progress_bar,
    read_manifest,
)
from pretrain._config import PretrainConfig


def data_label(name: str) -> str:
    """A short name for a data path, fit for a folder."""
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(name).stem or name).strip("-").lower() or "data"


def cache_folder() -> Path:
    """Where prepared tokens are kept: `$XDG_CACHE_HOME/owt-data`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "owt-data"


def load_tokens(config: PretrainConfig, console: Console) -> TokenData:
    """Open the data of a run; text is first prepared into the cache, once per content and options.

    Raises:
        DataError: the data cannot be had, or does not fill one window for each side.
    """
    if is_prepared(config.data):
        tokens = open_tokens(config.data, tokenizer=config.prepare.tokenizer)
    else:
        folder = cache_folder() / _cache_key(config.data, config.prepare)
        if read_manifest(folder) is None:
            console.print(f"preparing {config.data} into {folder}", markup=False)
            with progress_bar(console) as progress:
                prepare(config.data, folder, config.prepare, progress=progress)
        tokens = open_tokens(str(folder), tokenizer=config.prepare.tokenizer)
    for name, part, remedy in (
        ("training", tokens.train, "more text"),
        ("validation", tokens.val, "more text, a larger --val-fraction"),
    ):
        if part.num_windows(config.model.seq_len) == 0:
            raise DataError(
                f"expected at least {config.model.seq_len + 1} {name} tokens, which one window of "
                f"{config.model.seq_len} inputs needs, got {len(part)} from {config.data}: give {remedy} "
                "or a shorter --model.seq-len"
            )
    return tokens


def _cache_key(name: str, options: PrepareOptions) -> str:
    contents = find_source(name).digest() + json.dumps(dataclasses.asdict(options), sort_keys=True)
    return f"{data_label(name)}-{options.tokenizer}-{hashlib.sha256(contents.encode()).hexdigest()[:16]}"
