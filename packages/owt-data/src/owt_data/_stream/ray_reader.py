"""Token windows as Ray Datasets: rows of an order, or the batches of one worker."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, get_args

import numpy as np
import ray.data
import ray.exceptions
from numpy.typing import NDArray

from owt_data._errors import DataError, check_choice, check_integer, check_type
from owt_data._options import OrderKind
from owt_data._stream.batches import Batches, check_reading, check_tokens, read_batches
from owt_data._stream.thread_reader import read_steps
from owt_data._tokens.sequence import Tokens
from owt_data._tokens.window_order import check_seed

# One Ray task reads one block into one object. The size is small enough for a first block soon, and large enough to
# hide the overhead of a task, a few milliseconds.
_BLOCK_BYTES = 8 << 20

# Ray plans all blocks before it reads the first one, at 1 ms per block. Hence very long streams have larger blocks.
_MAX_BLOCKS, _MAX_BLOCK_BYTES = 1000, 64 << 20

# Steps that a consumer fetches at once. They share the overhead of a fetch, 0.5 ms.
_STEPS_PER_FETCH = 16

# Tokens that a process of Ray keeps, with the files that are open: those of training and of a few validations.
_TOKENS_OF_A_PROCESS = 4

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
        Rows of `x` and `y`, both `int32[seq_len]`; `y` is `x` shifted by one token.

    Raises:
        DataError: there are fewer tokens than one window needs, or a number is out of its range.
    """
    check_tokens(tokens)
    seq_len = check_integer("seq_len", seq_len, least=1)
    seed = check_seed(seed)
    check_choice("order", order, get_args(OrderKind))
    if batch_size is not None:
        batch_size = check_integer("batch_size", batch_size, least=1)
    if concurrency is not None:
        concurrency = check_integer("concurrency", concurrency, least=1)
    read = functools.partial(_read_rows, seq_len=seq_len, order=order, seed=seed)
    num_rows = check_integer("num_rows", num_rows, least=1)
    read({"id": np.arange(1)}, tokens=tokens)  # raises the errors of a task here
    num_blocks = -(-num_rows // batch_size) if batch_size is not None else _num_blocks(num_rows, 8 * seq_len)
    return _dataset(tokens, read, num_rows, num_blocks, concurrency)


def _dataset(
    tokens: Tokens, read: Callable[..., Batch], num_rows: int, num_blocks: int, concurrency: int | None = None
) -> ray.data.Dataset:
    """Return the rows that a function reads for the ids 0 to `num_rows - 1`, in the order of the ids.

    The tokens are sent once to each process that runs tasks, which keeps their files open.
    """
    ids = ray.data.range(num_rows, override_num_blocks=num_blocks)
    read_task = functools.partial(_read_in_task, read=read, tokens=ray.put(tokens))
    dataset = ids.map_batches(untyped(read_task), batch_size=None, concurrency=concurrency)
    # Blocks keep the order of the ids, whichever task finishes first.
    dataset.context.execution_options.preserve_order = True
    dataset.context.raise_original_map_exception = True  # the errors of `read`, not of Ray
    return dataset


def _read_in_task(batch: Batch, *, read: Callable[..., Batch], tokens: ray.ObjectRef) -> Batch:
    return read(batch, tokens=_receive(tokens))


@functools.lru_cache(_TOKENS_OF_A_PROCESS)
def _receive(tokens: ray.ObjectRef) -> Tokens:
    """Return the tokens of a stream, the same object in all tasks of a process."""
    return ray.get(tokens)


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


def step_windows(tokens: Tokens, batches: Batches, *, start_step: int, stop_step: int) -> ray.data.Dataset:
    """Stream one worker's share of each step's batch, in the order of steps. Any start step takes equal time.

    Read the stream with `iter_steps`.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        batches: the batches of this worker.
        start_step: first step.
        stop_step: last step, exclusive.

    Returns:
        One row per step, with its number `step` (int64) and `tokens`, `uint16` or `uint32[G/n, seq_len + 1]`.

    Raises:
        DataError: an argument is out of its range.
    """
    steps = check_reading(tokens, batches, start_step, stop_step)
    read = functools.partial(_read_steps, batches=batches, start_step=steps.start)
    if not tokens.num_windows(batches.seq_len):
        raise DataError(
            f"tokens must hold one window of {batches.seq_len} inputs and a target, got {len(tokens)} tokens. Give "
            "more text or a shorter seq_len."
        )
    none = tokens.windows(np.zeros(0, np.int64), seq_len=batches.seq_len, order=batches.order, seed=batches.seed)
    step_bytes = none.itemsize * batches.rows_per_step * (batches.seq_len + 1)
    return _dataset(tokens, read, len(steps), _num_blocks(len(steps), step_bytes))


def _read_steps(batch: Batch, *, tokens: Tokens, batches: Batches, start_step: int) -> Batch:
    steps = batch["id"] + start_step
    return {"step": steps, "tokens": read_batches(tokens, batches, steps)}


def read_steps_by_tasks(
    tokens: Tokens, batches: Batches, *, start_step: int, stop_step: int, first_steps: int = 200
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Iterate over one worker's share of each step's batch, as `read_steps` does, mostly by tasks of Ray Data.

    Ray Data starts processes and needs seconds for its first batch. So a thread reads the first steps. The tasks start
    once the first step was taken.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        batches: the batches of this worker.
        start_step: first step.
        stop_step: last step, exclusive.
        first_steps: number of steps that a thread reads.

    Returns:
        An iterator over `(step, uint16 or uint32[G/n, seq_len + 1])`.

    Raises:
        DataError: an argument is out of its range, or the tokens cannot be read.
    """
    check_reading(tokens, batches, start_step, stop_step)
    middle = min(start_step + check_integer("first_steps", first_steps, least=1), stop_step)
    by_thread = read_steps(tokens, batches, start_step=start_step, stop_step=middle)
    if middle == stop_step:
        return by_thread
    by_tasks = functools.partial(step_windows, tokens, batches, start_step=middle, stop_step=stop_step)
    return _hand_over(by_thread, by_tasks)


def _hand_over(
    by_thread: Iterator[tuple[int, NDArray[np.integer]]], make_dataset: Callable[[], ray.data.Dataset]
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    yield next(by_thread)
    by_tasks = iter_steps(make_dataset())
    first = Future[tuple[int, NDArray[np.integer]]]()
    # Nobody waits for this thread at the end: if a node is lost, no CPU may be left for the tasks, and no batch comes.
    threading.Thread(target=_read_first, args=(by_tasks, first), name="first-batch", daemon=True).start()
    yield from by_thread
    yield first.result()
    yield from by_tasks


def _read_first(steps: Iterator[Any], first: Future[Any]) -> None:
    try:
        first.set_result(next(steps))
    except BaseException as error:
        first.set_exception(error)


def iter_steps(
    dataset: ray.data.Dataset | ray.data.DataIterator, *, prefetch_steps: int = 32
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Iterate over the rows of `step_windows` as `(step, uint16 or uint32[G/n, seq_len + 1])`.

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
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    prefetch_batches = -(-prefetch_steps // _STEPS_PER_FETCH)
    batches = dataset.iter_batches(batch_size=_STEPS_PER_FETCH, prefetch_batches=prefetch_batches, batch_format="numpy")
    try:
        for batch in batches:
            if not {"step", "tokens"} <= set(batch):
                columns = " and ".join(batch)
                raise DataError(f"dataset must be that of step_windows, got one with {columns}. Call step_windows.")
            yield from zip(batch["step"].tolist(), batch["tokens"], strict=True)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError):
            raise error.cause from error
        raise
