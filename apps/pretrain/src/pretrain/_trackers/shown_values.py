"""Names and values that every tracker shows."""

import dataclasses
import json
from typing import Any

from pretrain._run.description import RunDescription
from pretrain._run.differences import changes_result, option_values
from pretrain._run.metrics import Record, numbers

_TAGS = {
    "loss": "train/loss",
    "val_loss": "val/loss",
    "full_val_loss": "val/full_loss",
    "val_bits_per_byte": "val/bits_per_byte",
    "full_val_bits_per_byte": "val/full_bits_per_byte",
    "grad_norm_max": "optimizer/grad_norm_max",
    "learning_rate": "optimizer/learning_rate",
    "num_skipped": "optimizer/num_skipped",
    "skipped_step": "optimizer/skipped_step",
    "spike_step": "optimizer/spike_step",
    "spike_score": "optimizer/spike_score",
    "epoch": "progress/epoch",
    "tokens": "progress/tokens",
    "data_wait_s": "speed/data_wait_s",
    "memory_bytes": "speed/memory_bytes",
    "mfu": "speed/mfu",
    "step_s": "speed/step_s",
    "tokens_per_s": "speed/tokens_per_s",
}


def tagged(record: Record) -> dict[str, float]:
    """Return the metrics of a record by their tag: a group and a name. Services show a section for each group.

    >>> tagged({"step": 10, "time_s": 1.7e9, "loss": 2.5, "mfu": 0.25, "val_loss/web": 3.5})
    {'train/loss': 2.5, 'speed/mfu': 0.25, 'val/loss/web': 3.5}
    """
    return {_tag(name): value for name, value in numbers(record).items() if name not in ("step", "time_s")}


def _tag(name: str) -> str:
    """Return the tag of a metric. That of a name of a mixture ends with this name."""
    metric, slash, source = name.partition("/")
    return f"{_TAGS.get(metric, metric)}{slash}{source}"


def settings(description: RunDescription) -> dict[str, Any]:
    """Return the configuration of a run with its hardware, versions and commit."""
    found = {name: getattr(description, name) for name in ("hardware", "versions", "commit")}
    return dataclasses.asdict(description.config) | found


def hyperparameters(description: RunDescription) -> dict[str, bool | float | str]:
    """Return the options that change the result of a run, by their dotted names. Options that are none are left out."""
    values = option_values(description.config)
    return {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for name, value in values.items()
        if changes_result(name) and value is not None
    }
