"""`metrics.jsonl`: one JSON object per recorded step, in the order of steps."""

import json
import math
from pathlib import Path
from typing import Any

from pretrain._run.files import read_lines, write_durably

Record = dict[str, Any]
"""Metrics of a step: step, epoch, tokens, loss, val_loss, learning_rate, grad_norm, num_skipped, tokens_per_s, step_s,
data_wait_s, mfu. A record lacks the metrics that are unknown. (Records of pretrain 0.7 and earlier lack the epoch, the
training windows seen per windows of the data, and the tokens, the training tokens seen.)"""


def finite(record: Record) -> Record:
    """Return the record without values that are not finite: they are unknown, and JSON cannot hold them."""
    return {name: value for name, value in record.items() if not isinstance(value, float) or math.isfinite(value)}


def last_values(records: list[Record]) -> Record:
    """Return the last value of each metric."""
    final: Record = {}
    for record in records:
        final |= finite(record)
    return final


def cut_metrics(path: Path, last_step: int) -> list[Record]:
    """Drop the records after `last_step`, which a resumed run writes again. Return the remaining records."""
    kept = [record for record in read_lines(path) if record["step"] <= last_step]
    write_durably(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept
