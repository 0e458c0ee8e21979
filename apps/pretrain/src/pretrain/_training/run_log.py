"""The log of a run, written by rank 0: metrics, TensorBoard's events, and the starts of the workers."""

import time
from collections.abc import Callable
from types import TracebackType

import jax

from pretrain._best_effort import best_effort
from pretrain._run.files import append_line, sync_file, sync_folder
from pretrain._run.folder import RunFolder
from pretrain._run.metrics import Record, cut_lines, finite
from pretrain._training.tensorboard import TensorBoard


class RunLog:
    """The log of a run. Rank 0 writes; other ranks do nothing.

    Args:
        folder: the run's folder.
        send: called with each record.
    """

    def __init__(self, folder: RunFolder, send: Callable[[Record], None]) -> None:
        self._send = send
        self._writes = jax.process_index() == 0
        self._folder = folder.for_worker() if self._writes else folder
        self._tensorboard: TensorBoard | None = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writes:
            self._to_tensorboard(TensorBoard.close)
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
        with best_effort("TensorBoard's events"):
            self._tensorboard = TensorBoard(self._folder.tensorboard, start)

    def write(self, record: Record) -> None:
        """Write a record."""
        if not self._writes:
            return
        record = finite(record)
        append_line(self._folder.metrics, record)
        self._send(record)
        self._to_tensorboard(lambda tensorboard: tensorboard.write(record))

    def push(self) -> None:
        """Make the records durable. Call this before a checkpoint is saved.

        A resumed run continues after its checkpoint, and does not write earlier records again.
        """
        if not self._writes:
            return
        for path in (self._folder.metrics, self._folder.starts):
            sync_file(path)
        sync_folder(self._folder.path)
        self._to_tensorboard(TensorBoard.flush)
        self._folder.push()

    def _to_tensorboard(self, action: Callable[[TensorBoard], None]) -> None:
        """Call a method of the event file. If it fails, the run goes on without TensorBoard's events."""
        tensorboard, self._tensorboard = self._tensorboard, None
        if tensorboard is not None:
            with best_effort("TensorBoard's events"):
                action(tensorboard)
                self._tensorboard = tensorboard
