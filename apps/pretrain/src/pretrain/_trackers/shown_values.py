"""Names and values that every tracker shows."""

import dataclasses
from typing import Any

from pretrain._run.description import RunDescription
from pretrain._run.metrics import Record

_TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/val",
    "full_val_loss": "full_loss/val",
    "val_bits_per_byte": "bits_per_byte/val",
    "full_val_bits_per_byte": "full_bits_per_byte/val",
    "grad_norm_max": "optimizer/grad_norm_max",
    "learning_rate": "optimizer/learning_rate",
    "num_skipped": "optimizer/num_skipped",
    "epoch": "progress/epoch",
    "tokens": "progress/tokens",
    "data_wait_s": "speed/data_wait_s",
    "memory_bytes": "speed/memory_bytes",
    "mfu": "speed/mfu",
    "step_s": "speed/step_s",
    "tokens_per_s": "speed/tokens_per_s",
}


def tagged(record: Record) -> dict[str, float]:
    """Return the metrics of a record by their tag: a group and a name.

    >>> tagged({"step": 10, "time_s": 1.7e9, "loss": 2.5, "mfu": 0.25})
    {'loss/train': 2.5, 'speed/mfu': 0.25}
    """
    return {_TAGS.get(name, name): value for name, value in record.items() if name not in ("step", "time_s")}


def settings(description: RunDescription) -> dict[str, Any]:
    """Return the configuration of a run with its hardware, versions and commit."""
    found = {name: getattr(description, name) for name in ("hardware", "versions", "commit")}
    return dataclasses.asdict(description.config) | found
