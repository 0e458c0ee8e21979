"""The two ways in which Orbax writes a checkpoint for us: all processes into one folder, or each into its own."""

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN
from orbax.checkpoint.type_handlers import ArrayHandler, NumpyHandler, ScalarHandler, create_type_handler_registry

from ray_jax_launch._objects import Listing, Objects, part_name
from ray_jax_launch._steps import write_checksums
from ray_jax_launch._trees import to_restore

_METADATA = "metadata"
_SCORE = "score"
# What Orbax keeps beside the items, and what it calls a folder that is not yet whole.
RESERVED = (_METADATA, "metrics")
_TEMPORARY = ".orbax-checkpoint-tmp"
_TRASH = ".trash"


class FolderCheckpoints:
    """In a folder that all processes share. Orbax writes under a temporary name and renames."""

    def __init__(self, folder: Path, *, num_to_keep: int, num_best_to_keep: int, read_only: bool) -> None:
        self._folder = folder
        self._read_only = read_only
        self._step = 0
        best = BestN(get_metric_fn=_get_score, n=num_best_to_keep, reverse=True, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            folder,
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
                # Called by the first process once all have written, before the renaming.
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._sign),
            ),
        )

    def save(self, step: int, items: Mapping[str, Any], metadata: dict[str, Any], score: float | None) -> None:
        self.wait()
        self._step = step  # of the one that is under way, which _sign looks for
        trees = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(**trees, **{_METADATA: ocp.args.JsonSave(metadata)}),
            metrics=None if score is None else {_SCORE: score},
        )

    def _sign(self) -> None:
        (written,) = self._folder.glob(f"{self._step}{_TEMPORARY}*")
        write_checksums(written)

    def wait(self) -> None:
        self._manager.wait_until_finished()
        self._empty_trash()

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        folders = [path for path in (self._folder / str(step)).iterdir() if path.is_dir() and path.name not in RESERVED]
        wanted = to_restore(like, {path.name: _saved_tree(path) for path in folders})
        if not wanted:
            return {}
        trees = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**trees))
        return {name: restored[name] for name in wanted}

    def metadata(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(**{_METADATA: ocp.args.JsonRestore()}))[_METADATA]

    def close(self) -> None:
        self._manager.close()
        self._empty_trash()

    def _empty_trash(self) -> None:
        if not self._read_only and jax.process_index() == 0:
            shutil.rmtree(self._folder / _TRASH, ignore_errors=True)


def _get_score(metrics: Mapping[str, float]) -> float:
    return metrics[_SCORE]


class ObjectCheckpoints:
    """In object storage. Each process has Orbax write its own shards on its own disk, and uploads them in one part."""

    def __init__(self, uri: str, *, num_to_keep: int, num_best_to_keep: int, read_only: bool) -> None:
        self._objects = Objects(uri, create=not read_only)
        self._num_to_keep, self._num_best_to_keep = num_to_keep, num_best_to_keep
        self._rank = jax.process_index()
        if self._rank == 0 and not read_only:
            self._objects.sweep()
        # Every process is the first one on its own disk; of equal replicas, one process writes.
        options = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={self._rank}, barrier_sync_key_prefix=f"process-{self._rank}"
        )
        handlers = create_type_handler_registry(
            (jax.Array, ArrayHandler(primary_host=None, replica_id=0, use_replica_parallel=False)),
            (np.ndarray, NumpyHandler()),
            (np.number, ScalarHandler()),
            (int, ScalarHandler()),
            (float, ScalarHandler()),
        )
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(
                # The parts of several processes become one checkpoint by unpacking them side by side, which files per
                # shard can and Orbax's database of shards cannot.
                use_ocdbt=False,
                multiprocessing_options=options,
                type_handler_registry=handlers,
            ),
            multiprocessing_options=options,
            # By default a folder is made in the background, and the news of it goes to all processes: one would begin
            # to write when another's folder is there.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )
        self._thread = ThreadPoolExecutor(1, "checkpoint-upload")
        self._pending: tuple[int, Listing, Future[tuple[int, int]]] | None = None

    def save(self, step: int, items: Mapping[str, Any], metadata: dict[str, Any], score: float | None) -> None:
        self.wait()
        staging = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        # Once this returns, the arrays have been copied: their buffers may be used again.
        self._checkpointer.save(staging / "items", args=ocp.args.PyTreeSave(dict(items)))
        self._pending = step, Listing({}, metadata, score), self._thread.submit(self._upload, step, staging)

    def _upload(self, step: int, staging: Path) -> tuple[int, int]:
        try:
            self._checkpointer.wait_until_finished()
            return self._objects.write_part(step, self._rank, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def wait(self) -> None:
        if self._pending is None:
            return
        step, listing, upload = self._pending
        self._pending = None
        parts = _gather(*upload.result())
        if self._rank == 0:
            listing.parts.update({part_name(rank): part for rank, part in enumerate(parts)})
            self._objects.commit(step, listing)
            self._delete_old()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint-{step}")

    def _delete_old(self) -> None:
        steps = sorted(self._objects.steps())
        scores = {step: self._objects.listing(step).score for step in steps} if self._num_best_to_keep else {}
        ranked = sorted((score, step) for step, score in scores.items() if score is not None)
        kept = {*steps[-self._num_to_keep :], *(step for _, step in ranked[: self._num_best_to_keep])}
        for step in steps:
            if step not in kept:
                self._objects.delete(step)

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as staging:
            self._objects.read_parts(step, Path(staging))
            wanted = to_restore(like, _saved_tree(Path(staging) / "items"))
            if not wanted:
                return {}
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
            return self._checkpointer.restore(
                Path(staging) / "items",
                args=ocp.args.PyTreeRestore(
                    abstract,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                    partial_restore=True,  # some items, each of them whole
                ),
            )

    def metadata(self, step: int) -> dict[str, Any]:
        return self._objects.listing(step).metadata

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._checkpointer.close)
            stack.callback(self._thread.shutdown)


def _saved_tree(folder: Path) -> Any:
    """Orbax's metadata of the leaves of what it wrote to a folder."""
    # Orbax declares a path class of its own, and takes any.
    return ocp.PyTreeCheckpointHandler().metadata(folder).tree  # pyright: ignore[reportArgumentType]


def _gather(size: int, checksum: int) -> list[tuple[int, int]]:
    """Size and checksum of every process's part, by rank."""
    words = np.array([size >> 32, size & 0xFFFFFFFF, checksum], np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(words)).reshape(-1, 3)
    return [(int(high) << 32 | int(low), int(crc)) for high, low, crc in gathered]
