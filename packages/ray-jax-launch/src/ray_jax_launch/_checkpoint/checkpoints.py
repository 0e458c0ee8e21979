"""Crash-safe numbered checkpoints, listed only after commit."""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import jax

from ray_jax_launch._checkpoint.broadcast import from_leader, gather
from ray_jax_launch._checkpoint.catalog import all_damaged, newest_intact, open_store, unsaved
from ray_jax_launch._checkpoint.checksums import STEP_NAME
from ray_jax_launch._checkpoint.pytree import check_items, items_as_wanted, to_metadata, to_save
from ray_jax_launch._checkpoint.save_events import notify, notify_of_failure
from ray_jax_launch._checkpoint.writers import complete, make_writer
from ray_jax_launch._control.session import current_session, unwatched
from ray_jax_launch._errors import DamagedCheckpointError, DeletedCheckpointError, LaunchError, shown
from ray_jax_launch._numbers import check_flag, check_number, check_type
from ray_jax_launch._storage import StoragePath, as_storage_path, join_path

# `restore_latest` tries newer checkpoints at least this often, and for this time.
_MIN_ATTEMPTS, _PATIENCE_S = 5, 60.0
# The steps that an error lists.
_MAX_CHOICES = 20
# Errors of Orbax, tensorstore and the file system if files are deleted while they are read.
_READ_ERRORS = (OSError, ValueError, LookupError, RuntimeError)

_logger = logging.getLogger("ray_jax_launch")
T = TypeVar("T")


class Restored(NamedTuple):
    """A restored checkpoint."""

    step: int
    """Number of the checkpoint."""

    items: dict[str, Any]
    """The requested trees."""

    metadata: dict[str, Any]
    """Metadata of the checkpoint."""


class _Pending(NamedTuple):
    """A save in the background."""

    step: int
    kept: set[int]
    """Checkpoints to keep once this save is durable."""

    done: Future[None]


class Checkpoints:
    """Numbered checkpoints of a run, written and read by all processes together.

    Every process writes its own shards in the background. A checkpoint is listed when it is complete, with checksums
    of its files. In a folder, Orbax writes under a temporary name, and renames at the end. In object storage, an object
    that lists the others is written last.

    Only the first process lists the storage, and sends the list to the others. All processes therefore have the same
    `latest_step`, even if NFS shows an old listing to one of them. Every process must make each call, at the same
    point of the loop.

    Args:
        folder: a folder on storage that all processes share, made if missing; or a URI such as
            `s3://bucket/run/checkpoints`, opened as Ray opens URIs (by `pyarrow.fs`). For a URI, every process
            writes its shards to the local disk (see `TMPDIR`) before it uploads them. To restore, one process of each
            node downloads the requested items to the local disk, without archives that hold no shard of the node.
            Default in a loop that `launch` runs: `checkpoints` in the run's folder.
        num_to_keep: number of newest checkpoints to keep, or None to keep all.
        keep: returns whether to keep the checkpoint of a step that is not one of the newest. Every `save` asks about
            each such step, in every process, before it writes: a step that was kept can be deleted later. It must
            return the same in all processes.
        read_only: change nothing in the folder, and do not clean up after a crash.
        verify: read the newest checkpoint and compare its checksums. A damaged checkpoint is quarantined with a
            warning, and the one before it becomes the newest. Each process reads its share. No effect if `read_only`.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
        LaunchError: the storage cannot be read or written, or a newer version wrote a checkpoint.

    >>> import tempfile, jax.numpy as jnp
    >>> with Checkpoints(Path(tempfile.mkdtemp())) as checkpoints:
    ...     checkpoints.save(10, {"params": {"w": jnp.ones(3)}}, metadata={"seed": 1})
    ...     checkpoints.wait()
    ...     checkpoints.latest_step(), checkpoints.broadcast_metadata(10)
    (10, {'seed': 1})
    """

    def __init__(
        self,
        folder: StoragePath | None = None,
        *,
        num_to_keep: int | None = 2,
        keep: Callable[[int], bool] | None = None,
        read_only: bool = False,
        verify: bool = True,
    ) -> None:
        if folder is None:
            run_path = current_session().run_path
            if run_path is None:
                raise LaunchError(
                    "folder must be given with a storage_filesystem of your own, got None. Name a folder."
                )
            folder = join_path(run_path, "checkpoints")
        path = as_storage_path(folder)
        self._folder = path.absolute() if isinstance(path, Path) else path
        self._num_to_keep = None if num_to_keep is None else check_number("num_to_keep", num_to_keep, at_least=1)
        check_type("keep", keep, Callable | None, "a function of a step, or None")
        self._keep = keep or (lambda step: False)
        check_flag("read_only", read_only)
        check_flag("verify", verify)
        self._read_only = read_only
        self._closed = False
        self._pending: _Pending | None = None

        def open_storage() -> str:
            self._store = open_store(self._folder)
            if not read_only:
                self._store.prepare()
            return uuid.uuid4().hex

        # Only the first process opens the storage before the others know whether it succeeds.
        run_id = from_leader(open_storage)
        if jax.process_index() > 0:
            self._store = open_store(self._folder)
        if verify and not read_only:
            self._newest_intact(quarantine=True)
        self._steps: set[int] = set(from_leader(self._store.steps))
        self._durable_step = self.latest_step()
        if self._durable_step is not None and not read_only and jax.process_index() == 0:
            notify(self._folder, self._durable_step)
        self._writer = make_writer(self._folder, self._store, run_id)
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._cleaner = ThreadPoolExecutor(1, "checkpoints-cleaner")
        if not read_only:
            self._in_background(self._store.clean_up)

    def __enter__(self) -> "Checkpoints":
        return self

    @unwatched()
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        try:
            if exc is None:
                self.wait()
            elif self._pending is not None:
                # The save before the error is completed. The caller gets the error of the `with` block.
                error = self._pending.done.exception()
                if error is not None and error is not exc.__cause__:
                    _logger.error("%s", unsaved(self._folder, self._pending.step, error))
        finally:
            self._closed = True
            closing = self._thread.submit(self._close)  # after the save
            self._thread.shutdown(wait=False)
            complete(closing)

    def _close(self) -> None:
        self._cleaner.shutdown()
        self._writer.close()

    def latest_step(self) -> int | None:
        """Return the number of the newest checkpoint, or None. All processes return the same number.

        A checkpoint that is being saved counts when `wait` or the next `save` has returned.
        """
        return max(self._steps, default=None)

    def durable_step(self) -> int | None:
        """Return the number of the newest checkpoint that is known to be durable, or None. Does not wait.

        A checkpoint that is being saved counts as soon as it is listed. Processes can return different numbers at
        the same time, unlike `latest_step`. Use it for work of one process, such as reports.
        """
        return self._durable_step

    @unwatched()
    def save(self, step: int, items: Mapping[str, Any], *, metadata: Mapping[str, Any]) -> None:
        """Copy arrays to host memory and begin to write them in the background. Every process must call this.

        This first waits for the save before. The checkpoint is durable when `wait` or the next `save` has returned, or
        the `with` block has ended. They raise errors of the background. When the checkpoint is durable, old
        checkpoints are no longer listed. Their files are deleted in the background; only the end of the `with` block
        waits for this.

        Args:
            step: number of the checkpoint.
            items: named trees of arrays and numbers, which can be restored together or one by one. The caller can
                change them when this returns. With several processes, the arrays are global arrays with shards on
                all of them.
            metadata: a JSON object.

        Raises:
            ValueError: the step is not greater than that of the newest checkpoint; the name of an item is not valid;
                an item is not a tree; a leaf is not a number, is empty, belongs to this process only, or has the name
                of another leaf when the keys are joined by dots; the metadata cannot be JSON; or this object is
                read-only or closed.
            UnsavedCheckpointError: this save cannot begin, or the save before failed; a `StorageFullError` if the
                storage is full.
        """
        self._check_open(for_writing=True)
        self.wait()
        newest = self.latest_step()
        step = check_number(
            f"the step of the next checkpoint in {self._folder}",
            step,
            at_least=0 if newest is None else newest + 1,
            remedy="Continue from the newest checkpoint, or start a new run in another folder",
        )
        if not STEP_NAME.fullmatch(str(step)):
            raise LaunchError(f"step must be less than 10**18, got {str(step)[:40]}. Count steps from 0.")
        trees, fields = to_save(items), to_metadata(metadata)
        kept = self._select({*self._steps, step})
        try:
            self._writer.begin(step, trees, fields)
        except (OSError, ValueError) as error:  # of the file system, and of tensorstore
            raise unsaved(self._folder, step, error) from error
        done = self._thread.submit(self._finish, step, kept)
        self._pending = _Pending(step, kept, done)
        done.add_done_callback(partial(self._report_failure, step))

    def _report_failure(self, step: int, done: Future[None]) -> None:
        """Report a save that has failed, so that the loop ends at its next step and not at its next save."""
        error = done.exception()
        if error is not None:
            failure = unsaved(self._folder, step, error)
            failure.__cause__ = error
            notify_of_failure(failure)

    @unwatched()
    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is durable and listed.

        Raises:
            UnsavedCheckpointError: the checkpoint could not be written. `__cause__` is the reason. A `StorageFullError`
                if the storage is full.
        """
        if self._pending is None:
            return
        (step, kept, done), self._pending = self._pending, None
        error = done.exception()
        if error is not None:
            raise unsaved(self._folder, step, error) from error
        self._steps = kept

    @unwatched()
    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read items of a checkpoint, in all processes together: every process must call this.

        Args:
            step: number of the checkpoint.
            like: for each requested item, a tree of arrays or `jax.ShapeDtypeStruct`s. The result has their types and
                shardings, which can differ from those that were saved. The leaves and their shapes must be the same.

        Raises:
            ValueError: there is no checkpoint of this number.
            MismatchedCheckpointError: the checkpoint does not have these items, leaves or shapes.
            DamagedCheckpointError: the checkpoint was damaged after it was verified (in a folder: `checksums.json`).
            DeletedCheckpointError: this object is read-only, and the run deleted the checkpoint.
            LaunchError: the storage cannot be read, or a node does not see the folder.
        """
        check_items("like", like)
        step = self._check_exists(step)
        restored = self._reading(step, lambda: self._writer.restore(step, like))
        return items_as_wanted(like, restored)

    def restore_latest(self, like: Mapping[str, Any]) -> Restored | None:
        """Read items of the newest undamaged checkpoint, in all processes together. A run can write at the same time.

        Read-only and with one process, this looks for new checkpoints, copies the files of the items to the local
        disk (see `TMPDIR`), and compares their checksums. If the run deletes the checkpoint, a newer one is read.
        Otherwise this calls `restore` for the newest checkpoint.

        Args:
            like: see `restore`.

        Returns:
            The checkpoint, or None if there is none.

        Raises:
            MismatchedCheckpointError: the checkpoint does not have these items, leaves or shapes.
            DamagedCheckpointError: there are checkpoints, and all of them are damaged.
            LaunchError: the storage cannot be read, or checkpoints are deleted faster than they can be read.
        """
        check_items("like", like)
        self._check_open()
        if not self._read_only or jax.process_count() > 1:
            step = self._newest()
            return None if step is None else self.restore_step(step, like)
        damaged: dict[int, str] = {}
        deadline = time.monotonic() + _PATIENCE_S
        num_attempts = 0
        while num_attempts < _MIN_ATTEMPTS or time.monotonic() < deadline:
            self._steps = set(self._store.steps())
            left = self._steps - damaged.keys()
            if not left and damaged:
                raise all_damaged(self._folder, damaged)
            if not left:
                return None
            step = max(left)
            num_attempts += 1
            try:
                return self._reading(step, lambda step=step: self._read_copy(step, like))
            except DamagedCheckpointError as error:
                _logger.warning("checkpoint %s in %s is damaged (%s)", step, self._folder, error)
                damaged[step] = str(error)
            except DeletedCheckpointError:
                continue
        raise LaunchError(
            f"{num_attempts} checkpoints in {self._folder} were deleted while they were read. Save less often, or keep "
            "more checkpoints."
        )

    def restore_step(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Read items of one checkpoint as `restore_latest` does, in all processes together.

        Read-only and with one process, this looks for the step in the storage, copies the files of the items to the
        local disk, and compares their checksums. Otherwise this calls `restore`. No other checkpoint is read.

        Args:
            step: number of the checkpoint.
            like: see `restore`.

        Raises:
            ValueError: there is no checkpoint of this number. The message lists those that exist.
            MismatchedCheckpointError: the checkpoint does not have these items, leaves or shapes.
            DamagedCheckpointError: the checkpoint is damaged.
            DeletedCheckpointError: the run deleted the checkpoint while it was read.
            LaunchError: the storage cannot be read.
        """
        check_items("like", like)
        self._check_open()
        copies = self._read_only and jax.process_count() == 1
        if copies:
            self._steps = set(self._store.steps())
        step = self._check_exists(step)
        if not copies:
            return Restored(step, self.restore(step, like), self.broadcast_metadata(step))
        try:
            return self._reading(step, lambda: self._read_copy(step, like))
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"checkpoint {step} in {self._folder} is damaged ({error}). {self._choices(without=step)}"
            ) from error

    def broadcast_metadata(self, step: int) -> dict[str, Any]:
        """Read a checkpoint's metadata in the first process, and send it to all. Every process must call this.

        Raises:
            ValueError: there is no checkpoint of this number.
            DeletedCheckpointError: this object is read-only, and the run deleted the checkpoint.
        """
        step = self._check_exists(step)
        return from_leader(lambda: self._reading(step, lambda: self._store.metadata(step)))

    def _read_copy(self, step: int, like: Mapping[str, Any]) -> Restored:
        items = items_as_wanted(like, self._writer.restore_copy(step, like))
        return Restored(step, items, self._store.metadata(step))

    def _newest(self) -> int | None:
        if not self._read_only:
            self.wait()
            return self.latest_step()
        return self._newest_intact(quarantine=False)

    def _newest_intact(self, *, quarantine: bool) -> int | None:
        """Return the number of the newest checkpoint without damage. All processes verify it together."""
        return newest_intact(
            self._store, self._folder, quarantine=quarantine, find_damage=self._find_damage, leader=from_leader
        )

    def _find_damage(self, step: int) -> str | None:
        """Return the damage of a checkpoint, or None. Each process reads its share.

        The first process decides: the listing of another host may be old, so it reads what another found damaged.
        """
        number = jax.process_count()
        share = jax.process_index(), number
        problems = gather(from_leader(lambda: self._store.find_damage(step, share), jax.process_index()))
        if problems[0] is not None:
            return problems[0]
        suspects = [rank for rank, problem in enumerate(problems) if problem is not None]
        found = from_leader(lambda: [self._store.find_damage(step, (rank, number)) for rank in suspects])
        return next((problem for problem in found if problem is not None), None)

    def _check_open(self, *, for_writing: bool = False) -> None:
        if self._closed or (for_writing and self._read_only):
            state = "closed" if self._closed else "read-only"
            raise LaunchError(f"the checkpoints in {self._folder} are {state}. Make a new Checkpoints object.")

    def _check_exists(self, step: int) -> int:
        self._check_open()
        step = check_number("step", step, at_least=0)
        if self._pending is not None and step == self._pending.step:
            self.wait()
        if step not in self._steps and self._read_only:
            self._steps = set(from_leader(self._store.steps))
        if step not in self._steps:
            raise ValueError(f"step must be a checkpoint in {self._folder}, got {shown(step)}. {self._choices()}")
        return step

    def _choices(self, without: int | None = None) -> str:
        """Return a sentence that lists the newest checkpoints."""
        steps = [str(step) for step in sorted(self._steps) if step != without]
        if not steps:
            return "There is no other checkpoint." if without in self._steps else "There is none yet."
        return f"Choose one of {'..., ' if len(steps) > _MAX_CHOICES else ''}{', '.join(steps[-_MAX_CHOICES:])}."

    def _reading(self, step: int, read: Callable[[], T]) -> T:
        """Read a checkpoint. If this object is read-only, detect that the run deletes the checkpoint."""
        if not self._read_only or jax.process_index() > 0:
            return read()
        version = self._store.version(step)
        try:
            result = read()
        except _READ_ERRORS as error:
            if version is None or self._store.version(step) != version:
                raise self._deleted(step) from error
            raise
        # Orbax may read zeros for missing files.
        if version is None or self._store.version(step) != version:
            raise self._deleted(step)
        return result

    def _deleted(self, step: int) -> DeletedCheckpointError:
        return DeletedCheckpointError(
            f"the run has deleted checkpoint {step} in {self._folder} while it was read. Read the newest one."
        )

    def _select(self, steps: set[int]) -> set[int]:
        """Select the checkpoints to keep: the newest, and those that the caller keeps."""
        num_old = 0 if self._num_to_keep is None else len(steps) - self._num_to_keep
        return steps - {step for step in sorted(steps)[: max(num_old, 0)] if not self._keep(step)}

    def _finish(self, step: int, kept: set[int]) -> None:
        """Write and list a checkpoint, then delete old checkpoints. Runs in the background."""
        self._writer.commit(step)
        self._durable_step = step
        if jax.process_index() > 0:
            return
        notify(self._folder, step)
        for old in self._steps - kept:
            try:
                self._store.unlist(old)
            except (OSError, LaunchError) as error:
                _logger.warning("checkpoint %s in %s cannot be deleted: %s", old, self._folder, error)
        if self._steps - kept:
            self._in_background(self._store.sweep)

    def _in_background(self, clean_up: Callable[[], None]) -> None:
        """Delete files in the first process, and let no save wait for it."""

        def run() -> None:
            try:
                clean_up()
            except (OSError, LaunchError) as error:
                _logger.warning("files of old checkpoints in %s cannot be deleted: %s", self._folder, error)

        if jax.process_index() == 0:
            self._cleaner.submit(run)
