"""The logs of a run: files, and in object storage numbered parts of one journal.

<folder>/metrics.jsonl, samples.jsonl, starts.jsonl, phases.jsonl, scores.jsonl, step_losses.f32
<uri>/log/<start>-<id>-<first>-<last>.jsonl   lines of all logs, in the order of time

Object storage cannot append. Every 30 s, the lines since the last upload become a new part, so each line is uploaded
once, whatever the length of the run. 32 parts become one part, and 32 of these another one: a line is written three
times, and readers request few objects. A reader appends the bytes that are new to its own files. Each writer has its
own number (`start`, one more than those it finds) and a random `id`: no two writers write one object. A line of a part
is `{"file": ..., "line": ...}`, or `{"cut": STEP}`: a run that continues from a
checkpoint drops the metrics and samples of that step and of later ones, and writes them again. The losses of the steps
after the checkpoint are dropped too. The losses of some steps are a line `{"first_step": ..., "losses": BASE64}`.
"""

import base64
import contextlib
import fcntl
import itertools
import json
import logging
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray
from pyarrow.fs import FileInfo, FileSelector, FileSystem

from pretrain._config import MAX_STEPS
from pretrain._run.files import append_line, is_line, load_json, sync_file, sync_folder
from pretrain._run.metrics import TEXT_METRICS, cut_lines
from pretrain._run.step_losses import (
    STEP_LOSSES,
    cut_step_losses,
    decode_losses,
    encode_losses,
    write_step_losses,
)
from ray_jax_launch import open_uri

LOG = "log"
"""The folder of the parts, in object storage; a writer keeps the parts here that it will merge."""

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
STARTS = "starts.jsonl"
PHASES = "phases.jsonl"
SCORES = "scores.jsonl"
TEXTS: dict[str, tuple[str, ...]] = {
    METRICS: TEXT_METRICS, SAMPLES: ("prompt", "text"), STARTS: ("device", "processor"), PHASES: ("phase",),
    SCORES: (),
}  # fmt: skip
"""The names of the values of each log that are texts. All others are numbers."""

UPLOAD_EVERY_S = 30.0
"""Seconds from a line to its upload, at most."""

_CUT = (METRICS, SAMPLES)  # the others tell what has happened, also in steps that are done again
_MERGED = 32
_NUM_MERGES = 2
_READ = ".log.json"
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
        self._levels: list[list[_Part]] = [[] for _ in range(_NUM_MERGES)]  # by the number of merges, to be merged
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
            cut_logs(self._folder, step)
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
            self._write(filesystem, place, part, "".join(lines).encode())
            with self._lock:
                del self._pending[: len(lines)]
            self._next += 1
            self._levels[0].append(part)
            self._merge(filesystem, place)

    def _merge(self, filesystem: FileSystem, place: str) -> None:
        """Replace each full level by one part of the next level. Readers ignore a part that another one contains."""
        for level, parts in enumerate(self._levels):
            if len(parts) < _MERGED:
                break
            merged = parts[0]._replace(last=parts[-1].last)
            self._write(filesystem, place, merged, b"".join(self._copy(part).read_bytes() for part in parts))
            for part in parts:
                with contextlib.suppress(FileNotFoundError):  # an attempt before this one has deleted it
                    filesystem.delete_file(f"{place}/{part.name}")
            for part in parts:
                self._copy(part).unlink()
            parts.clear()
            if level + 1 < _NUM_MERGES:
                self._levels[level + 1].append(merged)
            else:
                self._copy(merged).unlink()

    def _write(self, filesystem: FileSystem, place: str, part: _Part, content: bytes) -> None:
        """Write a part, after a copy on this machine, from which it is merged."""
        self._copy(part).parent.mkdir(exist_ok=True)
        self._copy(part).write_bytes(content)
        _write(filesystem, place, part, content)

    def _copy(self, part: _Part) -> Path:
        return self._folder / LOG / part.name


def pull_log(filesystem: FileSystem, root: str, folder: Path) -> bool:
    """Download what is new in the parts of a run, and append it to its logs, which are files.

    Several processes may do this at the same time.

    Args:
        filesystem: the filesystem of the run.
        root: the run's path in it.
        folder: the local copy of the run.

    Returns:
        Whether anything has changed.

    Raises:
        OSError: an object cannot be read, or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has_changed = False
    with (folder / _READ).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for attempt in range(_ATTEMPTS):
            try:
                return _pull(filesystem, f"{root.rstrip('/')}/{LOG}", _Copy(folder, file)) or has_changed
            except FileNotFoundError:  # the run has just merged a part
                if attempt == _ATTEMPTS - 1:
                    raise
                has_changed = True
    raise AssertionError("the loop returns or raises")


class _Copy:
    """The logs of a run in object storage as files.

    A state tells what they contain: the bytes of each writer, and the sizes of the files. Without it, and if the files
    have other sizes, they are written again from the first part. It is missing while the files are changed.

    Args:
        folder: the folder of the files.
        file: the file of the state, which this process has locked.
    """

    def __init__(self, folder: Path, file: TextIO) -> None:
        self._folder, self._file = folder, file
        self.read: dict[str, int] = {}
        """The bytes of each writer, in the order of time."""
        file.seek(0)
        with contextlib.suppress(ValueError, LookupError, TypeError):
            state = json.loads(file.read())
            if state["sizes"] == self._sizes():
                self.read = {str(writer): int(size) for writer, size in state["read"].items()}

    def clear(self) -> bool:
        """Delete the logs. Return whether there were any."""
        self.read = {}
        self._file.truncate(0)
        found = [path for name in (*TEXTS, STEP_LOSSES) if (path := self._folder / name).exists()]
        for path in found:
            path.unlink()
        return bool(found)

    def add(self, writer: str, content: bytes) -> None:
        """Append further bytes of a writer."""
        self._file.truncate(0)
        _replay(content, self._folder)
        self.read[writer] = self.read.get(writer, 0) + len(content)
        self._file.seek(0)
        self._file.write(json.dumps({"read": self.read, "sizes": self._sizes()}))
        self._file.flush()

    def _sizes(self) -> dict[str, int]:
        paths = (self._folder / name for name in (*TEXTS, STEP_LOSSES))
        return {path.name: path.stat().st_size for path in paths if path.exists()}


def _pull(filesystem: FileSystem, place: str, copy: _Copy) -> bool:
    """Append what is new in the parts to a copy. Return whether it has changed.

    Raises:
        FileNotFoundError: a part was deleted after it was listed.
    """
    found = _list(filesystem, place)
    writers: dict[str, list[_Part]] = {}
    for part in _needed(found):
        writers.setdefault(f"{part.start}-{part.id}", []).append(part)
    writers = {name + _gaps(parts): parts for name, parts in writers.items()}
    sizes = {name: sum(found[part].size for part in parts) for name, parts in writers.items()}
    # A writer that writes once more after the next one has begun changes lines in the middle.
    known, same = [*copy.read], dict(itertools.islice(sizes.items(), len(copy.read)))
    is_continued = bool(known) and known == [*same] and all(copy.read[name] == same[name] for name in known[:-1])
    has_changed = False
    if not is_continued or copy.read[known[-1]] > same[known[-1]]:
        has_changed = copy.clear()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for name, parts in writers.items():
            new, begin = list[tuple[_Part, int]](), -copy.read.get(name, 0)
            for part in parts:
                if begin + found[part].size > 0:
                    new.append((part, max(0, -begin)))
                begin += found[part].size
            for first in range(0, len(new), _NUM_THREADS):
                batch = new[first : first + _NUM_THREADS]
                for content in threads.map(lambda read: _read(filesystem, place, *read), batch):
                    copy.add(name, content)
                    has_changed = True
    return has_changed


def _gaps(parts: Sequence[_Part]) -> str:
    """Return a text that names the parts that a writer lacks; an empty text if it lacks none."""
    ends = [0, *(part.last for part in parts)]
    return "".join(f"+{part.first}" for part, end in zip(parts, ends, strict=False) if part.first != end + 1)


def _read(filesystem: FileSystem, place: str, part: _Part, begin: int) -> bytes:
    with filesystem.open_input_file(f"{place}/{part.name}") as stream:
        stream.seek(begin)
        return stream.read()


def _replay(content: bytes, folder: Path) -> None:
    """Do what the lines of parts tell: append lines to the logs, cut them, and write losses."""
    lines: dict[str, list[str]] = {name: [] for name in TEXTS}

    def write() -> None:
        for name, texts in lines.items():
            if texts:
                with (folder / name).open("a", encoding="utf-8") as file:
                    file.write("".join(texts))
                texts.clear()

    for event in content.decode(errors="replace").split("\n"):
        try:
            value = load_json(event)
        except ValueError:
            continue
        if not isinstance(value, dict):
            continue
        name, line, step = value.get("file"), value.get("line"), value.get("cut")
        if type(step) is int and 0 <= step <= MAX_STEPS:
            write()
            cut_logs(folder, step)
        elif (found := _losses_of(value)) is not None:
            write_step_losses(folder / STEP_LOSSES, *found)
        elif name in lines and is_line(line, TEXTS[name]):
            lines[name].append(json.dumps(line) + "\n")
    write()


def cut_logs(folder: Path, step: int) -> None:
    """Drop the metrics and the samples of a step and of later ones, and the losses of later steps."""
    for name in _CUT:
        cut_lines(folder / name, step - 1, TEXTS[name])
    cut_step_losses(folder / STEP_LOSSES, step)


def _losses_of(event: dict[str, Any]) -> tuple[int, NDArray[np.float32]] | None:
    """Return the first step and the losses of an event; None if it has none."""
    first_step, text = event.get("first_step"), event.get("losses")
    if type(first_step) is not int or not isinstance(text, str) or not 1 <= first_step <= MAX_STEPS:
        return None
    try:
        return first_step, decode_losses(base64.b64decode(text, validate=True))
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


def _write(filesystem: FileSystem, place: str, part: _Part, content: bytes) -> None:
    with filesystem.open_output_stream(f"{place}/{part.name}") as stream:
        stream.write(content)
