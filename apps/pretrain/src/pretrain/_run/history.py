"""The history of a run, read from its folder alone."""

import contextlib
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from nnx_gpt2 import num_params
from pretrain._errors import UsageError
from pretrain._run.checkpoint_digests import description_digests
from pretrain._run.description import RunDescription, read_description
from pretrain._run.files import read_lines
from pretrain._run.folder import RunFolder
from pretrain._run.log_parts import PHASES, SAMPLES, SCORES, STARTS, TEXTS
from pretrain._run.metrics import TEXT_METRICS, Numbers, Record, finite, last_values, of_trained, recent_records
from pretrain._run.partial_reads import last_lines
from pretrain._run.result import RunResult, as_utc, read_result

PhaseName = Literal[
    "starting",  # of the command: data, Ray, workers, imports
    "loading",  # of the checkpoint, or the initialization of the model
    "compiling",  # of the train step, until the end of the first step
    "training",
    "evaluating",
    "saving",  # the part of a save that the training waits for
    "sampling",
    "restarting",  # from the last sign of life of the former workers to the start of new ones
    "stopped",  # by Ctrl-C, or by a kill that the next command has found, until the command is given again
    "failed",  # after its last failure, until the command is given again
    "finished",
]
ENDS: tuple[PhaseName, ...] = ("stopped", "failed", "finished")
"""The phases in which no command runs."""

TASKS = "tasks/"
"""The beginning of the names of scores on tasks: `tasks/NAME/METRIC`, and `tasks/NAME/METRIC_stderr`."""

SCORED_STEP = "tasks/step"
"""The name of the step of the checkpoint that has the scores of a record."""

RECENT_PHASES = 64
"""The number of phases of a history that `read_recent` returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A phase of a run. It lasts until the next one. Rank 0 writes the phases."""

    step: int
    """The step at its beginning."""

    time_s: float
    """Unix time of its beginning."""

    phase: PhaseName
    """Name of the phase."""

    before_s: float = 0.0
    """Seconds of all phases of the run before it, without the time in which no command ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A text that the model wrote at a validation, from the same prompt and key each time."""

    step: int
    """Step of the model that wrote it."""

    prompt: str
    """The beginning of the text."""

    text: str
    """The text, with its prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """The contents of the files of a run."""

    folder: RunFolder
    """The run's folder."""

    description: RunDescription
    """Configuration, data, hardware and versions."""

    records: Sequence[Record]
    """Metrics that are numbers, in the order of steps: see `pretrain._run.metrics.Record`."""

    starts: Sequence[dict[str, Any]]
    """Starts of the workers, in the order of time: `step`, `time_s`, `began_s` (Unix time of the command), `workers`,
    `devices`, `device`."""

    phases: Sequence[Phase]
    """Phases, in the order of time. After a restart, the step may be an earlier one."""

    samples: Sequence[Sample]
    """Samples, in the order of steps."""

    result: RunResult | None
    """The result of a finished run; None before its end."""

    scores: Sequence[Record] = ()
    """Scores of checkpoints on tasks, in the order of the steps of the checkpoints: see `read_scores`."""


def read_history(folder: RunFolder, description: RunDescription | None = None) -> RunHistory:
    """Read the files of a run. For a run in object storage, call `RunFolder.pull` before.

    Args:
        folder: the run's folder.
        description: the run's description, if it is known.

    Raises:
        UsageError: the folder holds no run, or `config.json` is damaged.
        OSError: a file cannot be read.
    """
    return RunHistory(
        folder=folder,
        description=description or _described(folder),
        records=Numbers(folder.metrics),
        starts=read_starts(folder),
        phases=read_phases(folder),
        samples=read_samples(folder),
        result=read_result(folder),
        scores=read_scores(folder),
    )


def read_recent(folder: RunFolder, description: RunDescription | None = None) -> RunHistory:
    """Read the end of a run, and some of its earlier records: what tells how far it is, whatever its length.

    The arguments and the errors are those of `read_history`. The history has the last phases and no samples.
    """
    description = description or _described(folder)
    return RunHistory(
        folder=folder,
        description=description,
        records=recent_records(folder.metrics, description.config.train.eval_every),
        starts=read_starts(folder),
        phases=recent_phases(folder),
        samples=(),
        result=read_result(folder),
        scores=read_scores(folder),
    )


def _described(folder: RunFolder) -> RunDescription:
    description = read_description(folder)
    if description is None:
        raise UsageError(f"{folder} must be the folder of a run, got none. Give another folder.")
    return description


def read_phases(folder: RunFolder) -> list[Phase]:
    """Read the phases of a run."""
    return as_phases(read_lines(folder.phases, TEXTS[PHASES]))


def recent_phases(folder: RunFolder) -> list[Phase]:
    """Read the last phases of a run."""
    return as_phases(last_lines(folder.phases, RECENT_PHASES, TEXTS[PHASES]))


def as_phases(lines: Iterable[dict[str, Any]]) -> list[Phase]:
    """Return the phases in lines of their file, without damaged ones."""
    return [
        Phase(**line)
        for line in lines
        if _NEEDED <= line.keys() <= _PHASE_KEYS and line["phase"] in get_args(PhaseName)
    ]


def read_samples(folder: RunFolder) -> list[Sample]:
    """Read the samples of a run."""
    return as_samples(read_lines(folder.samples, TEXTS[SAMPLES]))


def as_samples(lines: Iterable[dict[str, Any]]) -> list[Sample]:
    """Return the samples in lines of their file, without damaged ones."""
    return [Sample(**line) for line in lines if line.keys() == _SAMPLE_KEYS]


def read_scores(folder: RunFolder) -> list[Record]:
    """Read the scores of a run's checkpoints on tasks: see `TASKS`. The step of each is that of its checkpoint."""
    lines = read_lines(folder.scores, TEXTS[SCORES])
    found = {line[SCORED_STEP]: line | {"step": line[SCORED_STEP]} for line in lines if SCORED_STEP in line}
    return [found[step] for step in sorted(found)]


def read_starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the starts of a run's workers."""
    return read_lines(folder.starts, TEXTS[STARTS])


def seconds_by_phase(phases: Sequence[Phase], end_s: float) -> dict[PhaseName, float]:
    """Return the seconds of each phase, without the time in which no command ran.

    >>> phases = [Phase(step=0, time_s=10.0, phase="training"), Phase(step=5, time_s=12.5, phase="saving")]
    >>> seconds_by_phase(phases, 13.0)
    {'training': 2.5, 'saving': 0.5}

    Args:
        phases: phases, in the order of time.
        end_s: Unix time at which the last phase ends.
    """
    seconds: dict[PhaseName, float] = {}
    ends = [*(phase.time_s for phase in phases), end_s][1:]
    for phase, next_s in zip(phases, ends, strict=True):
        if phase.phase not in ENDS:
            seconds[phase.phase] = seconds.get(phase.phase, 0.0) + max(0.0, next_s - phase.time_s)
    return seconds


def work_s(phases: Sequence[Phase], end_s: float) -> float:
    """Return the seconds of all phases of a run, from its last phases.

    >>> work_s([Phase(step=5, time_s=12.5, phase="saving", before_s=2.5)], 13.0)
    3.0

    Args:
        phases: the last phases, in the order of time.
        end_s: Unix time at which the last phase ends.
    """
    return (phases[0].before_s if phases else 0.0) + sum(seconds_by_phase(phases, end_s).values())


def next_phase(last: Phase | None, *, step: int, time_s: float, phase: PhaseName) -> Phase:
    """Return the phase after another one, or the first one. The arguments are its fields."""
    before_s = 0.0 if last is None else work_s([last], time_s)
    return Phase(step=step, time_s=time_s, phase=phase, before_s=round(before_s, 3))


def write_end(folder: RunFolder, phase: PhaseName, time_s: float | None) -> None:
    """Write the phase in which a command ends, unless the workers have written an end. They may not know the last one.

    Nothing is written if the storage is out of reach: it may be the reason of the end.

    Args:
        folder: the run's folder.
        phase: `stopped` or `failed`.
        time_s: Unix time; None if no worker has started: the time of the last sign of life.
    """
    with contextlib.suppress(OSError, ValueError):
        folder.check_place()
        folder.pull()
        phases, records = recent_phases(folder), last_lines(folder.metrics, 1, TEXT_METRICS)
        if phases and phases[-1].phase in ENDS:
            return
        if time_s is None:
            alive_s = last_sign_of_life(phases, records)
            time_s = time.time() if alive_s is None else alive_s
        step = last_values(records).get("step", 0)
        writer = folder.log_writer()
        end = next_phase(phases[-1] if phases else None, step=step, time_s=round(time_s, 3), phase=phase)
        writer.append(PHASES, asdict(end))
        writer.flush()


def last_sign_of_life(phases: Sequence[Phase], records: Iterable[Record]) -> float | None:
    """Return the Unix time of the last phase or record, or None if there is neither."""
    times = [phase.time_s for phase in phases] + [record["time_s"] for record in records if "time_s" in record]
    return max(times, default=None)


_PHASE_KEYS, _SAMPLE_KEYS = Phase.__annotations__.keys(), Sample.__annotations__.keys()
_NEEDED = _PHASE_KEYS - {"before_s"}


def summarize(history: RunHistory, *, digests: dict[str, str] | None = None) -> RunResult:
    """Return the result of a run.

    Args:
        history: the run's history.
        digests: of the items of the last checkpoint, if they are known.
    """
    records = history.records
    starts = history.starts
    phases = history.phases
    final = last_values(of_trained(records))
    scores = {name: value for name, value in last_values(history.scores).items() if name.startswith(TASKS)}
    validations = [
        (record["val_loss"], record["step"]) for record in map(finite, of_trained(records)) if "val_loss" in record
    ]
    best, last = min(validations, default=(None, None)), (validations or [(None, None)])[-1]
    last_start = starts[-1] if starts else {}
    ended_s = last_sign_of_life(phases, records)
    began_s = [phase.time_s for phase in phases[:1] if phase.phase not in ENDS]
    began_s += [start["time_s"] for start in starts[:1] if "time_s" in start]
    return RunResult(
        steps=final.pop("step", None),
        tokens=final.pop("tokens", None),
        epochs=final.pop("epoch", None),
        num_params=num_params(history.description.config.model),
        tokens_per_s=_tokens_per_s(history),
        full_val_loss=final.get("full_val_loss"),
        full_val_bits_per_byte=final.get("full_val_bits_per_byte"),
        best_val_loss=best[0],
        best_val_step=best[1],
        last_val_loss=last[0],
        last_val_step=last[1],
        began_at=as_utc(min(began_s)) if began_s else None,
        ended_at=None if ended_s is None else as_utc(ended_s),
        device=last_start.get("device"),
        devices=last_start.get("devices"),
        commit=history.description.commit,
        repeat=repeating_command(history.folder),
        hardware=history.description.hardware,
        processor=last_start.get("processor"),
        versions=history.description.versions,
        digests=description_digests(history.description) | (digests or {}),
        metrics={name: value for name, value in final.items() if name != "time_s"} | scores,
        seconds={name: round(seconds, 3) for name, seconds in seconds_by_phase(phases, ended_s or 0.0).items()},
        restarts=len(starts) - 1 if starts else None,
        workers=last_start.get("workers"),
    )


def repeating_command(folder: RunFolder) -> str | None:
    """Return the command that repeats a run under another name; None in object storage, where no command reads it."""
    if folder.uri is not None:
        return None
    return shlex.join(["pretrain", "--config", str(folder.config), "--name", f"{folder.name}-again"])


def _tokens_per_s(history: RunHistory) -> float | None:
    """Return the training tokens per second of all timed steps, or None if there are none."""
    train = history.description.config.train
    tokens_per_step = train.global_batch_size * history.description.config.model.seq_len
    num_steps = 0
    seconds = 0.0
    last_step = 0
    for record in history.records:
        if "step_s" in record:
            num_steps += record["step"] - last_step
            seconds += (record["step"] - last_step) * record["step_s"]
        last_step = record["step"]
    return float(f"{num_steps * tokens_per_step / seconds:.6g}") if seconds else None
