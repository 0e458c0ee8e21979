"""`result.json`: the result of a finished run."""

import dataclasses
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pretrain._run.files import check_kind, parse_json, write_json
from pretrain._run.folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The content of `result.json`. A field is None if the run's files do not have its value."""

    steps: int | None
    """Steps of the run."""

    metrics: dict[str, float]
    """The last value of each metric."""

    restarts: int | None
    """Starts of the workers after the first."""

    workers: int | None
    """Workers of the last start."""

    num_params: int | None = None
    """Parameters of the model."""

    tokens: int | None = None
    """Training tokens seen."""

    epochs: float | None = None
    """Passes over the training windows."""

    full_val_loss: float | None = None
    """Mean loss on all validation tokens after the last step, in nats per token: that of the command `eval`."""

    full_val_bits_per_byte: float | None = None
    """The same in bits per byte of text."""

    best_val_loss: float | None = None
    """Lowest validation loss, on `train.eval_tokens` validation tokens."""

    best_val_step: int | None = None
    """Step of the lowest validation loss."""

    last_val_loss: float | None = None
    """Last validation loss, on `train.eval_tokens` validation tokens."""

    last_val_step: int | None = None
    """Step of the last validation loss."""

    began_at: str | None = None
    """Time of the first start, ISO 8601, UTC."""

    ended_at: str | None = None
    """Time of the end, ISO 8601, UTC."""

    device: str | None = None
    """Name of a device in JAX, at the last start."""

    devices: int | None = None
    """Number of devices, at the last start."""

    commit: str | None = None
    """Commit of the source code at the first start, if it is a git checkout; with `-dirty` if files differed."""

    repeat: str | None = None
    """Command that repeats the run under another name, given in the same folder with the same versions."""

    hardware: str | None = None
    """Hardware of the first start."""

    processor: str | None = None
    """Processor of the first worker, at the last start."""

    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of the packages at the first start."""

    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the tokens (`data`), of the options that change a result (`config`), and of the items `params` and
    `opt_state` of the last checkpoint: see `pretrain._run.checkpoint_digests`."""

    tokens_per_s: float | None = None
    """Training tokens per second, over all steps. Compiling, evaluations and saves do not count."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the run, over all its starts: see `pretrain._run.history.PhaseName`. Their sum is the
    `work_s` of `runs --json`."""


def write_result(folder: RunFolder, result: RunResult) -> None:
    """Write `result.json`, which marks the run as finished."""
    write_json(folder.result, dataclasses.asdict(result))


def read_result(folder: RunFolder) -> RunResult | None:
    """Read `result.json`. Return None if the run is not finished.

    A damaged file counts as missing: the run then continues from its last checkpoint, and writes the file again.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
    """
    check_kind(folder.result)
    if not folder.result.exists():
        return None
    try:
        result = parse_json(RunResult, folder.result.read_bytes(), folder.result, "The run writes it again.")
        for time in (result.began_at, result.ended_at):
            datetime.fromisoformat(time or as_utc(0.0))
        _check(result)
    except ValueError:
        return None
    return result


def _check(result: RunResult) -> None:
    """Check that numbers are finite, that only metrics are negative, and that a validation loss has its step.

    Raises:
        ValueError: the result is none that a run writes.
    """
    amounts = [*dataclasses.asdict(result).values(), *result.seconds.values()]
    if not all(0 <= amount < math.inf for amount in amounts if isinstance(amount, int | float)):
        raise ValueError("a number is negative or not finite")
    if not all(map(math.isfinite, result.metrics.values())):
        raise ValueError("a metric is not finite")
    validations = (result.best_val_loss, result.best_val_step), (result.last_val_loss, result.last_val_step)
    if any((loss is None) != (step is None) for loss, step in validations):
        raise ValueError("a validation must have a loss and a step")


def as_utc(time_s: float) -> str:
    """Return a Unix time as ISO 8601.

    >>> as_utc(0.0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
