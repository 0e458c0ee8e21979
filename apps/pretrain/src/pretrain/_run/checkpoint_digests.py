"""The digests of the arrays of a checkpoint, in its metadata."""

from collections.abc import Mapping
from typing import Any

from nnx_gpt2 import root_digest, tensor_digests

DIGESTS = "digests"
"""The key of the digests in the metadata of a checkpoint: `{"params": ROOT, "opt_state": ROOT, "tensors": {...}}`.

A root is the digest of all arrays of an item, by `nnx_gpt2.root_digest`. `tensors` has the SHA-256 of each array by the
name of its item, then by its own name: see `nnx_gpt2.tensor_digests`.
"""


def digests_of(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of the items of a checkpoint. A collective: see `nnx_gpt2.tensor_digests`."""
    tensors = {name: tensor_digests(tree) for name, tree in items.items()}
    return {name: root_digest(of_item) for name, of_item in tensors.items()} | {"tensors": tensors}


def roots(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the root of each item of a checkpoint, from its metadata; empty for a checkpoint without digests."""
    return {name: root for name, root in metadata.get(DIGESTS, {}).items() if name != "tensors"}
