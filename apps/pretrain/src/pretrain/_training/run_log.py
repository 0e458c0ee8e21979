"""The log of a run, written by rank 0: metrics, the starts of the workers, and trackers such as TensorBoard."""

import time
from collections.abc import Callable
from types import TracebackType

import jax

from pretrain._run.files import append_line, sync_file, sync_folder
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import Record, cut_lines, finite
from pretrain._trackers.tracker import Trackers


class RunLog:
    """The log of a run. Rank 0 writes; other ranks do nothing.

    Args:
        folder: the run's folder.
        send: called with each record.
        open_trackers: called with the folder and the first step, to open the trackers.
    """

    def __init__(
        self,
        folder: RunFolder,
        send: Callable[[Record], None],
        open_trackers: Callable[[RunFolder, int], Trackers],
    ) -> None:
        self._send, self._open_trackers = send, open_trackers
        self._writes = jax.process_index() == 0
        self._folder = folder.for_worker() if self._writes else folder
        self._trackers: Trackers | None = None

    @property
    def folder(self) -> RunFolder:
        """The folder that rank 0 writes, on this machine."""
        return self._folder

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writes:
            if self._trackers is not None:
                self._trackers.close()
            try:
                self._folder.push()
            finally:
                self._folder.delete_copy()

    def begin(self, start: int) -> None:
        """Start at a step. Earlier records of this step and later ones are dropped: the run writes them again."""
        if not self._writes:
            return
        cut_lines(self._folder.metrics, start - 1)
        append_line(self._folder.starts, {"step": start, "time_s": time.time(), "workers": jax.process_count()})
        self._trackers = self._open_trackers(self._folder, start)

    def write(self, record: Record) -> None:
        """Write a record."""
        if not self._writes:
            return
        record = finite(record)
        append_line(self._folder.metrics, record)
        self._send(record)
        if self._trackers is not None:
            self._trackers.write(record)

    def push(self) -> None:
        """Make the records durable. Call this before a checkpoint is saved.

        A resumed run continues after its checkpoint, and does not write earlier records again.
        """
        if not self._writes:
            return
        for path in (self._folder.metrics, self._folder.starts):
            sync_file(path)
        sync_folder(self._folder.path)
        if self._trackers is not None:
            self._trackers.flush()
        self._folder.push()
