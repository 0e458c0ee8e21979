"""The tokens of a run: opens token files, and prepares text first."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import platformdirs
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
    """Return a short name for a data path, usable as a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(name).stem or name).strip("-").lower() or "data"


def cache_folder() -> Path:
    """Return the folder of prepared tokens: `owt-data` in the user's cache, which is `~/.cache` on Linux."""
    return platformdirs.user_cache_path("owt-data")


def load_tokens(config: PretrainConfig, console: Console) -> TokenData:
    """Open the tokens of a run. Text is prepared into the cache, once for the same content and options.

    Raises:
        DataError: the data cannot be read, or either split is shorter than one window.
    """
    if is_prepared(config.data):
        tokens = open_tokens(config.data, tokenizer=config.prepare.tokenizer)
    else:
        folder = cache_folder() / _cache_key(config.data, config.prepare)
        if read_manifest(folder) is None:
            console.print(f"preparing {config.data} into {folder}", markup=False, soft_wrap=True)
            with progress_bar(console) as progress:
                prepare(config.data, folder, config.prepare, progress=progress)
        tokens = open_tokens(str(folder), tokenizer=config.prepare.tokenizer)
    for name, part, remedy in (
        ("training", tokens.train, "more text"),
        ("validation", tokens.val, "more text, a larger --val-fraction"),
    ):
        if part.num_windows(config.model.seq_len) == 0:
            raise DataError(
                f"{config.data} must have at least {config.model.seq_len + 1} {name} tokens, one window of "
                f"model.seq_len inputs and a target, got {len(part)}. Give {remedy} or a shorter --model.seq-len."
            )
    return tokens


def _cache_key(name: str, options: PrepareOptions) -> str:
    contents = find_source(name).digest() + json.dumps(dataclasses.asdict(options), sort_keys=True)
    return f"{data_label(name)}-{options.tokenizer}-{hashlib.sha256(contents.encode()).hexdigest()[:16]}"
