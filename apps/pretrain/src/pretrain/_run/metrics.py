"""`metrics.jsonl`: one JSON object per recorded step, in the order of steps."""

import hashlib
import math
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pretrain._run.files import read_lines
from pretrain._run.partial_reads import last_lines, lines_backwards, lines_from

Record = dict[str, Any]
"""Metrics of a step. A record lacks the metrics that are unknown. All but `windows` are numbers.

- `step`, `tokens`, `epoch`: the updates, the training tokens, and the passes over the training windows up to here.
- `time_s`: Unix time.
- `windows`: the windows of this step alone, as the first 16 digits of the SHA-256 of `owt_data.step_starts`, int64,
  little-endian.
- `loss`: mean training loss of the steps since the last record, nats per token. Skipped steps do not count.
- `grad_norm_max`: largest norm of the gradient, before clipping, of these steps.
- `num_skipped`: steps of the run that made no update, if there are any.
- `skipped_step`: the last one of these steps, if it is after the last record.
- `spike_step`, `spike_score`: the step of the largest spike of the loss since the last record, if there is one, and its
  score: see `pretrain._run.spikes`.
- `learning_rate`: of this step.
- `val_loss`: mean loss in nats per token on `train.eval_tokens` of the validation tokens.
- `val_bits_per_byte`: the same in bits per byte of the text. End-of-text tokens count in the loss, and have no bytes.
- `full_val_loss`, `full_val_bits_per_byte`: the same on all validation tokens; in the record of the last step.
- `val_loss/NAME`, `full_val_loss/NAME`: the same on the validation tokens of each name of a mixture, by its label.
- `step_s`, `tokens_per_s`, `data_wait_s`: mean seconds of a step, tokens per second, and mean seconds that a step waits
  for data, since the last record. Compiling, evaluations and saves do not count.
- `mfu`: share of the peak of all devices.
- `memory_bytes`: the most memory that the first device has used.
"""

TEXT_METRICS = ("windows",)
"""The values of a record that are texts."""

_VALIDATION = ("val_", "full_val_")
_DIGITS = 6
_WINDOWS_DIGITS = 16
_FEW_BYTES = 1 << 18
_NUM_LAST = 64
_NUM_SPREAD = 64


def rounded(record: Record) -> Record:
    """Return the record with 6 significant digits, except the time.

    >>> rounded({"step": 10, "loss": 1.23456789, "time_s": 1700000000.123})
    {'step': 10, 'loss': 1.23457, 'time_s': 1700000000.123}
    """
    return {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and name != "time_s" else value
        for name, value in record.items()
    }


def of_sources(record: Record) -> dict[str, float]:
    """Return the validation loss of each name of a mixture, by its label: on all of its tokens, if they were evaluated.

    >>> of_sources({"step": 5, "val_loss": 2.5, "val_loss/web": 3.0, "val_loss/code": 2.0, "full_val_loss/web": 3.25})
    {'web': 3.25, 'code': 2.0}
    """
    found: dict[str, float] = {}
    for prefix in ("val_loss/", "full_val_loss/"):
        found |= {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
    return found


def finite(record: Record) -> Record:
    """Return the record without values that are not finite: they are unknown, and JSON cannot hold them."""
    return {name: value for name, value in record.items() if not isinstance(value, float) or math.isfinite(value)}


def numbers(record: Record) -> Record:
    """Return the finite numbers of a record."""
    return {name: value for name, value in finite(record).items() if name not in TEXT_METRICS}


def last_values(records: Iterable[Record]) -> Record:
    """Return the last value of each metric that is a number."""
    final: Record = {}
    for record in records:
        final |= numbers(record)
    return final


def of_trained(records: Sequence[Record]) -> Iterator[Record]:
    """Yield records, in the order of steps, without the validation of the untrained model if there are later steps.

    >>> list(of_trained([{"step": 0, "val_loss": 5.5}, {"step": 10, "loss": 4.5}]))
    [{'step': 0}, {'step': 10, 'loss': 4.5}]
    """
    is_trained = bool(records) and records[-1]["step"] > 0
    for record in records:
        is_untrained = is_trained and record["step"] == 0
        yield {name: value for name, value in record.items() if not (is_untrained and name.startswith(_VALIDATION))}


def windows_digest(starts: NDArray[np.int64]) -> str:
    """Return the value `windows` of a record.

    Args:
        starts: the result of `owt_data.step_starts`, `int64[G]`.

    >>> windows_digest(np.array([30, 0, 10]))
    '99a2fae3423c5768'
    """
    return hashlib.sha256(starts.astype("<i8").tobytes()).hexdigest()[:_WINDOWS_DIGITS]


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, in the order of steps. A missing file has none."""
    return sorted(read_lines(path, TEXT_METRICS), key=itemgetter("step"))


class Numbers(Sequence[Record]):
    """The numbers of the records of a file, in the order of steps, in 8 bytes each.

    Args:
        path: the file. A missing file has no records.
    """

    def __init__(self, path: Path) -> None:
        columns = dict[str, "array[float]"]()
        self._num_records = 0
        self._integers: set[str] = set()
        for record in lines_from(path, 0, TEXT_METRICS):
            for name, value in numbers(record).items():
                if name not in columns:
                    columns[name] = array("d", [math.nan]) * self._num_records
                    self._integers.add(name)
                columns[name].append(value)
                if isinstance(value, float):
                    self._integers.discard(name)
            self._num_records += 1
            for column in columns.values():
                if len(column) < self._num_records:
                    column.append(math.nan)
        order = np.argsort(columns.get("step", array("d")), kind="stable")
        self._columns = {name: np.asarray(column)[order] for name, column in columns.items()}

    def __len__(self) -> int:
        """Return the number of records."""
        return self._num_records

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Return a record, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        found = ((name, column[number].item()) for name, column in self._columns.items())
        return {name: int(value) if name in self._integers else value for name, value in found if not math.isnan(value)}


def recent_records(path: Path, eval_every: int) -> list[Record]:
    """Read the last records, and some of the earlier ones. A file with few records is read whole.

    The earlier ones are those of a number of steps, evenly spread, and those of a number of validations. The cost grows
    with the logarithm of the number of records.

    Args:
        path: the file.
        eval_every: steps from a validation to the next one.
    """
    if not path.exists() or path.stat().st_size <= _FEW_BYTES:
        return read_records(path)
    last = last_lines(path, _NUM_LAST, TEXT_METRICS)
    first = next(lines_from(path, 0, TEXT_METRICS), None)
    if not last or first is None:
        return []
    step = last[-1]["step"]
    validations = np.linspace(0, step // eval_every, _NUM_SPREAD).astype(int) * eval_every
    newest = [step - step % eval_every - eval_every * before for before in range(2)]
    wanted = {*np.linspace(first["step"], step, _NUM_SPREAD).astype(int), *validations, *newest}
    found = (next(lines_from(path, int(wanted_step), TEXT_METRICS), None) for wanted_step in wanted)
    records = {record["step"]: record for record in (first, *found, *last) if record is not None}
    return [records[step] for step in sorted(records)]


def cut_lines(path: Path, last_step: int, texts: Collection[str] = ()) -> None:
    """Drop the lines after `last_step`, which a resumed run writes again.

    Args:
        path: a file of JSON objects, one per line, in the order of steps. It may be missing.
        last_step: the last step to keep.
        texts: names whose values are texts.
    """
    if not path.exists():
        return
    kept = (end for end, line in lines_backwards(path, texts) if line["step"] <= last_step)
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), next(kept, 0))
        os.fsync(file.fileno())
