"""Token windows as Ray Datasets: rows of an order, or the batches of each step for one worker."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray.data
import ray.exceptions
from numpy.typing import NDArray

from owt_data._errors import DataError, check_integer, check_type
from owt_data._options import OrderKind
from owt_data._stream.direct import check_order, check_steps, local_rows
from owt_data._tokens.sequence import Tokens

# One Ray task reads one block into one object. The size is small enough for a first block soon, and large enough to
# hide the overhead of a task, a few milliseconds.
_BLOCK_BYTES = 8 << 20

# Ray plans all blocks before it reads the first one, at 1 ms per block. Hence very long streams have larger blocks.
_MAX_BLOCKS, _MAX_BLOCK_BYTES = 1000, 64 << 20

# Steps that a consumer fetches at once. They share the overhead of a fetch, 0.5 ms.
_STEPS_PER_FETCH = 16

Batch = dict[str, np.ndarray]


def token_windows(
    tokens: Tokens,
    *,
    seq_len: int,
    num_rows: int,
    order: OrderKind = "random",
    seed: int = 2357,
    batch_size: int | None = None,
    concurrency: int | None = None,
) -> ray.data.Dataset:
    """Stream the first `num_rows` windows of an order, one per row, in this order.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        seq_len: inputs per window.
        num_rows: number of windows; an epoch of `shuffle` has `tokens.num_windows(seq_len)`.
        order: see `window_starts`.
        seed: see `window_starts`.
        batch_size: largest number of windows that one task reads. Default: about 8 MiB of them.
        concurrency: largest number of tasks that read at once. Default: as many as Ray Data starts.

    Returns:
        Rows `x: int32[seq_len]` and `y: int32[seq_len]`; `y` is `x` shifted by one token.

    Raises:
        DataError: there are fewer tokens than one window needs, or a number is out of its range.
    """
    seq_len, seed = check_order(tokens, seq_len, order, seed)
    if batch_size is not None:
        batch_size = check_integer("batch_size", batch_size, least=1)
    if concurrency is not None:
        concurrency = check_integer("concurrency", concurrency, least=1)
    read = functools.partial(_read_rows, tokens=tokens, seq_len=seq_len, order=order, seed=seed)
    num_rows = check_integer("num_rows", num_rows, least=1)
    read({"id": np.arange(1)})  # raises the errors of a task here
    num_blocks = -(-num_rows // batch_size) if batch_size is not None else _num_blocks(num_rows, 8 * seq_len)
    return _dataset(read, num_rows, num_blocks, concurrency)


def _dataset(
    read: Callable[[Batch], Batch], num_rows: int, num_blocks: int, concurrency: int | None = None
) -> ray.data.Dataset:
    """Return the rows that a function reads for the ids 0 to `num_rows - 1`, in the order of the ids."""
    ids = ray.data.range(num_rows, override_num_blocks=num_blocks)
    dataset = ids.map_batches(untyped(read), batch_size=None, concurrency=concurrency)
    # Blocks keep the order of the ids, whichever task finishes first.
    dataset.context.execution_options.preserve_order = True
    dataset.context.raise_original_map_exception = True  # the errors of `read`, not of Ray
    return dataset


def _num_blocks(num_rows: int, row_bytes: int) -> int:
    """Return the number of blocks of a stream."""
    block_bytes = min(max(num_rows * row_bytes // _MAX_BLOCKS, _BLOCK_BYTES), _MAX_BLOCK_BYTES)
    rows_per_block = max(1, block_bytes // row_bytes)
    return max(1, -(-num_rows // rows_per_block))


def untyped(read: Any) -> Any:
    """Drop the type of a function, because Ray declares a union of batch types and the function takes one of them."""
    return read


def _read_rows(batch: Batch, *, tokens: Tokens, seq_len: int, order: OrderKind, seed: int) -> Batch:
    windows = tokens.windows(batch["id"], seq_len=seq_len, order=order, seed=seed).astype(np.int32)
    return {"x": windows[:, :-1], "y": windows[:, 1:]}


def step_windows(
    tokens: Tokens,
    *,
    seq_len: int,
    global_batch_size: int,
    rank: int,
    world_size: int,
    start_step: int,
    stop_step: int,
    order: OrderKind = "shuffle",
    seed: int = 2357,
) -> ray.data.Dataset:
    """Stream one worker's share of each step's batch, in the order of steps. Any start step takes equal time.

    With `G = global_batch_size`, the global batch of step `s` is the windows `[s * G, (s + 1) * G)` of the order.
    Rank `r` of `n` gets the rows `[r * G/n, (r + 1) * G/n)` of the batch. Hence the batches do not depend on the world
    size. Read the stream with `iter_steps`.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        seq_len: inputs per window.
        global_batch_size: windows per step, over all workers.
        rank: index of this worker.
        world_size: number of workers; must divide `global_batch_size`.
        start_step: first step.
        stop_step: last step, exclusive.
        order: see `window_starts`.
        seed: see `window_starts`.

    Returns:
        One row per step: `step: int64` and `tokens: uint16[G/n, seq_len + 1]`.

    Raises:
        DataError: `world_size` does not divide `global_batch_size`, or an argument is out of its range.
    """
    rows = local_rows(global_batch_size, rank, world_size)
    global_batch_size = int(global_batch_size)
    steps = check_steps(start_step, stop_step, global_batch_size)
    seq_len, seed = check_order(tokens, seq_len, order, seed)
    local_batch_size = len(rows)
    read = functools.partial(
        _read_steps,
        tokens=tokens,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        first_row=rows.start,
        local_batch_size=local_batch_size,
        start_step=steps.start,
        order=order,
        seed=seed,
    )
    num_blocks = _num_blocks(len(steps), 2 * local_batch_size * (seq_len + 1))
    return _dataset(read, len(steps), num_blocks)


def _read_steps(
    batch: Batch,
    *,
    tokens: Tokens,
    seq_len: int,
    global_batch_size: int,
    first_row: int,
    local_batch_size: int,
    start_step: int,
    order: OrderKind,
    seed: int,
) -> Batch:
    steps = batch["id"] + start_step
    indices = steps[:, None] * global_batch_size + first_row + np.arange(local_batch_size)
    windows = tokens.windows(indices.ravel(), seq_len=seq_len, order=order, seed=seed)
    return {"step": steps, "tokens": windows.reshape(len(steps), local_batch_size, seq_len + 1)}


def iter_steps(
    dataset: ray.data.Dataset | ray.data.DataIterator, *, prefetch_steps: int = 32
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Iterate over the rows of `step_windows` as `(step, uint16[G/n, seq_len + 1])`.

    Args:
        dataset: result of `step_windows`, or its iterator from Ray Train.
        prefetch_steps: least number of steps to read ahead.

    Raises:
        DataError: an argument has another type, the tokens cannot be read, or a token is outside the vocabulary.
    """
    kinds = ray.data.Dataset | ray.data.DataIterator
    check_type("dataset", dataset, kinds, "the result of step_windows, or its iterator", "Call step_windows first.")
    prefetch_steps = check_integer("prefetch_steps", prefetch_steps, least=0)
    return _iter_steps(dataset, prefetch_steps)


def _iter_steps(
    dataset: ray.data.Dataset | ray.data.DataIterator, prefetch_steps: int
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    prefetch_batches = -(-prefetch_steps // _STEPS_PER_FETCH)
    batches = dataset.iter_batches(batch_size=_STEPS_PER_FETCH, prefetch_batches=prefetch_batches, batch_format="numpy")
    try:
        for batch in batches:
            yield from zip(batch["step"].tolist(), batch["tokens"], strict=True)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError):
            raise error.cause from error
        raise
