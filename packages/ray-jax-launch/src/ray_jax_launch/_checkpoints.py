"""Checkpoints that survive: numbered folders, each there only once it is whole."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from ray_jax_launch._errors import DamagedCheckpointError
from ray_jax_launch._steps import intact_step, latest_step, write_checksums

_METADATA = "metadata"
_SCORE = "score"
_TRASH = ".trash"


class Checkpoints:
    """The checkpoints of a run, written and read by all of its processes together.

    Every process writes its own shards, in the background. A checkpoint is written under a temporary
    name and renamed when all of it is there; then checksums of its files are put beside them. Each call is
    made by every process, at the same point.

    Args:
        folder: where to; on storage that all processes share. Made if missing.
        num_to_keep: how many of the newest to keep.
        num_best_to_keep: how many of those with the lowest scores to keep beside them (see `save`).
        read_only: change nothing in the folder, not even what a crash left there.
        verify: read the newest checkpoint to compare its checksums, and set damaged ones aside with a warning,
            so that the one before it is now the newest. To be left out where `intact_step` was just called.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all of them are damaged.

    >>> import tempfile, jax.numpy as jnp
    >>> with Checkpoints(Path(tempfile.mkdtemp())) as checkpoints:
    ...     checkpoints.save(10, {"params": {"w": jnp.ones(3)}}, metadata={"seed": 1})
    ...     checkpoints.wait()
    ...     checkpoints.latest_step(), checkpoints.metadata(10)
    (10, {'seed': 1})
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_to_keep: int = 2,
        num_best_to_keep: int = 0,
        read_only: bool = False,
        verify: bool = True,
    ) -> None:
        self._folder = folder.absolute()
        self._unsigned: int | None = None
        self._read_only = read_only
        if verify and not read_only:
            _verify(self._folder)
        best = BestN(get_metric_fn=_get_score, n=num_best_to_keep, reverse=True, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                best_fn=_get_score if num_best_to_keep else None,
                preservation_policy=None
                if read_only
                else AnyPreservationPolicy([LatestN(num_to_keep), *([best] if num_best_to_keep else [])]),
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
                # To delete is to rename first: a process that is killed meanwhile leaves no half checkpoint listed.
                todelete_subdir=None if read_only else _TRASH,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()
        self._empty_trash()

    def _empty_trash(self) -> None:
        if not self._read_only and jax.process_index() == 0:
            shutil.rmtree(self._folder / _TRASH, ignore_errors=True)

    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, or None where there is none. The same on every process."""
        return latest_step(self._folder)

    def save(
        self, step: int, items: Mapping[str, Any], *, metadata: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Begin to write a checkpoint; `wait` tells when it is there.

        Args:
            step: its number.
            items: named trees of arrays, restored together or one by one.
            metadata: anything that JSON can hold.
            score: what the best are chosen by, such as a validation loss: lower is better.
        """
        trees = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(**trees, **{_METADATA: ocp.args.JsonSave(dict(metadata))}),
            metrics=None if score is None else {_SCORE: score},
        )
        self._unsigned = step

    def wait(self) -> None:
        """Return once the checkpoint that was begun is on disk under its number."""
        self._manager.wait_until_finished()
        if self._unsigned is not None and jax.process_index() == 0:
            write_checksums(self._folder / str(self._unsigned))
        self._unsigned = None
        self._empty_trash()

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read items of a checkpoint.

        Args:
            step: its number.
            like: for each item wanted, a tree of arrays or `jax.ShapeDtypeStruct`s whose shapes, types
                and shardings the result has. The shardings need not be those it was saved from.
        """
        trees = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**trees))
        return {name: restored[name] for name in like}

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved as a checkpoint's metadata."""
        return self._manager.restore(step, args=ocp.args.Composite(**{_METADATA: ocp.args.JsonRestore()}))[_METADATA]


def _get_score(metrics: Mapping[str, float]) -> float:
    return metrics[_SCORE]


def _verify(folder: Path) -> None:
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
