"""TensorBoard's events, written at once.

tensorboardX's `SummaryWriter` hands events to a thread through a queue, and its `flush` does not wait for the queue:
a kill loses the events in it. Here its `EventsWriter` is called directly.
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

_proto: Any = event_pb2  # its classes are made when it is imported, unseen by type checkers


class TensorBoard:
    """The events of one start of a run, in a file of their own.

    Args:
        folder: of all starts of the run.
        start: the first step to be recorded. TensorBoard hides what earlier starts recorded from there on.
    """

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        before = {*folder.iterdir()}
        # The name has the time in seconds; the process makes it unique.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}")
        (self._path,) = {*folder.iterdir()} - before
        self._add(start, session_log=_proto.SessionLog(status=_proto.SessionLog.START))

    def write(self, record: Record) -> None:
        """Record the values of a step."""
        for name, value in record.items():
            if name != "step":
                self._add(record["step"], summary=scalar(name, value))

    def flush(self) -> None:
        """Make what was recorded outlast a kill and a power cut."""
        self._writer.flush()
        sync_file(self._path)
        sync_folder(self._folder)

    def close(self) -> None:
        """End the file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.write_event(_proto.Event(wall_time=time.time(), step=step, **what))
