"""Writers and readers of checkpoints by Orbax: in a shared folder, or through local disks in object storage."""

import contextlib
import logging
import re
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future
from orbax.checkpoint.type_handlers import ArrayHandler, NumpyHandler, ScalarHandler, create_type_handler_registry

from ray_jax_launch._checkpoint.broadcast import ask, from_leader, gather, tell
from ray_jax_launch._checkpoint.checksums import ALL, Share
from ray_jax_launch._checkpoint.folder_store import METADATA, PARTS, FolderStore
from ray_jax_launch._checkpoint.object_store import ObjectStore
from ray_jax_launch._checkpoint.pytree import needed_files, to_restore
from ray_jax_launch._checkpoint.retry import retry
from ray_jax_launch._checkpoint.staging import Staging, node_of
from ray_jax_launch._errors import LaunchError

# How long processes wait for each other to write. The 19 GB of GPT-2 XL take 10 minutes at 32 MB/s.
_WRITE_TIMEOUT_S = 3600
# How long a host may see an old listing of a shared folder. NFS caches listings for at most 60 s by default.
_STALE_S = 90.0
# Orbax reads by tensorstore, which raises ValueError with the error number of the system in the text.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")

T = TypeVar("T")


class FolderWriter:
    """Writes to a folder that all processes share. Orbax writes under a temporary name, and renames at the end.

    Checkpoints are written one after the other. Every process makes each call.
    """

    def __init__(self, folder: Path, store: FolderStore) -> None:
        self._folder = folder
        self._store = store
        self._step = 0
        _silence_tracebacks()
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(None, ocp.args.PyTreeSave, _arrays_handler())
        # By default Orbax makes folders in the background. Its threads wait for them, also on a disk that has no room
        # for them, and keep the process from its end.
        options = ocp.options.AsyncOptions(
            timeout_secs=_WRITE_TIMEOUT_S,
            create_directories_asynchronously=False,
            # The first process calls this when all processes have written, before the rename.
            post_finalization_callback=lambda: store.write_checksums(self._step, jax.process_count()),
        )
        items = ocp.CompositeOptions(async_options=options)
        handler = ocp.CompositeCheckpointHandler(composite_options=items, handler_registry=registry)
        begin_to_write = handler.async_save

        async def begin_and_describe(*args: Any, **options: Any) -> list[Any]:
            # Each process calls this when it has written, before it waits for the others.
            describe = partial(store.write_part, self._step, jax.process_index())
            return [future.ChainedFuture(await begin_to_write(*args, **options) or [], describe)]

        # Orbax finds the arguments of a handler by its class, so no subclass.
        handler.async_save = begin_and_describe
        self._writer = ocp.AsyncCheckpointer(handler, async_options=options)
        self._reader = ocp.Checkpointer(_arrays_handler())

    def begin(self, step: int, items: Mapping[str, Any], metadata: dict[str, Any]) -> None:
        """Copy the arrays, and begin to write the copies. The copies are complete when this returns."""
        self._step = step
        if jax.process_index() == 0:
            self._store.prepare()  # delete the files of a failed save
            if self._store.version(step) is not None:
                raise FileExistsError(f"another run has written {self._folder / str(step)}. Stop that run.")
        args: dict[str, Any] = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        args[METADATA] = ocp.args.JsonSave(metadata)
        # Without `force`, a process looks for the step, and fails if it exists. With `force`, the first process deletes
        # it. The others do nothing: they would look in their own, perhaps old, listing of the folder.
        self._writer.save(self._folder / str(step), args=ocp.args.Composite(**args), force=jax.process_index() > 0)

    def commit(self, step: int) -> None:
        """Wait until the checkpoint is durable and listed. Can run in another thread."""
        self._writer.wait_until_finished()
        if jax.process_index() == 0:
            self._store.sync()

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read the items that `like` names."""
        ranks = _ranks_that_see(self._folder)

        def look() -> None:
            if 0 not in ranks:  # the first process has listed the checkpoint
                self._wait_until_visible(step, (ranks.index(jax.process_index()), len(ranks)))
            self._store.files(step, (jax.process_index(), jax.process_count()), compare_names=True)

        from_leader(look, jax.process_index())
        checkpoint = self._folder / str(step)

        def read_trees() -> dict[str, Any]:
            folders = [path for path in checkpoint.iterdir() if path.is_dir() and path.name not in (METADATA, PARTS)]
            return {path.name: _saved_tree(path) for path in folders}

        wanted = to_restore(like, _read(checkpoint, read_trees))
        # Not in parallel: each call ends in a barrier of all processes.
        return {
            name: _read(checkpoint, partial(self._reader.restore, checkpoint / name, args=_restore_args(tree)))
            for name, tree in wanted.items()
        }

    def restore_copy(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read the items from a local copy whose checksums were compared. For one process."""
        # If a file is deleted while Orbax reads, Orbax leaves unfinished coroutines, and may read zeros.
        with contextlib.closing(Staging(str(self._folder))) as staging:
            items = self._store.copy_items(step, like.keys(), staging.path)
            trees = {name: _saved_tree(staging.path / name) if name in like else None for name in items}
            wanted = to_restore(like, trees)
            restore = self._reader.restore
            return {name: restore(staging.path / name, args=_restore_args(tree)) for name, tree in wanted.items()}

    def _wait_until_visible(self, step: int, share: Share = ALL) -> None:
        """Wait until this host sees the files of a checkpoint that are the share of this process."""
        deadline = time.monotonic() + _STALE_S
        while (missing := self._store.find_missing(step, share)) is not None:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{socket.gethostname()} does not see {missing} after {_STALE_S:.0f} s. Name a folder on storage "
                    "that all nodes share, or a URI."
                )
            time.sleep(0.5)

    def close(self) -> None:
        """Release threads and local files."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))  # of a failed save, whose error `commit` has raised
            stack.callback(self._reader.close)
            stack.callback(self._writer.close)


class ObjectWriter:
    """Writes to object storage. In each process Orbax writes shards to the local disk, and the process uploads them.

    The methods are those of `FolderWriter`.

    Args:
        uri: of the checkpoints.
        store: the checkpoints there.
        run_id: the same in all processes, and different in other runs.
    """

    def __init__(self, uri: str, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._num_saves = 0
        self._staging = Staging(uri)
        _silence_tracebacks()
        self._folder = self._staging.path
        self._metadata: dict[str, Any] = {}
        rank = jax.process_index()
        # Every process is the primary host of its own disk. Of equal replicas, one process writes.
        options = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={rank}, barrier_sync_key_prefix=f"process-{rank}"
        )
        handlers = create_type_handler_registry(
            (jax.Array, ArrayHandler(primary_host=None, replica_id=0, use_replica_parallel=False)),
            (np.ndarray, NumpyHandler()),
            (np.number, ScalarHandler()),
            (int, ScalarHandler()),
            (float, ScalarHandler()),
        )
        # Files of several processes can lie side by side in one folder. Orbax's database of shards (OCDBT) cannot.
        handler = _arrays_handler(use_ocdbt=False, multiprocessing_options=options, type_handler_registry=handlers)
        self._writer = ocp.AsyncCheckpointer(
            handler,
            multiprocessing_options=options,
            # By default, Orbax makes the folder in the background and signals all processes: a process would begin to
            # write when the folder of another process exists.
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_WRITE_TIMEOUT_S, create_directories_asynchronously=False
            ),
        )
        self._reader = ocp.Checkpointer(handler, multiprocessing_options=options)
        self._wait_for_all = partial(ocp.multihost.get_barrier_sync_fn(), timeout_ms=_WRITE_TIMEOUT_S * 1000)

    def begin(self, step: int, items: Mapping[str, Any], metadata: dict[str, Any]) -> None:
        self._num_saves += 1
        self._folder = self._staging.make_folder()
        self._metadata = metadata
        self._writer.save(self._folder / "items", args=ocp.args.PyTreeSave(dict(items)))

    def commit(self, step: int) -> None:
        save, is_first, outcome = f"{self._run_id}-{self._num_saves}", jax.process_index() == 0, "failed"
        try:
            with contextlib.ExitStack() as uploaded:
                # A process that fails reaches the barrier too, so the others fail at once.
                uploaded.callback(self._wait_for_all, key=f"{save}-uploaded")
                uploaded.callback(shutil.rmtree, self._folder, ignore_errors=True)
                self._writer.wait_until_finished()
                self._store.upload(step, jax.process_index(), save, self._folder)
            if is_first:
                self._store.commit(step, jax.process_count(), save, self._metadata)
                outcome = "listed"
        finally:
            if is_first:
                tell(save, outcome)
        if not is_first and ask(save, _WRITE_TIMEOUT_S) != "listed":
            raise FileNotFoundError(f"process 0 has not listed checkpoint {step}. See its own error.")

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        # One process of each node downloads for all processes of the node.
        ranks = _ranks_that_see(self._staging.path.parent)
        share = [(rank, jax.process_count()) for rank in ranks]
        with self._staging.folder() as target:
            # One process needs all shards.
            find_needed = partial(needed_files, target, like, ranks) if jax.process_count() > 1 else None

            def download() -> str:
                self._store.download(step, like.keys(), target, find_needed, share)
                return str(target.relative_to(self._staging.path.parent))

            folder = self._staging.path.parent / from_leader(download, ranks[0]) / "items"
            try:
                wanted = to_restore(like, _saved_tree(folder))
                return self._reader.restore(folder, args=_restore_args(wanted)) if wanted else {}
            finally:
                gather(None)  # all processes have read the files

    restore_copy = restore

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))
            stack.callback(self._staging.close)
            stack.callback(self._reader.close)
            stack.callback(self._writer.close)


def make_writer(folder: Path | str, store: Any, run_id: str) -> FolderWriter | ObjectWriter:
    """Return the writer for a folder or a URI."""
    if isinstance(folder, Path):
        return FolderWriter(folder, store)
    return ObjectWriter(folder, store, run_id)


def _ranks_that_see(folder: Path) -> list[int]:
    """Return the ranks of the processes that see a folder as this process does: those of its node."""
    nodes = gather(node_of(folder))
    return [rank for rank, node in enumerate(nodes) if node == nodes[jax.process_index()]]


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for Orbax's warnings, and for the tracebacks that its threads and tasks log when a save fails.

    There is a traceback for each array and each thread, thousands of lines. `commit` raises the error.
    """
    if record.levelno < logging.ERROR and "/orbax/checkpoint/" in record.pathname:
        return False
    trace = record.exc_info[2] if record.exc_info else None
    return not any("/orbax/checkpoint/" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


def _silence_tracebacks() -> None:
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_shown)  # once, however often it is called
    show = sys.unraisablehook
    if show.__module__ == __name__:
        return

    def hook(unraisable: Any) -> None:
        # tensorstore completes the write of an array after the write of another array has failed and ended the loop.
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


def _read(checkpoint: Path, read: Callable[[], T]) -> T:
    """Call a function of Orbax that reads from a folder, and retry it (see `retry`)."""

    def attempt() -> T:
        try:
            return read()
        except ValueError as error:
            number = _OS_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), str(error)) from error

    return retry(str(checkpoint), attempt)


def _arrays_handler(**options: Any) -> ocp.PyTreeCheckpointHandler:
    # Compression makes float32 parameters 8 % smaller, and doubles the CPU time of a save.
    return ocp.PyTreeCheckpointHandler(use_compression=False, **options)


def _restore_args(wanted: Any) -> ocp.args.PyTreeRestore:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
    return ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,  # some items, each with all leaves
    )


def _saved_tree(folder: Path) -> Any:
    """Return Orbax's metadata of the leaves in a folder."""
    # Orbax declares its own path class, but accepts any.
    return ocp.PyTreeCheckpointHandler().metadata(folder).tree  # pyright: ignore[reportArgumentType]


def complete(closing: Future[None]) -> None:
    """Wait for the end of a save, also after Ctrl-C. If Python ended before, threads of Orbax would fail, or hang."""
    interrupt = None
    while not closing.done():
        try:
            wait([closing])
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    closing.result()
