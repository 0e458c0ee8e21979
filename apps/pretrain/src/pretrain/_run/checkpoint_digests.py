"""The digests of the arrays of a checkpoint, in its metadata, and those of the data and the options of a run."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pretrain._run.description import RunDescription
from pretrain._run.differences import changes_result, option_values

DIGESTS = "digests"
"""The key of the digests in the metadata of a checkpoint: `{"params": ROOT, "opt_state": ROOT, "tensors": {...}}`.

A root is the digest of all arrays of an item, by `nnx_gpt2.root_digest`. `tensors` has the SHA-256 of each array by the
name of its item, then by its own name: see `nnx_gpt2.tensor_digests`.
"""

TENSORS = "tensors"


def roots(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the root of each item of a checkpoint, from its metadata."""
    return {name: root for name, root in metadata[DIGESTS].items() if name != TENSORS}


def description_digests(description: RunDescription) -> dict[str, str]:
    """Return the SHA-256 of what decides the result of a run: `data`, its tokens, and `config`, its options.

    The place of the data, and options that do not change a result, such as the intervals, do not count.
    """
    data = description.data
    tokens = {**data.fingerprint, "tokenizer": data.tokenizer_kind, "window_order_version": data.window_order_version}
    options = {
        name: value
        for name, value in option_values(description.config).items()
        if changes_result(name) and name != "data" and not name.startswith("prepare.")
    }
    texts = {"data": json.dumps(tokens, sort_keys=True), "config": json.dumps(options, sort_keys=True)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
