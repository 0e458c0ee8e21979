"""The logs of a run: files, and in object storage numbered parts of one journal.

<folder>/metrics.jsonl, samples.jsonl, starts.jsonl, phases.jsonl, step_losses.f32
<uri>/log/<start>-<id>-<first>-<last>.jsonl   lines of all logs, in the order of time

Object storage cannot append. Every 30 s, the lines since the last upload become a new part, so each line is uploaded
once, whatever the length of the run. 32 parts become one part: a line is copied a few times more, and readers request
few objects. Each writer has its own number (`start`, one more than those it finds) and a random `id`: no two writers
write one object. A line of a part is `{"file": ..., "line": ...}`, or `{"cut": STEP}`: a run that continues from a
checkpoint drops the metrics and samples of that step and of later ones, and writes them again. The losses of the steps
after the checkpoint are dropped too. The losses of some steps are a line `{"first_step": ..., "losses": BASE64}`.
"""

import base64
import contextlib
import json
import logging
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow.fs import FileInfo, FileSelector, FileSystem, LocalFileSystem, copy_files

from pretrain._config import MAX_STEPS
from pretrain._run.files import append_line, is_line, load_json, read_text, replacing, sync_file, sync_folder
from pretrain._run.metrics import TEXT_METRICS, cut_lines
from pretrain._run.step_losses import (
    STEP_LOSSES,
    cut_step_losses,
    decode_losses,
    encode_losses,
    resize_losses,
    write_step_losses,
)
from ray_jax_launch import open_uri

LOG = "log"
"""The folder of the parts, in object storage and in local copies."""

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
STARTS = "starts.jsonl"
PHASES = "phases.jsonl"
TEXTS: dict[str, tuple[str, ...]] = {
    METRICS: TEXT_METRICS, SAMPLES: ("prompt", "text"), STARTS: ("device", "processor"), PHASES: ("phase",),
}  # fmt: skip
"""The names of the values of each log that are texts. All others are numbers."""

UPLOAD_EVERY_S = 30.0
"""Seconds from a line to its upload, at most."""

_CUT = (METRICS, SAMPLES)  # the other two tell what has happened, also in steps that are done again
_MERGED = 32
_NUM_THREADS = 8
_ATTEMPTS = 5
_NAME = re.compile(r"(\d+)-([0-9a-f]+)-(\d+)-(\d+)\.jsonl")

_logger = logging.getLogger("pretrain")


class _Part(NamedTuple):
    """A part, and in the order of time: the number and the id of its writer, and its own numbers."""

    start: int
    id: str
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.start:06}-{self.id}-{self.first:06}-{self.last:06}.jsonl"


class LogWriter:
    """The logs of a run, for one writer. Any thread may call any method.

    Args:
        folder: the folder of the files.
        uri: the run in object storage, whose local copy the folder is; None for a run in a folder.
    """

    def __init__(self, folder: Path, uri: str | None) -> None:
        self._folder, self._uri = folder, uri
        self._pending: list[str] = []
        self._lock, self._uploading = threading.Lock(), threading.Lock()
        self._writer: tuple[int, str] | None = None
        self._levels: list[list[tuple[_Part, str]]] = [[]]  # parts with their texts, by the number of merges
        self._next = 1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line.

        Args:
            name: the file, such as `METRICS`.
            line: the line.
        """
        with self._lock:
            append_line(self._folder / name, line)
            self._add({"file": name, "line": line})

    def append_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Append the losses of consecutive steps. Entries that are missing before them become NaN.

        Args:
            first_step: the first of the steps.
            losses: a loss for each step.
        """
        with self._lock:
            write_step_losses(self._folder / STEP_LOSSES, first_step, losses)
            self._add({"first_step": first_step, "losses": base64.b64encode(encode_losses(losses)).decode()})

    def cut(self, step: int) -> None:
        """Drop the metrics and the samples of a step and of later ones, and the losses of later steps."""
        with self._lock:
            for name in _CUT:
                cut_lines(self._folder / name, step - 1, TEXTS[name])
            cut_step_losses(self._folder / STEP_LOSSES, step)
            self._add({"cut": step})

    def flush(self) -> None:
        """Make all lines durable, in object storage if the run is there.

        Raises:
            LaunchError: the storage cannot be reached.
            OSError: a file cannot be written.
        """
        if self._uri is not None:
            self._upload(self._uri)
            return
        for name in (*TEXTS, STEP_LOSSES):
            with contextlib.suppress(FileNotFoundError):  # a run may have no samples
                sync_file(self._folder / name)
        sync_folder(self._folder)

    def start(self) -> None:
        """Upload the lines of a run in object storage regularly, until `stop`. Failures wait for the next time."""
        if self._uri is not None:
            self._thread = threading.Thread(target=self._upload_until_stop, name="log-upload", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the regular uploads."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _add(self, event: dict[str, Any]) -> None:
        if self._uri is not None:
            self._pending.append(json.dumps(event) + "\n")

    def _upload_until_stop(self) -> None:
        assert self._uri is not None, "only a run in object storage has this thread"
        is_told = False
        while not self._stop.wait(UPLOAD_EVERY_S):
            try:
                self._upload(self._uri)
                is_told = False
            except (OSError, ValueError) as error:
                if not is_told:
                    _logger.warning("%s cannot be written, the next attempt follows: %s", self._uri, error)
                is_told = True

    def _upload(self, uri: str) -> None:
        with self._uploading:
            with self._lock:
                lines = [*self._pending]
            if not lines:
                return
            filesystem, root = open_uri(uri)
            place = f"{root.rstrip('/')}/{LOG}"
            if self._writer is None:
                number = 1 + max((part.start for part in _list(filesystem, place)), default=0)
                self._writer = (number, secrets.token_hex(4))
            part = _Part(*self._writer, self._next, self._next)
            _write(filesystem, place, part, text := "".join(lines))
            with self._lock:
                del self._pending[: len(lines)]
            self._next += 1
            self._levels[0].append((part, text))
            self._merge(filesystem, place)

    def _merge(self, filesystem: FileSystem, place: str) -> None:
        """Replace each full level by one part of the next level. Readers ignore a part that another one contains."""
        for level, parts in enumerate(self._levels):
            if len(parts) < _MERGED:
                break
            merged = parts[0][0]._replace(last=parts[-1][0].last)
            _write(filesystem, place, merged, text := "".join(text for _, text in parts))
            for part, _ in parts:
                with contextlib.suppress(FileNotFoundError):  # an attempt before this one has deleted it
                    filesystem.delete_file(f"{place}/{part.name}")
            parts.clear()
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append((merged, text))


def pull_log(filesystem: FileSystem, root: str, folder: Path) -> bool:
    """Download the new parts of a run, and write its logs as files.

    Args:
        filesystem: the filesystem of the run.
        root: the run's path in it.
        folder: the local copy of the run.

    Returns:
        Whether anything has changed.

    Raises:
        OSError: an object cannot be read, or a file cannot be written.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            parts, has_changed = _pull_parts(filesystem, f"{root.rstrip('/')}/{LOG}", folder / LOG)
            return _write_logs(parts, folder, has_changed=has_changed or attempt > 1)
        except FileNotFoundError:  # the run has just merged a part, or another reader has deleted its copy
            if attempt == _ATTEMPTS:
                raise


def _write_logs(parts: Sequence[Path], folder: Path, *, has_changed: bool) -> bool:
    """Write the logs if the parts have changed, or a log is missing. Return whether any has changed."""
    names = (*TEXTS, STEP_LOSSES)
    if not parts:
        for name in names:
            (folder / name).unlink(missing_ok=True)
    elif has_changed or not all((folder / name).exists() for name in names):
        logs, losses = _replay(parts)
        for name, lines in logs.items():
            with replacing(folder / name) as partial:
                partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        with replacing(folder / STEP_LOSSES) as partial:
            partial.write_bytes(losses)
        has_changed = True
    return has_changed


def _pull_parts(filesystem: FileSystem, place: str, copies: Path) -> tuple[list[Path], bool]:
    """Download the new parts of a run. Return the copies of all parts in the order of time, and whether any is new."""
    copies.mkdir(parents=True, exist_ok=True)
    found = _list(filesystem, place)
    parts = _needed(found)
    known = {path.name: path.stat().st_size for path in copies.iterdir()}
    missing = [part for part in parts if known.get(part.name) != found[part].size]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for _ in threads.map(lambda part: _download(filesystem, place, part, copies), missing):
            pass
    left = known.keys() - {part.name for part in parts}
    for name in left:
        (copies / name).unlink(missing_ok=True)
    return [copies / part.name for part in parts], bool(missing or left)


def _replay(parts: Iterable[Path]) -> tuple[dict[str, list[dict[str, Any]]], bytearray]:
    """Return the lines of each log, and the losses of the steps."""
    logs: dict[str, list[dict[str, Any]]] = {name: [] for name in TEXTS}
    losses = bytearray()
    for path in parts:
        for event in read_text(path).split("\n"):
            try:
                value = load_json(event)
            except ValueError:
                continue
            if not isinstance(value, dict):
                continue
            name = value.get("file")
            line = value.get("line")
            step = value.get("cut")
            if type(step) is int and 0 <= step <= MAX_STEPS:
                for name in _CUT:
                    logs[name] = [line for line in logs[name] if line["step"] < step]
                resize_losses(losses, step)
            elif (found := _losses_of(value)) is not None:
                resize_losses(losses, found[0] - 1)
                losses += found[1]
            elif name in logs and is_line(line, TEXTS[name]):
                logs[name].append(line)
    return logs, losses


def _losses_of(event: dict[str, Any]) -> tuple[int, bytes] | None:
    """Return the first step and the losses of an event; None if it has none."""
    first_step, text = event.get("first_step"), event.get("losses")
    if type(first_step) is not int or not isinstance(text, str) or not 1 <= first_step <= MAX_STEPS:
        return None
    try:
        return first_step, encode_losses(decode_losses(base64.b64decode(text, validate=True)))
    except ValueError:
        return None


def _list(filesystem: FileSystem, place: str) -> dict[_Part, FileInfo]:
    infos: Sequence[FileInfo] = filesystem.get_file_info(FileSelector(place, allow_not_found=True))
    matches = ((_NAME.fullmatch(info.base_name), info) for info in infos if info.is_file)
    return {_Part(int(match[1]), match[2], int(match[3]), int(match[4])): info for match, info in matches if match}


def _needed(parts: Iterable[_Part]) -> list[_Part]:
    """Return the parts in the order of time, without those that a merged part contains."""
    needed: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.start, part.id, part.first, -part.last)):
        if not needed or part[:2] != needed[-1][:2] or part.last > needed[-1].last:
            needed.append(part)
    return needed


def _write(filesystem: FileSystem, place: str, part: _Part, text: str) -> None:
    with filesystem.open_output_stream(f"{place}/{part.name}") as stream:
        stream.write(text.encode())


def _download(filesystem: FileSystem, place: str, part: _Part, copies: Path) -> None:
    with replacing(copies / part.name) as partial:
        copy_files(f"{place}/{part.name}", str(partial), filesystem, LocalFileSystem())
