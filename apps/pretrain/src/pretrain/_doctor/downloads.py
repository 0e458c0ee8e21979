"""Checks of what comes from the network: the files of a tokenizer, and datasets of the Hugging Face hub."""

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from pretrain._doctor.finding import Finding, fail, ok, warn
from pretrain._surroundings.child import ChildError, call_in_child

_WITHIN_S, _ANSWER_WITHIN_S = 30.0, 8.0
_TOKENIZER_HOST = "https://openaipublic.blob.core.windows.net"
_HUB = "https://huggingface.co"
# A proxy that nothing is behind: a library that asks the network fails at once.
_OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
_NOT_OFFLINE = ("no_proxy", "NO_PROXY")
_TRUE = ("1", "on", "yes", "true")


def check_tokenizer(tokenizer: str | None) -> list[Finding]:
    """Check that the files of a tokenizer are here, or can be downloaded.

    Args:
        tokenizer: the name; None looks for the files of `gpt2`, which a run may not need.
    """
    name = "tokenizer"
    variables = {**_OFFLINE, **dict.fromkeys(_NOT_OFFLINE, "")}
    try:
        files = call_in_child(load, tokenizer or "gpt2", within_s=_WITHIN_S, variables=variables)
    except ChildError:
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        found = f"the files of {tokenizer or 'gpt2'} are not in {folder or 'the cache'}"
        if _status(_TOKENIZER_HOST) is not None:
            return [ok(name, f"{found}: the first use downloads them")]
        found += ", and their server cannot be reached"
        remedy = "Connect, or set TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer bytes."
        return [warn(name, found, remedy) if tokenizer is None else fail(name, found, remedy)]
    return [ok(name, f"{tokenizer or 'gpt2'} has {files:,} ids")]


def load(tokenizer: str) -> int:
    """Load a tokenizer, and return the number of its ids; for a child process.

    Raises:
        DataError: its files are missing.
    """
    from owt_data import load_tokenizer  # in the child alone: it takes a second

    return load_tokenizer(tokenizer).n_vocab


def check_data(source: str) -> list[Finding]:
    """Check that data is here, or is a dataset of a hub that answers.

    Args:
        source: one name of `--data`.
    """
    name = "data"
    try:
        repository = call_in_child(hub_repository, source, within_s=_WITHIN_S)
    except ChildError as error:
        return [fail(name, str(error), "Correct --data.")]
    if repository is None:
        return [ok(name, f"{source} is here")]
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return [_copy(name, repository)]
    hub = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    token = os.environ.get("HF_TOKEN")
    status = _status(f"{hub}/api/datasets/{repository}", {"Authorization": f"Bearer {token}"} if token else {})
    if status is None:
        remedy = "Connect, or download it elsewhere and set HF_HUB_OFFLINE=1, or give a file."
        return [fail(name, f"{hub} cannot be reached for {repository}", remedy)]
    if status in (401, 403, 404):
        found = f"{hub} has no dataset {repository}, or shows it to others alone"
        return [fail(name, found, "Correct the name, or set HF_TOKEN.")]
    if status != 200:
        return [warn(name, f"{hub} answers with status {status} for {repository}", "Try again later.")]
    return [ok(name, f"{hub} has {repository}")]


def hub_repository(source: str) -> str | None:
    """Return the repository of a name on the hub, or None for files that are here; for a child process.

    Raises:
        DataError: the name refers to nothing.
    """
    from owt_data import find_source, is_prepared  # in the child alone: it takes a second

    if is_prepared(source):
        return None
    found = find_source(source)
    return found.hub_address[0] if found.kind == "hub" else None


def _copy(name: str, repository: str) -> Finding:
    """Return whether a dataset has been downloaded."""
    home = os.environ.get("HF_HOME") or platformdirs.user_cache_path("huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    copies = [path for path in cache.glob("*___*") if _letters(path.name) == _letters(repository)]
    if not copies:
        found = f"HF_HUB_OFFLINE is set, and {cache} has no copy of {repository}"
        return warn(name, found, "Unset HF_HUB_OFFLINE, or download the dataset first.")
    return ok(name, f"a copy of {repository} is in {copies[0]}")


def _letters(text: str) -> str:
    """Return the letters and digits of a name: `datasets` changes the others, and capitals."""
    return "".join(filter(str.isalnum, text)).lower()


def _status(url: str, headers: Mapping[str, str] | None = None) -> int | None:
    """Return the status of an address, or None if nothing answers in time. Waits for the network."""
    try:
        request = urllib.request.Request(url, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=_ANSWER_WITHIN_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None
