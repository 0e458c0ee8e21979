"""Checkpoints that survive: numbered folders, each there only once it is whole."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from ray_jax_launch._steps import latest_step

_METADATA = "metadata"


class Checkpoints:
    """The checkpoints of a run, written and read by all of its processes together.

    Every process writes its own shards, in the background. A checkpoint is written under a temporary
    name and renamed when all of it is there, so one that is listed can be restored. Each call is made
    by every process, at the same point.

    Args:
        folder: where to; on storage that all processes share. Made if missing.
        num_to_keep: how many of the newest to keep.
        read_only: change nothing in the folder, not even what a crash left there.

    >>> import tempfile, jax.numpy as jnp
    >>> with Checkpoints(Path(tempfile.mkdtemp())) as checkpoints:
    ...     checkpoints.save(10, {"params": {"w": jnp.ones(3)}}, metadata={"seed": 1})
    ...     checkpoints.wait()
    ...     checkpoints.latest_step(), checkpoints.metadata(10)
    (10, {'seed': 1})
    """

    def __init__(self, folder: Path, *, num_to_keep: int = 2, read_only: bool = False) -> None:
        self._folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else num_to_keep,
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """Number of the newest checkpoint, or None where there is none."""
        return latest_step(self._folder)

    def save(self, step: int, items: Mapping[str, Any], *, metadata: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint; `wait` tells when it is there.

        Args:
            step: its number.
            items: named trees of arrays, restored together or one by one.
            metadata: anything that JSON can hold.
        """
        trees = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        self._manager.save(step, args=ocp.args.Composite(**trees, **{_METADATA: ocp.args.JsonSave(dict(metadata))}))

    def wait(self) -> None:
        """Return once the checkpoint that was begun is on disk under its number."""
        self._manager.wait_until_finished()

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
