"""`step_losses.f32` and `val_losses.f32`: the loss of each step, and of each validation window after the last step.

Both are little-endian float32, nats per token. Entry i of the first is the mean loss of the batch of step i + 1; NaN
for a step that made no update or whose loss is lost. The second has the mean loss of each window of the full
validation, in the order of the text, and one entry more: the number of tokens that the last window counts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrain._errors import UsageError
from pretrain._run.files import check_kind, write_durably

STEP_LOSSES = "step_losses.f32"
VAL_LOSSES = "val_losses.f32"

_DTYPE = np.dtype("<f4")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValLosses:
    """The losses of the validation windows after the last step."""

    losses: NDArray[np.float32]
    """Mean loss of each window, `float32[N]`, nats per token."""

    last_count: int
    """Tokens that the last window counts. All others count `seq_len` tokens."""

    of_sources: dict[str, float] = field(default_factory=dict)
    """Mean loss of each name of a mixture, by its label, nats per token. It is in the records, not in the file."""


def read_step_losses(path: Path) -> NDArray[np.float32]:
    """Read the losses of the steps of a run, `float32[N]`. A missing file has no losses.

    The bytes of an entry that a kill has cut are dropped.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
    """
    check_kind(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return np.zeros(0, np.float32)
    return decode_losses(content)


def write_step_losses(path: Path, first_step: int, losses: Sequence[float] | NDArray[np.float32]) -> None:
    """Write the losses of consecutive steps at the end. Entries that are missing before them become NaN.

    Args:
        path: the file, which loses the entries of these steps and of later ones.
        first_step: the first of the steps, at least 1.
        losses: a loss for each step.

    Raises:
        OSError: the file cannot be written, or is a pipe or a device.
    """
    check_kind(path)
    with path.open("r+b" if path.exists() else "w+b") as file:
        _resize(file.fileno(), first_step - 1)
        os.pwrite(file.fileno(), encode_losses(losses), (first_step - 1) * _DTYPE.itemsize)


def cut_step_losses(path: Path, num_steps: int) -> None:
    """Drop the losses after a step, which a continued run writes again. Entries that are missing become NaN.

    Args:
        path: the file.
        num_steps: the number of entries to keep.

    Raises:
        OSError: the file cannot be written, or is a pipe or a device.
    """
    check_kind(path)
    with path.open("r+b" if path.exists() else "w+b") as file:
        _resize(file.fileno(), num_steps)


def _resize(descriptor: int, num_entries: int) -> None:
    """Cut a file to this number of entries, or add NaN at its end."""
    num_found = os.fstat(descriptor).st_size // _DTYPE.itemsize
    os.ftruncate(descriptor, min(num_found, num_entries) * _DTYPE.itemsize)
    if num_found < num_entries:
        os.pwrite(descriptor, _nan(num_entries - num_found), num_found * _DTYPE.itemsize)


def _nan(num_entries: int) -> bytes:
    return np.full(max(0, num_entries), np.nan, _DTYPE).tobytes()


def encode_losses(losses: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Return losses as the bytes of a file."""
    return np.asarray(losses, _DTYPE).tobytes()


def decode_losses(content: bytes) -> NDArray[np.float32]:
    """Return the losses in the bytes of a file, without an entry that is cut."""
    return np.frombuffer(content, _DTYPE, len(content) // _DTYPE.itemsize).astype(np.float32)


def write_val_losses(path: Path, losses: ValLosses) -> None:
    """Write the losses of the validation windows. A power cut leaves the old file or the new one."""
    write_durably(path, encode_losses(np.append(losses.losses, np.float32(losses.last_count))))


def read_val_losses(path: Path, seq_len: int) -> ValLosses | None:
    """Read the losses of the validation windows. Return None if the run has not written any.

    Args:
        path: the file.
        seq_len: inputs per window.

    Raises:
        UsageError: the file is damaged.
        OSError: the file cannot be read, or is a pipe or a device.
    """
    check_kind(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    entries = decode_losses(content)
    last_count = entries[-1].item() if len(entries) > 1 else 0.0
    if len(content) % _DTYPE.itemsize or not (last_count.is_integer() and 1 <= last_count <= seq_len):
        raise UsageError(
            f"{path} must be losses of windows as a run writes them, got a damaged file. Restore it from a copy, or "
            "delete it to compare the run without it."
        )
    return ValLosses(losses=entries[:-1], last_count=int(last_count))
