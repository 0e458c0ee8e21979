"""Upload of an exported folder to the Hugging Face hub, by its own client."""

import fnmatch
import sys
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, get_token, httpx, validate_repo_id

from pretrain._errors import UsageError, short

# The files of an earlier export that readers would take for a part of this one.
_STALE = ("model*.safetensors", "model.safetensors.index.json")


def check_repository(name: str) -> None:
    """Check the name of a repository, and that there is a token, before anything else is done.

    Raises:
        UsageError: the name is not OWNER/NAME, or there is no token.
    """
    try:
        validate_repo_id(name)
        is_name = name.count("/") == 1
    except HFValidationError:
        is_name = False
    if not is_name:
        raise UsageError(f"--push-to must be OWNER/NAME of a repository on the hub, got {short(name)}.")
    if get_token() is None:
        raise UsageError("--push-to needs a token of the hub, got none. Set HF_TOKEN, or run: hf auth login")


def upload(folder: Path, name: str, *, message: str) -> str:
    """Upload a folder as one commit. A repository that does not exist is created, as a private one.

    Args:
        folder: the folder. It has no folders in it.
        name: OWNER/NAME of the repository, at the hub of `HF_ENDPOINT`.
        message: the first line of the commit.

    Returns:
        The address of the commit.

    Raises:
        UsageError: the hub cannot be reached, or rejects the upload. The repository is as it was.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="pretrain", library_version=version("pretrain"))
    try:
        api.create_repo(name, private=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
        stale = [
            path
            for path in api.list_repo_files(name)
            if path not in names and any(fnmatch.fnmatchcase(path, pattern) for pattern in _STALE)
        ]
        operations = [
            *(CommitOperationDelete(path_in_repo=path, is_folder=False) for path in sorted(stale)),
            *(CommitOperationAdd(path_in_repo=path, path_or_fileobj=folder / path) for path in sorted(names)),
        ]
        return api.create_commit(name, operations, commit_message=message).commit_url
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: of `hf_xet`
        causes = [error] if error.__cause__ is None else [error, error.__cause__]
        texts = [" ".join(str(one).split()).rstrip(".") or type(one).__name__ for one in causes]
        reason = "; ".join(dict.fromkeys(texts))  # each text once
        raise UsageError(
            f"{folder} is complete, but its upload to {name} failed: {reason}. The same command uploads it."
        ) from error
