"""TensorBoard's event files, written without delay.

tensorboardX's `SummaryWriter` passes events to a thread through a queue, and its `flush` does not wait for the queue: a
kill loses the events in the queue. This module calls tensorboardX's `EventsWriter` directly.

A chart of TensorBoard shows one tag, with a line for each folder of event files. The training and the validation
therefore have a folder each, with the tag `loss` in both: TensorBoard's first page, Time Series, then shows the two on
one chart. Its plugin for charts of several tags has another page, which opens only by hand.

The page HPARAMS has a row for each run, with the values of the folder that has the hyperparameters: the folder of the
validation. tensorboardX's `add_hparams` would write them, and a copy of the metrics, into a folder below, a further
run. It would also write the list of columns, of which TensorBoard reads that of one run: an option that is none there
would have no column. Without this list, TensorBoard takes the columns from all runs.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import hparams, scalar, text

from pretrain._run.files import flatten, read_text, sync_file, sync_folder, write_durably
from pretrain._run.history import Sample
from pretrain._run.metrics import Record
from pretrain._trackers.shown_values import tagged

_proto: Any = event_pb2  # its import makes the classes; type checkers do not see them
# A run in object storage uploads whole files at each save. A file of this size is not changed any more.
_FULL_BYTES = 1 << 20


class TensorBoard:
    """The event files of one start of a run.

    Args:
        folder: the folder of all event files of the run.
        start: the first step that the run records. The records before it that the files lack must be written again.
            TensorBoard hides the later steps of earlier starts.
        settings: the configuration.
        hyperparameters: the options that change the result, for the page HPARAMS.
        prompts: the prompts of the samples.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        settings: dict[str, Any],
        hyperparameters: dict[str, bool | float | str],
        prompts: Sequence[str],
    ) -> None:
        self._marker = folder / "recorded_steps"
        self.first_step = self._end = min(start, _num_recorded(self._marker))
        self._train, self._val = (_EventFile(folder / name, self.first_step) for name in ("train", "val"))
        self._numbers = {prompt: number for number, prompt in enumerate(prompts, 1)}
        if self.first_step == 0:
            self._train.add(0, time.time(), text("config", _as_table(settings)))
            self._val.add(0, time.time(), _session(hyperparameters)[0])

    def write(self, record: Record) -> None:
        """Record the values of a step."""
        for tag, value in tagged(record).items():
            file = self._val if tag.startswith("val/") else self._train
            tag = tag.removeprefix("val/").removeprefix("train/")
            file.add(record["step"], record.get("time_s", time.time()), scalar(tag, value))
        if "full_val_loss" in record:  # the last step of the run
            self._val.add(record["step"], record.get("time_s", time.time()), _session({})[1])
        self._end = record["step"] + 1

    def write_sample(self, sample: Sample) -> None:
        """Record a sample as text. Its tag has the number of its prompt."""
        number = self._numbers.setdefault(sample.prompt, len(self._numbers) + 1)
        # TensorBoard reads Markdown. An indented block shows the text as it is.
        block = "".join(f"    {line}\n" for line in sample.text.splitlines())
        self._val.add(sample.step, time.time(), text(f"samples/{number}", block))

    def flush(self) -> None:
        """Make the recorded events durable, and then the number of their steps. The next start records later steps."""
        for file in (self._train, self._val):
            file.flush(self._end)
        write_durably(self._marker, str(self._end))

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        for file in (self._train, self._val):
            file.close()


class _EventFile:
    """An event file, and after it the next one. TensorBoard hides events of earlier files from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        before = {*self._folder.iterdir()}
        # TensorBoard reads the files in the order of their names, which begin with the time in seconds.
        self._writer = EventsWriter(str(self._folder / "events"), filename_suffix=f".{time.time_ns()}")
        (self._path,) = {*self._folder.iterdir()} - before
        self._write(first_step, time.time(), session_log=_proto.SessionLog(status=_proto.SessionLog.START))

    def add(self, step: int, time_s: float, summary: Any) -> None:
        """Append an event."""
        self._write(step, time_s, summary=summary)

    def flush(self, next_step: int) -> None:
        """Make the events durable. If the file is full, the next events, from `next_step` on, go to a new one."""
        self._writer.flush()
        sync_file(self._path)
        if self._path.stat().st_size >= _FULL_BYTES:
            self._writer.close()
            self._open(next_step)
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, step: int, time_s: float, **what: Any) -> None:
        self._writer.write_event(_proto.Event(wall_time=time_s, step=step, **what))


def _session(hyperparameters: dict[str, bool | float | str]) -> tuple[Any, Any]:
    """Return the summaries that begin and end a row of the page HPARAMS."""
    _, start, end = hparams(hyperparameters, {})
    return start, end


def _num_recorded(marker: Path) -> int:
    """Return the number of steps that are recorded for certain: without the file, a kill may have cut off all."""
    try:
        return max(0, int(read_text(marker)))
    except (OSError, ValueError):  # missing, or none that a run writes: the next flush replaces it
        return 0


def _as_table(settings: dict[str, Any]) -> str:
    rows = "".join(
        "| {} | {} |\n".format(name, json.dumps(value).replace("|", "\\|")) for name, value in flatten(settings).items()
    )
    return f"| option | value |\n|---|---|\n{rows}"
