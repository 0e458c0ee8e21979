"""The digests of the arrays of a checkpoint, in its metadata."""

from collections.abc import Mapping
from typing import Any

DIGESTS = "digests"
"""The key of the digests in the metadata of a checkpoint: `{"params": ROOT, "opt_state": ROOT, "tensors": {...}}`.

A root is the digest of all arrays of an item, by `nnx_gpt2.root_digest`. `tensors` has the SHA-256 of each array by the
name of its item, then by its own name: see `nnx_gpt2.tensor_digests`.
"""

TENSORS = "tensors"


def roots(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the root of each item of a checkpoint, from its metadata; empty for a checkpoint without digests."""
    return {name: root for name, root in metadata.get(DIGESTS, {}).items() if name != TENSORS}
