"""A run as the report shows it."""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pretrain._formats import duration, gibibytes, loss, option, show_utc
from pretrain._report.curves import Array, points
from pretrain._report.timeline import WorkTime
from pretrain._run.differences import changes_result, option_values
from pretrain._run.files import flatten
from pretrain._run.find import find_run
from pretrain._run.history import SCORED_STEP, TASKS, RunHistory, Sample, last_sign_of_life, read_history, summarize
from pretrain._run.metrics import of_sources
from pretrain._run.result import RunResult
from pretrain._run.state import run_state

_NUM_COLORS = 7
_NUM_DASHES = 5  # with the solid line: 35 looks


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The beginning of a run that another run has trained: its parent."""

    parent: RunHistory
    """Files of the parent."""

    step: int
    """Step at which the run left its parent: the steps up to it are the parent's."""

    of_parent: "Fork | None" = None
    """The beginning of the parent, if it is another run's too."""


def fork_of(history: RunHistory) -> Fork | None:
    """Return the beginning of a run that another run has trained; None if there is none, or the other run is gone."""
    origin = history.description.origin
    if origin is None or origin.weights_only:
        return None
    with contextlib.suppress(ValueError, OSError):
        parent = read_history(find_run(origin.place)[0])
        return Fork(parent=parent, step=origin.start_step, of_parent=fork_of(parent))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """A run, its name and its color."""

    label: str
    """Name, unlike those of the other runs."""

    series: int
    """Number of its line in the charts. Runs that differ in their seed alone share it."""

    history: RunHistory
    """Files of the run."""

    result: RunResult
    """Its result up to now."""

    parent: "ReportedRun | None" = None
    """The run that has trained its beginning."""

    forked_at: int = 0
    """Step up to which the parent has trained."""

    curves: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    """Steps and values of the metrics that were read."""

    @property
    def color(self) -> str:
        """CSS classes of the color of its line, and of the dashes if an earlier line has this color."""
        dashes = self.series // _NUM_COLORS % _NUM_DASHES
        return f"color{self.series % _NUM_COLORS}" + (f" dash{dashes}" if dashes else "")

    @property
    def end_s(self) -> float | None:
        """Unix time of the last phase or record."""
        return last_sign_of_life(self.history.phases, self.history.records)

    @property
    def work_s(self) -> float:
        """Seconds in which a command ran."""
        return sum(self.result.seconds.values())

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of a step."""
        config = self.history.description.config
        return config.train.global_batch_size * config.model.seq_len

    def tokens_at(self, step: float) -> float:
        """Return the training tokens up to a step, those of the parents included. They may have had another batch."""
        before = 0.0 if self.parent is None else self.parent.tokens_at(self.forked_at)
        return before + (step - self.forked_at) * self.tokens_per_step

    def points(self, name: str, axis: str) -> tuple[Array, Array]:
        """Return positions and values of a metric: see `curve`."""
        return self.curve(name, axis)[1:]

    def curve(self, name: str, axis: str) -> tuple[Array, Array, Array]:
        """Return steps, positions and values of a metric.

        Args:
            name: the metric.
            axis: `step`, `tokens`, or `time`: the seconds of work. Records without a time have no position there.
        """
        steps, values = self._read(name)
        if axis == "tokens":
            return steps, self.tokens_at(0) + steps * self.tokens_per_step, values
        if axis == "time":
            timed, times = self._read("time_s")
            phases = self.history.phases
            work_time = WorkTime(phases, phases[0].time_s if phases else min(times, default=0.0))
            is_known = np.isin(steps, timed)
            steps, values = steps[is_known], values[is_known]
            return steps, work_time(times[np.searchsorted(timed, steps)]), values
        return steps, steps, values

    def inherited(self, name: str, axis: str) -> tuple[Array, Array, Array]:
        """Return steps, positions and values of a metric in the part of its parents; no point on the axis of time.

        Args:
            name: the metric.
            axis: `step`, `tokens` or `time`.
        """
        if self.parent is None or axis == "time":
            return np.empty(0), np.empty(0), np.empty(0)
        parts = zip(self.parent.inherited(name, axis), self.parent.curve(name, axis), strict=True)
        steps, positions, values = (np.concatenate(pair) for pair in parts)
        kept = steps <= self.forked_at
        return steps[kept], positions[kept], values[kept]

    def _read(self, name: str) -> tuple[Array, Array]:
        if name not in self.curves:
            records = self.history.scores if name.startswith(TASKS) else self.history.records
            steps, values = points(records, name)
            if self.parent is not None:
                steps, values = steps[steps >= self.forked_at], values[steps >= self.forked_at]
            self.curves[name] = steps, values
        return self.curves[name]

    def samples(self, most: int) -> dict[str, list[Sample]]:
        """Return some of the samples of each prompt, evenly spread over the steps, with the first and the last.

        Args:
            most: samples of a prompt at most.
        """
        of_prompts: dict[str, list[Sample]] = {}
        for sample in self.history.samples:
            of_prompts.setdefault(sample.prompt, []).append(sample)
        return {prompt: _some(samples, most) for prompt, samples in of_prompts.items()}

    def numbers(self, now_s: float) -> dict[str, str]:
        """Return the results, formatted. The state is that of a Unix time."""
        result, last = self.result, self.result.metrics
        return {
            "state": self._state(now_s),
            "validation loss, all tokens (nats per token)": _number(result.full_val_loss),
            **{f"validation loss, {name}": _number(value) for name, value in of_sources(last).items()},
            "bits per byte, all validation tokens": _number(result.full_val_bits_per_byte),
            "best validation loss, on train.eval_tokens": _at_step(result.best_val_loss, result.best_val_step),
            "last validation loss, on train.eval_tokens": _at_step(result.last_val_loss, result.last_val_step),
            "last bits per byte, on train.eval_tokens": _number(last.get("val_bits_per_byte")),
            "last training loss": _number(last.get("loss")),
            **{f"last {name.removeprefix(TASKS)}": _number(value) for name, value in last.items() if _is_score(name)},
            "parameters": _count(result.num_params),
            "training tokens": _count(result.tokens),
            "epochs": "" if result.epochs is None else f"{result.epochs:,.2f}",
            "steps": _count(result.steps),
            "time of work": duration(self.work_s, decimals=1) if self.work_s else "",
            "tokens per second": _count(result.tokens_per_s),
            "MFU, at the end": "" if "mfu" not in last else f"{last['mfu']:.1%}",
            "device memory": gibibytes(last["memory_bytes"]) if "memory_bytes" in last else "",
            "restarts": _count(result.restarts),
            "began": show_utc(result.began_at or ""),
            "ended" if self.history.result else "last sign of life": show_utc(result.ended_at or ""),
        }

    def origin(self) -> dict[str, str]:
        """Return hardware, data, versions, commit, digests, and the command that repeats the run."""
        description, result = self.history.description, self.result
        data = description.data
        tokens = data.tokens if isinstance(data.tokens, str) else json.dumps(data.tokens)
        device = " x ".join(str(part) for part in (result.devices, result.device) if part is not None)
        return {
            "folder": str(self.history.folder),
            "repeated by": result.repeat or "",
            "hardware": description.hardware,
            "devices": device,
            "processor": result.processor or "",
            "workers": _count(result.workers),
            "commit": description.commit or "",
            "start": "" if description.origin is None else str(description.origin),
            "tokens": tokens,
            "tokenizer": data.tokenizer,
            **{f"fingerprint: {name}": value for name, value in _as_texts(data.fingerprint).items()},
            "window order": f"version {data.window_order_version}",
            **{f"digest: {name}": digest for name, digest in result.digests.items()},
            **description.versions,
        }

    def config(self) -> dict[str, str]:
        """Return every option by its name."""
        return _as_texts(option_values(self.history.description.config))

    def _state(self, now_s: float) -> str:
        state = run_state(self.history, now_s)
        step = f"step {self.result.steps or 0:,} of {self.history.description.config.train.max_steps:,}"
        return state if state == "finished" else f"{state}, {step}"


def reported_runs(histories: Sequence[RunHistory], forks: Sequence[Fork | None] = ()) -> list[ReportedRun]:
    """Give each run a name and a line.

    Args:
        histories: the runs. A run may occur twice.
        forks: the beginning of each run, None for a run that began by itself. Without any, all did.
    """
    forks = forks or [None] * len(histories)
    seen: Counter[str] = Counter()
    runs = []
    for history, fork, series in zip(histories, forks, _series(histories, forks), strict=True):
        name = history.folder.name
        seen[name] += 1
        label = f"{name} ({seen[name]})" if seen[name] > 1 else name
        runs.append(_reported(history, fork, label, series))
    return runs


def _reported(history: RunHistory, fork: Fork | None, label: str, series: int) -> ReportedRun:
    parent = None if fork is None else _reported(fork.parent, fork.of_parent, fork.parent.folder.name, series)
    return ReportedRun(
        label=label,
        series=series,
        history=history,
        result=_result_so_far(history),
        parent=parent,
        forked_at=0 if fork is None else fork.step,
    )


def _series(histories: Sequence[RunHistory], forks: Sequence[Fork | None]) -> list[int]:
    """Return the number of the line of each run: runs that differ in their seed alone have one.

    A forked run has a line of its own, and so has a run whose seed an earlier one of the line has.
    """
    taken: dict[str, set[int]] = {}
    names = []
    for index, (history, fork) in enumerate(zip(histories, forks, strict=True)):
        seed, name = history.description.config.seed, _all_but_seed(history)
        seeds = taken.setdefault(name, set())
        names.append(str(index) if fork is not None or seed in seeds else name)
        seeds.add(seed)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _all_but_seed(history: RunHistory) -> str:
    """Return everything that decides the result of a run but its seed, as text. The tokens stand for `data`."""
    description = history.description
    options = {
        name: value
        for name, value in option_values(description.config).items()
        if changes_result(name) and name not in ("seed", "data") and not name.startswith("prepare.")
    }
    data = {**description.data.fingerprint, "window_order_version": description.data.window_order_version}
    return json.dumps([options, data], sort_keys=True)


def _as_texts(fields: dict[str, Any]) -> dict[str, str]:
    """Return nested fields as texts by their full names."""
    return {name: option(name, value) for name, value in flatten(fields).items()}


def _result_so_far(history: RunHistory) -> RunResult:
    """Return the result, with the fields that a running training lacks, as far as the files tell."""
    found = summarize(history)
    if history.result is not None:
        known = {entry.name: getattr(history.result, entry.name) for entry in dataclasses.fields(RunResult)}
        found = dataclasses.replace(found, **{name: value for name, value in known.items() if value not in (None, {})})
    return found


def _some(samples: list[Sample], most: int) -> list[Sample]:
    chosen = np.linspace(0, len(samples) - 1, min(len(samples), most)).round().astype(int)
    return [samples[index] for index in chosen]


def _is_score(name: str) -> bool:
    return name.startswith(TASKS) and name != SCORED_STEP


def _number(value: float | None) -> str:
    return "" if value is None else loss(value)


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _at_step(value: float | None, step: int | None) -> str:
    return "" if value is None else f"{loss(value)} at step {step or 0:,}"
