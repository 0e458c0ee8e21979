"""Token windows as Ray Datasets."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray.data
from numpy.typing import NDArray

from owt_data._errors import DataError, check_integer
from owt_data._options import OrderKind
from owt_data._tokens.sequence import Tokens

# A block is what one Ray task reads and one object holds: small enough to arrive soon, large enough
# that a task's overhead of some milliseconds does not show.
_BLOCK_BYTES = 8 << 20

# Ray plans every block before the first arrives, at a millisecond each: very long streams have larger ones.
_MAX_BLOCKS, _MAX_BLOCK_BYTES = 1000, 64 << 20

# Steps that a consumer takes over at once: the overhead of a hand-over, half a millisecond, is shared by these.
_STEPS_PER_FETCH = 16

Batch = dict[str, np.ndarray]


def token_windows(
    tokens: Tokens, *, seq_len: int, num_rows: int, order: OrderKind = "random", seed: int = 2357
) -> ray.data.Dataset:
    """The first `num_rows` windows of an order, one per row, for a training loop of anyone's own.

    Args:
        tokens: what to read from: of `open_tokens`, `train` or `val`.
        seq_len: inputs per window.
        num_rows: how many windows; an epoch of `shuffle` is `tokens.num_windows(seq_len)`.
        order: see `window_starts`.
        seed: see `window_starts`.

    Returns:
        Rows `x: int32[seq_len]`, and `y: int32[seq_len]`, which is `x` one token on.

    Raises:
        DataError: the tokens do not fill one window.
    """
    read = functools.partial(_read_rows, tokens=tokens, seq_len=seq_len, order=order, seed=seed)
    check_integer("num_rows", num_rows, least=1)
    read({"id": np.arange(1)})  # so that too few tokens are said now, not in a task
    num_blocks = _num_blocks(num_rows, 8 * seq_len)
    return ray.data.range(num_rows, override_num_blocks=num_blocks).map_batches(untyped(read), batch_size=None)


def _num_blocks(num_rows: int, row_bytes: int) -> int:
    """How many blocks to cut a stream into."""
    block_bytes = min(max(num_rows * row_bytes // _MAX_BLOCKS, _BLOCK_BYTES), _MAX_BLOCK_BYTES)
    rows_per_block = max(1, block_bytes // row_bytes)
    return max(1, -(-num_rows // rows_per_block))


def untyped(read: Any) -> Any:
    """Ray declares a batch as a union of types, of which a function of arrays takes only one."""
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
    """One worker's share of each step's batch, in the order of steps, from any step at once.

    The global batch of step `s` is the windows `[s * G, (s + 1) * G)` of the order, `G` being
    `global_batch_size`; rank `r` of `n` gets rows `[r * G/n, (r + 1) * G/n)` of it. So every world size
    sees the same batches. Read it with `iter_steps`.

    Args:
        tokens: what to read from: of `open_tokens`, `train` or `val`.
        seq_len: inputs per window.
        global_batch_size: windows per step, over all workers.
        rank: this worker's number.
        world_size: number of workers; must divide `global_batch_size`.
        start_step: first step to yield.
        stop_step: one past the last.
        order: see `window_starts`.
        seed: see `window_starts`.

    Returns:
        One row per step: `step: int64` and `tokens: uint16[G/n, seq_len + 1]`.

    Raises:
        DataError: the workers do not divide the batch, the rank is none of theirs, or there is no step to yield.
    """
    check_integer("world_size", world_size, least=1)
    check_integer("rank", rank, least=0, most=world_size - 1)
    check_integer("start_step", start_step, least=0)
    check_integer("stop_step", stop_step, least=start_step + 1)
    check_integer("global_batch_size", global_batch_size, least=1)
    if global_batch_size % world_size:
        raise DataError(
            f"global_batch_size must be a multiple of the {world_size} workers, got {global_batch_size}. Change either."
        )
    local_batch_size = global_batch_size // world_size
    read = functools.partial(
        _read_steps,
        tokens=tokens,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        first_row=rank * local_batch_size,
        local_batch_size=local_batch_size,
        start_step=start_step,
        order=order,
        seed=seed,
    )
    num_steps = stop_step - start_step
    num_blocks = _num_blocks(num_steps, 2 * local_batch_size * (seq_len + 1))
    steps = ray.data.range(num_steps, override_num_blocks=num_blocks)
    dataset = steps.map_batches(untyped(read), batch_size=None)
    # Whoever finishes first, blocks come out in the order of steps.
    dataset.context.execution_options.preserve_order = True
    return dataset


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
    """The rows of `step_windows` as `(step, uint16[G/n, seq_len + 1])`, some read ahead.

    Args:
        dataset: what `step_windows` returned, or the iterator that Ray Train made of it.
        prefetch_steps: how many steps to hold ready, at least.
    """
    prefetch_batches = -(-prefetch_steps // _STEPS_PER_FETCH)
    for batch in dataset.iter_batches(
        batch_size=_STEPS_PER_FETCH, prefetch_batches=prefetch_batches, batch_format="numpy"
    ):
        yield from zip(batch["step"].tolist(), batch["tokens"], strict=True)
