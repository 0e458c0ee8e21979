"""Crash-safe numbered checkpoints, each of them listed only once it is complete."""

import errno
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import jax

from ray_jax_launch._checkpoint.broadcast import from_first_process
from ray_jax_launch._checkpoint.catalog import all_damaged, intact_step, open_store
from ray_jax_launch._checkpoint.pytree import as_wanted, to_save
from ray_jax_launch._checkpoint.writers import RESERVED, make_writer
from ray_jax_launch._errors import (
    DamagedCheckpointError,
    DeletedCheckpointError,
    LaunchError,
    StorageFullError,
    UnsavedCheckpointError,
)
from ray_jax_launch._numbers import check_number
from ray_jax_launch._storage import StoragePath, as_storage_path, join_path

# How long `restore_latest` goes on to newer checkpoints: so many times, and so many seconds.
_MIN_ATTEMPTS, _PATIENCE_S = 5, 60.0
# Of a full disk, and of a full quota. Orbax and tensorstore pass on the text of these errors, not their numbers.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What Orbax, tensorstore and the file system raise when files vanish while they are read.
_READ_ERRORS = (OSError, ValueError, LookupError, RuntimeError)

_logger = logging.getLogger("ray_jax_launch")
T = TypeVar("T")


class Restored(NamedTuple):
    """A checkpoint that was read."""

    step: int
    """Its number."""

    items: dict[str, Any]
    """The trees that were asked for."""

    metadata: dict[str, Any]
    """What was saved as its metadata."""


class _Pending(NamedTuple):
    """A save that has begun."""

    step: int
    scores: dict[int, float | None]
    """The checkpoints that are kept once it is durable, and what the best are chosen by."""

    done: Future[None]


class Checkpoints:
    """The checkpoints of a run, written and read by all of its processes together.

    Every process writes its own shards, in the background. A checkpoint is listed once it is complete, with
    checksums of its files: in a folder, Orbax writes under a temporary name and renames; in object storage, an object
    that lists the others is written last.

    The first process alone looks at the storage, and tells the others which checkpoints there are: what
    `latest_step` answers is the same on every process, also where NFS shows an old listing to one of them. So each
    call is made by every process, at the same point.

    Args:
        folder: where to: a folder on storage that all processes share, made if missing; or a URI such as
            `s3://bucket/run/checkpoints`, opened as Ray opens its own (by `pyarrow.fs`). For a URI, every
            process has its shards on its local disk (see `TMPDIR`) until they are uploaded, and reads the entire
            checkpoint to there when it restores. In a loop that `launch` runs it may be left out: `checkpoints` in
            the run's own folder.
        num_to_keep: how many of the newest to keep.
        num_best_to_keep: how many of those with the lowest scores to keep beside them (see `save`).
        read_only: change nothing in the folder, not even what a crash left there.
        verify: read the newest checkpoint to compare its checksums, and quarantine damaged ones with a warning,
            so that the one before it is now the newest. Only the first process reads. Without effect if `read_only`.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
        LaunchError: the storage cannot be read or written.

    >>> import tempfile, jax.numpy as jnp
    >>> with Checkpoints(Path(tempfile.mkdtemp())) as checkpoints:
    ...     checkpoints.save(10, {"params": {"w": jnp.ones(3)}}, metadata={"seed": 1})
    ...     checkpoints.wait()
    ...     checkpoints.latest_step(), checkpoints.metadata(10)
    (10, {'seed': 1})
    """

    def __init__(
        self,
        folder: StoragePath | None = None,
        *,
        num_to_keep: int = 2,
        num_best_to_keep: int = 0,
        read_only: bool = False,
        verify: bool = True,
    ) -> None:
        if folder is None:
            from ray_jax_launch._train.worker_context import current_session  # imports Ray Train, which takes seconds

            folder = join_path(current_session().run_path, "checkpoints")
        place = as_storage_path(folder)
        self._folder = place.absolute() if isinstance(place, Path) else place
        self._num_to_keep = check_number("num_to_keep", num_to_keep, at_least=1)
        self._num_best_to_keep = check_number("num_best_to_keep", num_best_to_keep, at_least=0)
        self._read_only, self._closed = read_only, False
        self._pending: _Pending | None = None

        def open_and_list() -> tuple[list[tuple[int, float | None]], str]:
            if not read_only:
                open_store(self._folder).prepare()
                if verify:
                    intact_step(self._folder, quarantine=True)
            return self._list(), uuid.uuid4().hex

        listed, run_id = from_first_process(open_and_list)
        self._scores: dict[int, float | None] = dict(listed)
        self._durable_step = self.latest_step()
        self._store = open_store(self._folder)
        self._writer = make_writer(self._folder, self._store, run_id)
        self._thread = ThreadPoolExecutor(1, "checkpoints")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self.wait()
            elif self._pending is not None:
                # What was saved before the error is worth waiting for, and the error is what the caller should see.
                error = self._pending.done.exception()
                if error is not None:
                    _logger.error("checkpoint %s in %s was not saved: %s", self._pending.step, self._folder, error)
        finally:
            self._closed = True
            self._thread.shutdown()
            self._writer.close()

    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, or None where there is none. The same on every process.

        A checkpoint that is being saved counts once `wait`, or the next `save`, has returned.
        """
        return max(self._scores, default=None)

    def durable_step(self) -> int | None:
        """Number of the newest checkpoint that is known to be durable, or None. Does not wait.

        A checkpoint that is being saved counts as soon as it is listed. Unlike `latest_step`, the processes may
        answer differently at the same moment: for what one process does alone, such as reporting.
        """
        return self._durable_step

    def save(
        self, step: int, items: Mapping[str, Any], *, metadata: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Copy arrays to host memory and begin to write them as a checkpoint, in the background.

        The save before this one is waited for first. The checkpoint is durable once `wait` or the next `save` has
        returned, or the `with` block has ended; these raise what went wrong in the background. A checkpoint that is
        no longer to be kept is deleted in the background, once this one is durable.

        Args:
            step: its number.
            items: named trees of arrays and numbers, restored together or one by one. They may change once this
                returns. Where there are several processes, the arrays are global ones, whose shards are on all of them.
            metadata: anything that JSON can hold.
            score: what the best are chosen by, such as a validation loss: lower is better. One that is not finite
                counts as none.

        Raises:
            ValueError: the step is not later than the newest checkpoint's; an item cannot be named so, or is no
                tree; a leaf is no number, is empty, or is of this process alone; or this was opened read-only, or is
                closed.
            TypeError: the metadata hold what JSON does not.
            UnsavedCheckpointError: the save before this one failed.
        """
        if self._closed or self._read_only:
            raise ValueError(
                f"expected checkpoints that are open for writing, but these in {self._folder} are "
                f"{'closed' if self._closed else 'opened read-only'}: make a new Checkpoints"
            )
        self.wait()
        newest = self.latest_step()
        step = check_number(
            f"the step of the next checkpoint in {self._folder}",
            step,
            at_least=0 if newest is None else newest + 1,
            remedy="Continue from the newest checkpoint, or start a new run in another folder",
        )
        for name in items:
            if name in RESERVED or not re.fullmatch(r"[a-zA-Z][\w-]{0,99}", str(name), re.ASCII):
                raise ValueError(
                    "expected names of items in letters, digits, - and _, other than "
                    f"{' and '.join(RESERVED)}, got {name!r}"
                )
        trees = to_save(items)
        json.dumps(dict(metadata))
        # A number of jax's or NumPy's would not become JSON.
        score = None if score is None or not math.isfinite(score) else float(score)
        self._writer.begin(step, trees, dict(metadata), score)
        scores = self._select({**self._scores, step: score})
        self._pending = _Pending(step, scores, self._thread.submit(self._finish, step, scores))

    def wait(self) -> None:
        """Return once the checkpoint that is being saved is durable and listed.

        Raises:
            UnsavedCheckpointError: it could not be written. Its cause says why.
            StorageFullError: there was no room for it.
        """
        if self._pending is None:
            return
        (step, scores, done), self._pending = self._pending, None
        error = done.exception()
        if error is not None and any(os.strerror(number) in str(error) for number in _NO_ROOM):
            raise StorageFullError(
                f"the storage must have room for a checkpoint, got a full disk at checkpoint {step} in {self._folder}. "
                "Free some space, then start again: the checkpoints before it are unchanged"
            ) from error
        if error is not None:
            raise UnsavedCheckpointError(
                f"checkpoint {step} in {self._folder} must be written, got {error}. The checkpoints before it are "
                "unchanged: check the storage, then start again"
            ) from error
        self._scores = scores

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read items of a checkpoint.

        Args:
            step: its number.
            like: for each item wanted, a tree of arrays or `jax.ShapeDtypeStruct`s whose types and shardings the
                result has. These need not be those it was saved from; its leaves and their shapes must.

        Raises:
            ValueError: there is no checkpoint of this number.
            MismatchedCheckpointError: there is no such item, leaf or shape in it.
            DamagedCheckpointError: it was damaged since it was last read (object storage only).
            DeletedCheckpointError: it was opened read-only, and the run that writes deleted it meanwhile.
            LaunchError: the storage cannot be read, or a node does not see the folder.
        """
        self._check_exists(step)
        restored = self._reading(step, lambda: self._writer.restore(step, like))
        return _as_wanted(like, restored)

    def restore_latest(self, like: Mapping[str, Any]) -> Restored | None:
        """Read items of the newest undamaged checkpoint, beside a run that may be writing and deleting.

        Opened read-only by one process, this looks for new checkpoints, copies the files of the items to the local
        disk (see `TMPDIR`), compares their checksums, and takes a newer checkpoint where the run deletes the one that
        is read. Otherwise it is `restore` of the newest checkpoint.

        Args:
            like: see `restore`.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            MismatchedCheckpointError: there is no such item, leaf or shape in it.
            DamagedCheckpointError: there are checkpoints, and all of them are damaged.
            LaunchError: the storage cannot be read; or checkpoints are deleted faster than they can be read.
        """
        if not self._read_only or jax.process_count() > 1:
            step = self._newest()
            return None if step is None else Restored(step, self.restore(step, like), self.metadata(step))
        damaged: dict[int, str] = {}
        deadline, num_attempts = time.monotonic() + _PATIENCE_S, 0
        while num_attempts < _MIN_ATTEMPTS or time.monotonic() < deadline:
            self._scores = dict(self._list())
            left = self._scores.keys() - damaged.keys()
            if not left and damaged:
                raise all_damaged(self._folder, damaged)
            if not left:
                return None
            step, num_attempts = max(left), num_attempts + 1
            try:
                return self._reading(step, lambda step=step: self._read_copy(step, like))
            except DamagedCheckpointError as error:
                _logger.warning("checkpoint %s in %s is damaged (%s)", step, self._folder, error)
                damaged[step] = str(error)
            except DeletedCheckpointError:
                continue
        raise LaunchError(
            f"a checkpoint in {self._folder} must last as long as it takes to read one, got {num_attempts} that were "
            "deleted meanwhile. Save less often, or keep more of them"
        )

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved as a checkpoint's metadata. The first process reads it.

        Raises:
            ValueError: there is no checkpoint of this number.
            DeletedCheckpointError: it was opened read-only, and the run that writes deleted it meanwhile.
        """
        self._check_exists(step)
        return from_first_process(lambda: self._reading(step, lambda: self._store.metadata(step)))

    def _read_copy(self, step: int, like: Mapping[str, Any]) -> Restored:
        metadata = self._store.metadata(step)
        return Restored(step, _as_wanted(like, self._writer.restore_copy(step, like)), metadata)

    def _list(self) -> list[tuple[int, float | None]]:
        store = open_store(self._folder)
        return [(step, store.score(step) if self._num_best_to_keep else None) for step in store.steps()]

    def _newest(self) -> int | None:
        if not self._read_only:
            self.wait()
            return self.latest_step()
        return from_first_process(lambda: intact_step(self._folder))

    def _check_exists(self, step: int) -> None:
        if self._pending is not None and step == self._pending.step:
            self.wait()
        if step not in self._scores and self._read_only:
            self._scores = dict(from_first_process(self._list))
        if step not in self._scores:
            raise ValueError(f"expected one of the checkpoints {sorted(self._scores)} in {self._folder}, got {step}")

    def _reading(self, step: int, read: Callable[[], T]) -> T:
        """Read a checkpoint. Opened read-only, another process may delete it meanwhile."""
        if not self._read_only or jax.process_index() > 0:
            return read()
        version = self._store.version(step)
        try:
            result = read()
        except _READ_ERRORS as error:
            if version is None or self._store.version(step) != version:
                raise self._deleted(step) from error
            raise
        # Orbax may read zeros where files are missing.
        if version is None or self._store.version(step) != version:
            raise self._deleted(step)
        return result

    def _deleted(self, step: int) -> DeletedCheckpointError:
        return DeletedCheckpointError(
            f"checkpoint {step} in {self._folder} must stay while it is read, but the run has deleted it. Read the "
            "newest one instead"
        )

    def _select(self, scores: dict[int, float | None]) -> dict[int, float | None]:
        """Select the checkpoints to keep: the newest and the best."""
        steps = sorted(scores)
        ranked = sorted((score, step) for step, score in scores.items() if score is not None)
        kept = {*steps[-self._num_to_keep :], *(step for _, step in ranked[: self._num_best_to_keep])}
        return {step: scores[step] for step in steps if step in kept}

    def _finish(self, step: int, scores: dict[int, float | None]) -> None:
        """What is done in the background: write, list, delete old checkpoints."""
        self._writer.commit(step)
        self._durable_step = step
        if jax.process_index() > 0:
            return
        for old in self._scores.keys() - scores.keys():
            try:
                self._store.delete(old)
            except (OSError, LaunchError) as error:
                _logger.warning("checkpoint %s in %s cannot be deleted: %s", old, self._folder, error)


def _as_wanted(like: Mapping[str, Any], restored: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_wanted(tree, restored[name]) if name in restored else tree for name, tree in like.items()}
