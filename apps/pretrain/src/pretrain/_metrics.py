"""`metrics.jsonl`: one JSON object per logged step, in the order of steps."""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""Keys among step, loss, val_loss, learning_rate, grad_norm, num_skipped, tokens_per_s, step_s, data_wait_s, mfu."""


def read_metrics(path: Path) -> list[Record]:
    """The records, less a last line that a crash cut off."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def append_metrics(path: Path, record: Record) -> None:
    """Add a record."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def cut_metrics(path: Path, last_step: int) -> list[Record]:
    """Drop the records after `last_step`, which a resumed run will write again. Returns those that stay."""
    kept = [record for record in read_metrics(path) if record["step"] <= last_step]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(partial, path)
    return kept
