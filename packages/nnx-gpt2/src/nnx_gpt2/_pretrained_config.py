"""The config of a saved model, without its weights. Imports no jax."""

import contextlib
import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

from nnx_gpt2._errors import check_path, check_type, one_line, require, shown, state_error, value_error
from nnx_gpt2._model_config import GPT2Config

CONFIG_FILE = "config.json"
AGAIN = "Save or download the model again."

# Sizes of a model: the fields of `GPT2Config`, and their names in `config.json`.
_SIZES = {
    "vocab_size": "vocab_size",
    "seq_len": "n_positions",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "embed_dim": "n_embd",
    "mlp_dim": "n_inner",
}
# Fields of `config.json` that change the network, and the values that this model supports.
_SUPPORTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def pretrained_config(
    path_or_name: str | os.PathLike[str], *, revision: str | None = None, **changes: Any
) -> GPT2Config:
    """Return the config that `GPT2.from_pretrained` would give a model, without its weights and without jax.

    Args:
        path_or_name: a folder, or a repository on the hub such as `gpt2-medium` (needs the extra `hub`). Only
            `config.json` is downloaded.
        revision: branch, tag or commit on the hub.
        changes: fields of `GPT2Config`; see `GPT2.from_pretrained`.

    Raises:
        ValueError: the file does not describe a GPT-2 that this package can compute, or see `GPT2.from_pretrained`.
    """
    check_changes(changes)
    return with_changes(read_config(locate_pretrained(path_or_name, revision, [CONFIG_FILE])), changes)


def check_changes(fields: dict[str, Any]) -> None:
    """Check the fields of `GPT2Config` that a caller sets, before any file is read.

    Raises:
        ValueError: a field does not exist, describes the weights, or has a wrong value.
    """
    names = [x.name for x in dataclasses.fields(GPT2Config) if x.name not in (*_SIZES, "norm_epsilon")] + ["seq_len"]
    for name in fields:
        require(name in names, "a changed field", f"be one of {', '.join(names)}", one_line(name))
    GPT2Config(**fields)


def locate_pretrained(path_or_name: str | os.PathLike[str], revision: str | None, patterns: list[str]) -> Path:
    """Return the folder of a saved model. A name that is not a folder is downloaded from the hub.

    Args:
        path_or_name: see `GPT2.from_pretrained`.
        revision: see `GPT2.from_pretrained`.
        patterns: names of the files to download. They may contain `*`.
    """
    folder = check_path("path or name", path_or_name)
    check_type("revision", revision, str | None)
    with contextlib.suppress(OSError):  # such as a name that no file can have
        if folder.exists():
            require(folder.is_dir(), "path or name", "be a folder", one_line(folder))
            return folder
    return _download(os.fsdecode(path_or_name), revision, patterns)


def with_changes(saved: GPT2Config, fields: dict[str, Any]) -> GPT2Config:
    """Return the config of a saved model with changed fields. It may have fewer positions, but not more."""
    config = dataclasses.replace(saved, **fields)
    most = saved.seq_len
    require(config.seq_len <= most, "seq_len", f"be at most {most}, the positions of the saved model", config.seq_len)
    return config


def read_config(folder: Path) -> GPT2Config:
    """Read the config of a saved model."""
    path = folder / CONFIG_FILE
    published = read_object(path)
    for name, values in _SUPPORTED.items():
        value = published.get(name, values[0])
        choices = " or ".join(map(repr, values))
        require(value in values, f"{name} in {path}", f"be {choices}", shown(value), "Only GPT-2 can be loaded.")
    sizes: dict[str, Any] = {ours: published.get(theirs) for ours, theirs in _SIZES.items()}
    epsilon = published.get("layer_norm_epsilon", 1e-5)
    try:
        return GPT2Config(**sizes, norm_epsilon=epsilon)
    except ValueError as error:
        found = f"an error in it: {str(error).rstrip('.')}"
        raise value_error(str(path), "describe a GPT-2", found, AGAIN) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        check_regular(path)
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise value_error(str(path), "be a file with a JSON object", f"an error ({error})", AGAIN) from error


def check_regular(path: Path) -> None:
    """Reject pipes and devices, which could block or have no end, before they are opened.

    Raises:
        OSError: the path is no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download  # an extra: local folders do not need it
        from huggingface_hub.errors import (
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        remedy = "To download it from the hub, install nnx-gpt2[hub]."
        raise value_error("path or name", "be a folder", one_line(name), remedy) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        constraint = "be a folder, or NAME or OWNER/NAME on the hub, of the letters a to z, digits, '-', '_' and '.'"
        raise value_error("path or name", constraint, one_line(name)) from error
    except LocalEntryNotFoundError as error:
        raise state_error(
            f"the files of {one_line(name)} are not in the cache of the hub, and the hub cannot be reached. Connect to "
            "the network for the first use, and unset HF_HUB_OFFLINE."
        ) from error
    except RevisionNotFoundError as error:
        found = one_line(str(revision))
        raise state_error(f"the model {one_line(name)} has no revision {found} on the hub. Correct it.") from error
    except RepositoryNotFoundError as error:
        raise state_error(
            f"the hub has no model {one_line(name)}, or shows it to others alone. Correct the name, or set HF_TOKEN."
        ) from error
    except Exception as error:  # the disk's, the hub's or its HTTP client's, which have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise state_error(
            f"the download of {one_line(name)} from the hub has failed: {one_line(reason, 200)}. Repeat it to continue."
        ) from error
