"""Checkpoints that survive: numbered, each there only once it is whole."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ray_jax_launch._errors import DamagedCheckpointError
from ray_jax_launch._orbax import RESERVED, FolderCheckpoints, ObjectCheckpoints
from ray_jax_launch._steps import intact_step, latest_step, list_steps
from ray_jax_launch._storage import StoragePath, is_uri, join_path
from ray_jax_launch._trees import as_wanted, to_save


class Checkpoints:
    """The checkpoints of a run, written and read by all of its processes together.

    Every process writes its own shards, in the background. A checkpoint is listed once all of it is there, with
    checksums of its files: in a folder, Orbax writes under a temporary name and renames; in object storage, an object
    that lists the others is written last. Each call is made by every process, at the same point.

    Args:
        folder: where to: a folder on storage that all processes share, made if missing; or a URI such as
            `s3://bucket/run/checkpoints`, opened as Ray opens its own (by `pyarrow.fs`). For the latter, every
            process has its shards on its local disk (see `TMPDIR`) until they are uploaded, and reads the whole
            checkpoint to there when it restores. In a loop that `launch` runs it may be left out: `checkpoints` in
            the run's own folder.
        num_to_keep: how many of the newest to keep.
        num_best_to_keep: how many of those with the lowest scores to keep beside them (see `save`).
        read_only: change nothing in the folder, not even what a crash left there.
        verify: read the newest checkpoint to compare its checksums, and set damaged ones aside with a warning,
            so that the one before it is now the newest. To be left out where `intact_step` was just called.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.
        LaunchError: the object storage cannot be reached.

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
        if num_to_keep < 1 or num_best_to_keep < 0:
            raise ValueError(
                f"expected to keep at least 1 checkpoint, and 0 or more of the best, got {num_to_keep} and "
                f"{num_best_to_keep}"
            )
        if folder is None:
            from ray_jax_launch._session import current_session  # imports Ray Train, which takes seconds

            folder = join_path(current_session().run_path, "checkpoints")
        self._folder = folder if is_uri(folder) else Path(folder).absolute()
        if verify and not read_only:
            _verify(self._folder)
        self._read_only, self._closed = read_only, False
        kind = ObjectCheckpoints if is_uri(folder) else FolderCheckpoints
        self._kept = kind(
            self._folder,  # pyright: ignore[reportArgumentType]
            num_to_keep=num_to_keep,
            num_best_to_keep=num_best_to_keep,
            read_only=read_only,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if exc_type is None:
                self._kept.wait()
        finally:
            self._closed = True
            self._kept.close()

    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, or None where there is none. The same on every process."""
        return latest_step(self._folder)

    def save(
        self, step: int, items: Mapping[str, Any], *, metadata: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Begin to write a checkpoint; `wait` tells when it is there. So does the end of the `with` block.

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
        """
        if self._closed or self._read_only:
            raise ValueError(
                f"expected checkpoints that are open for writing, but these in {self._folder} are "
                f"{'closed' if self._closed else 'opened read-only'}: make a new Checkpoints"
            )
        newest = self.latest_step()
        if newest is not None and step <= newest:
            raise ValueError(
                f"expected a step after {newest}, the newest checkpoint in {self._folder}, got {step}: continue from "
                "that one, or begin anew in another folder"
            )
        if step < 0 or step != int(step):
            raise ValueError(f"expected a whole number from 0 on as a checkpoint's step, got {step}")
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
        self._kept.save(int(step), trees, dict(metadata), score)

    def wait(self) -> None:
        """Return once the checkpoint that was begun is durable and listed."""
        self._kept.wait()

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read items of a checkpoint.

        Args:
            step: its number.
            like: for each item wanted, a tree of arrays or `jax.ShapeDtypeStruct`s whose types and shardings the
                result has. These need not be those it was saved from; its leaves and their shapes must.

        Raises:
            ValueError: there is no checkpoint of this number, or no such item, leaf or shape in it.
            DamagedCheckpointError: it was damaged since it was last read (object storage only).
        """
        self._check_exists(step)
        restored = self._kept.restore(step, like)
        return {name: as_wanted(tree, restored[name]) if name in restored else tree for name, tree in like.items()}

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved as a checkpoint's metadata.

        Raises:
            ValueError: there is no checkpoint of this number.
        """
        self._check_exists(step)
        return self._kept.metadata(step)

    def _check_exists(self, step: int) -> None:
        steps = list_steps(self._folder)
        if step not in steps:
            raise ValueError(f"expected one of the checkpoints {sorted(steps)} in {self._folder}, got {step}")


def _verify(folder: StoragePath) -> None:
    """The first process reads and sets aside; all of them learn whether something is left."""
    error = None
    if jax.process_index() == 0:
        try:
            intact_step(folder, set_aside=True)
        except DamagedCheckpointError as damaged:
            error = damaged
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.bool(error is not None)) and error is None:
        error = DamagedCheckpointError(f"expected an undamaged checkpoint in {folder}: process 0 found none")
    if error is not None:
        raise error
