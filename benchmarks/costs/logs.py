"""Growth of the costs of a run's logs: uploads, reads at a start and of commands that look at a run, and memory.

Bytes read and written are those of the system calls of this process (`/proc/self/io`). The storage is a folder, behind
the interface of object storage.
"""

import contextlib
import dataclasses
import gc
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import jax.numpy as jnp
from pyarrow.fs import LocalFileSystem
from rich.console import Console

from costs.measurement import Measurement
from owt_data import Tokens
from pretrain import PRESETS
from pretrain._commands.runs import show_runs
from pretrain._commands.watch import watch
from pretrain._config import with_vocab_size
from pretrain._run import log_parts
from pretrain._run.description import DataDescription, describe, write_description
from pretrain._run.files import append_line
from pretrain._run.folder import RunFolder
from pretrain._run.history import Phase, PhaseName, last_sign_of_life, read_recent
from pretrain._run.log_parts import METRICS, LogWriter, pull_log
from pretrain._screen.live_screen import live_screen
from pretrain._screen.run_view import RunView
from pretrain._training.run_log import RunLog
from pretrain._training.step_meter import StepMeter

_BEGAN_S = 1_700_000_000.0
_STEP_S = 0.1
_EVERY = 1000  # steps from a checkpoint and a validation to the next ones
_PHASES: tuple[PhaseName, ...] = ("evaluating", "saving", "training")
_FRAMES = 20


def _record(step: int) -> dict[str, Any]:
    """Return a record as a run writes it."""
    record = {
        "step": step, "tokens": step * 8192, "epoch": round(step / 5000, 4), "windows": "99a2fae3423c5768",
        "time_s": round(_BEGAN_S + step * _STEP_S, 3), "loss": 2.0 + 9 / (1 + step), "grad_norm_max": 1.23456,
        "learning_rate": 0.000612345, "step_s": _STEP_S, "tokens_per_s": 81920.0, "data_wait_s": 0.000123456,
        "mfu": 0.312345, "memory_bytes": 3_221_225_472,
    }  # fmt: skip
    return record | ({"val_loss": 2.1 + 9 / (1 + step)} if step % _EVERY == 0 else {})


def _phase(step: int, name: PhaseName) -> Phase:
    return Phase(step=step, time_s=_BEGAN_S + step * _STEP_S, phase=name)


def _run(folder: Path, num_records: int) -> RunFolder:
    """Write a run of some records, which trains."""
    run = RunFolder(folder / "runs" / "run")
    run.path.mkdir(parents=True)
    config = with_vocab_size(PRESETS["quickstart"](), 257)
    train = dataclasses.replace(config.train, max_steps=10**9, log_every=1, eval_every=_EVERY, checkpoint_every=_EVERY)
    data = DataDescription(tokens="tokens", tokenizer="bytes", fingerprint={"sha256": "1"})
    write_description(run, describe(dataclasses.replace(config, train=train), data, "local"))
    start = {"step": 0, "time_s": _BEGAN_S, "began_s": _BEGAN_S, "workers": 1, "devices": 1, "device": "cpu"}
    append_line(run.starts, start)
    run.step_losses.write_bytes(bytes(4 * num_records))
    with run.metrics.open("w") as metrics, run.phases.open("w") as phases:
        for step in range(num_records):
            metrics.write(json.dumps(_record(step)) + "\n")
            if step % _EVERY == 0:
                for name in _PHASES:
                    phases.write(json.dumps(dataclasses.asdict(_phase(step, name))) + "\n")
    return run


def _num_bytes() -> int:
    """Return the bytes that this process has read and written."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


@contextlib.contextmanager
def _storage(folder: Path) -> Iterator[str]:
    """Use a folder as object storage, and give the URI of a run in it."""
    (folder / "bucket" / "log").mkdir(parents=True)
    opened = LocalFileSystem(), str(folder / "bucket")
    with mock.patch("pretrain._run.log_parts.open_uri", return_value=opened):
        yield "s3://bucket"


@contextlib.contextmanager
def _uploads(num_uploads: int, folder: Path) -> Iterator[LogWriter]:
    """Write a log in as many uploads, each of a record."""
    (folder / "worker").mkdir()
    with _storage(folder) as uri:
        writer = LogWriter(folder / "worker", uri)
        for step in range(num_uploads):
            writer.append(METRICS, _record(step))
            writer.flush()
        yield writer


def _upload_bytes(num_uploads: int, folder: Path) -> float:
    num_bytes, write = 0, log_parts._write

    def counted(*args: Any) -> None:
        nonlocal num_bytes
        before = _num_bytes()
        write(*args)
        num_bytes += _num_bytes() - before

    log_parts._write = counted
    try:
        with _uploads(num_uploads, folder):
            return num_bytes / num_uploads
    finally:
        log_parts._write = write


def _held(value: Any) -> int:
    """Return the bytes of an object and of all that it alone refers to, without code and modules."""
    seen, todo, num_bytes = set[int](), [value], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        num_bytes += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return num_bytes


def _writer_memory(num_uploads: int, folder: Path) -> float:
    with _uploads(num_uploads, folder) as writer:
        return _held(writer)


def _poll_bytes(num_uploads: int, folder: Path) -> float:
    reader = folder / "reader"
    reader.mkdir()
    with _uploads(num_uploads, folder) as writer:
        pull_log(LocalFileSystem(), str(folder / "bucket"), reader)
        writer.append(METRICS, _record(num_uploads))
        writer.flush()
        before = _num_bytes()
        pull_log(LocalFileSystem(), str(folder / "bucket"), reader)
        return _num_bytes() - before


def _start_bytes(num_records: int, folder: Path) -> float:
    run = _run(folder, num_records)
    step = (num_records - 1) // _EVERY * _EVERY
    before = _num_bytes()
    history = read_recent(run)
    RunView.of(history, is_local=True)
    last_sign_of_life(history.phases, history.records)
    description = history.description
    config = dataclasses.replace(description.config, trackers=())
    with RunLog(run, config, description, send=lambda metrics: None) as log:
        log.begin(step, _BEGAN_S + num_records)
        log.open("cpu", 1)
        return _num_bytes() - before


def _watch_bytes(num_records: int, folder: Path) -> float:
    run = _run(folder, num_records)
    looks = list[int]()
    now_s = _BEGAN_S + num_records * _STEP_S

    def sleep(interval_s: float) -> None:
        if len(looks) == 3:
            raise KeyboardInterrupt
        append_line(run.metrics, _record(num_records + len(looks)))
        looks.append(_num_bytes())

    with contextlib.suppress(KeyboardInterrupt):
        watch(str(run), console=Console(file=io.StringIO()), clock=lambda: now_s, sleep=sleep)
    return looks[-1] - looks[-2]


def _runs_bytes(num_records: int, folder: Path) -> float:
    _run(folder, num_records)
    before = _num_bytes()
    show_runs(str(folder / "runs"), console=Console(file=io.StringIO()), clock=lambda: _BEGAN_S + num_records)
    return _num_bytes() - before


def _view(num_records: int) -> RunView:
    """Return the view of a run that has shown as many records, and the phases among them."""
    view = RunView(10**9, clock=lambda: _BEGAN_S + num_records * _STEP_S)
    for step in range(num_records):
        if step % _EVERY == 0:
            for name in _PHASES:
                view.add_phase(_phase(step, name))
        view.add_record(_record(step))
    return view


def _frame_s(num_records: int, folder: Path) -> float:
    view, options = _view(num_records), Console(file=io.StringIO(), width=120).options
    times = list[float]()
    for _ in range(_FRAMES):
        began = time.perf_counter()
        live_screen(view, options)
        times.append(time.perf_counter() - began)
    return min(times)


def _view_memory(num_records: int, folder: Path) -> float:
    return _held(_view(num_records))


def _meter_memory(num_steps: int, folder: Path) -> float:
    config = with_vocab_size(PRESETS["quickstart"](), 257)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, order="shuffle"))
    device, tokens = SimpleNamespace(device_kind="cpu", memory_stats=lambda: None), cast(Tokens, None)  # not read here
    meter = StepMeter(config, tokens, device, 1)
    names = ("loss", "grad_norm", "num_skipped", "num_skipped_in_a_row")
    for _ in range(num_steps):
        meter.add(dict.fromkeys(names, jnp.float32(1.0)))
        meter.take_losses()
    return _held([meter._steps, meter._losses, meter._unrecorded.trailing_losses])


def _constant(
    name: str, what: str, unit: str, size: str, cost: Callable[[int, Path], float], largest: int
) -> Measurement:
    return Measurement(
        name=name, what=what, unit=unit, size=size, cost=cost, goal=0.1,
        sizes=(largest // 100, largest // 10, largest), short=(largest // 1000, largest // 200),
    )  # fmt: skip


MEASUREMENTS = [
    _constant("log-uploads", "read and written to upload a line of a log", "bytes", "uploads", _upload_bytes, 20_000),
    _constant("log-writer", "memory of the writer of a remote log", "bytes", "uploads", _writer_memory, 20_000),
    _constant("log-poll", "read and written to pull a new line of a log", "bytes", "uploads", _poll_bytes, 20_000),
    _constant("log-start", "read and written at a start of a run", "bytes", "records", _start_bytes, 1_000_000),
    _constant("log-watch", "read by `watch` at a new record", "bytes", "records", _watch_bytes, 1_000_000),
    _constant("log-runs", "read by `runs` for a run", "bytes", "records", _runs_bytes, 1_000_000),
    _constant("frame", "frame of the live view", "s", "records", _frame_s, 1_000_000),
    _constant("view-memory", "memory of the live view", "bytes", "records", _view_memory, 1_000_000),
    _constant("meter-memory", "memory of metrics before their record", "bytes", "steps", _meter_memory, 100_000),
]
