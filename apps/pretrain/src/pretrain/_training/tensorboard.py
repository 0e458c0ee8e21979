"""TensorBoard's event files, written without delay.

tensorboardX's `SummaryWriter` passes events to a thread through a queue, and its `flush` does not wait for the queue: a
kill loses the events in the queue. This module calls tensorboardX's `EventsWriter` directly.
"""

import os
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from pretrain._run.files import sync_file, sync_folder
from pretrain._run.metrics import Record

_proto: Any = event_pb2  # its import makes the classes; type checkers do not see them


class TensorBoard:
    """The event file of one start of a run.

    Args:
        folder: the folder of all event files of the run.
        start: the first step to be recorded. TensorBoard hides the later steps of earlier starts.
    """

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        before = {*folder.iterdir()}
        # The name contains the time in seconds. The process id makes the name unique.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}")
        (self._path,) = {*folder.iterdir()} - before
        self._add(start, session_log=_proto.SessionLog(status=_proto.SessionLog.START))

    def write(self, record: Record) -> None:
        """Record the values of a step."""
        for name, value in record.items():
            if name != "step":
                self._add(record["step"], summary=scalar(name, value))

    def flush(self) -> None:
        """Make the recorded events durable."""
        self._writer.flush()
        sync_file(self._path)
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.write_event(_proto.Event(wall_time=time.time(), step=step, **what))
