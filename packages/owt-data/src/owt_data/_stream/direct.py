"""Token windows for one worker, read by a thread of the worker itself instead of tasks of Ray Data."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import LARGEST, DataError, check_choice, check_integer, check_type
from owt_data._options import OrderKind
from owt_data._tokens.sequence import Tokens
from owt_data._tokens.window_order import check_seed

_PUT_TIMEOUT_S = 0.5


def local_rows(global_batch_size: int, rank: int, world_size: int) -> range:
    """Return the rows of a global batch that a worker reads.

    Raises:
        DataError: `world_size` does not divide `global_batch_size`, or an argument is out of its range.
    """
    world_size = check_integer("world_size", world_size, least=1)
    rank = check_integer("rank", rank, least=0, most=world_size - 1)
    global_batch_size = check_integer("global_batch_size", global_batch_size, least=1)
    if global_batch_size % world_size:
        constraint = f"a multiple of the {world_size} workers"
        raise DataError(f"global_batch_size must be {constraint}, got {global_batch_size}. Change one of them.")
    local_batch_size = global_batch_size // world_size
    return range(rank * local_batch_size, (rank + 1) * local_batch_size)


def check_steps(start_step: int, stop_step: int, global_batch_size: int) -> range:
    """Return a range of steps. It must not be empty, and the indices of its windows must fit into 64 bits.

    Raises:
        DataError: it is empty, begins before 0, or is too long.
    """
    start_step = check_integer("start_step", start_step, least=0)
    stop_step = check_integer("stop_step", stop_step, least=start_step + 1)
    check_integer("stop_step", stop_step, least=0, most=LARGEST // global_batch_size)
    return range(start_step, stop_step)


def check_order(tokens: Tokens, seq_len: int, order: OrderKind, seed: int) -> tuple[int, int]:
    """Check the arguments of a stream of windows. Return `seq_len` and the seed as Python's integers.

    Raises:
        DataError: an argument has another type, or is out of its range.
    """
    check_type("tokens", tokens, Tokens, "train or val of open_tokens", "Open the token files first.")
    seq_len = check_integer("seq_len", seq_len, least=1)
    check_choice("order", order, get_args(OrderKind))
    return seq_len, check_seed(seed)


def read_steps(
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
    prefetch_steps: int = 4,
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Iterate over one worker's share of each step's batch, as `iter_steps` of `step_windows` does, without Ray.

    The arguments are checked at the call. A thread reads ahead from the first `next` on. It may wait for tokens that
    are being prepared.

    Args:
        tokens: `train` or `val` of `open_tokens` or of `prepare_in_background`.
        seq_len: inputs per window.
        global_batch_size: windows per step, over all workers.
        rank: index of this worker.
        world_size: number of workers; must divide `global_batch_size`.
        start_step: first step.
        stop_step: last step, exclusive.
        order: see `window_starts`.
        seed: see `window_starts`.
        prefetch_steps: number of steps to read ahead.

    Returns:
        An iterator over `(step, uint16[G/n, seq_len + 1])`.

    Raises:
        DataError: an argument is out of its range, or the tokens cannot be read.
    """
    rows = np.array(local_rows(global_batch_size, rank, world_size))
    global_batch_size = int(global_batch_size)
    steps = check_steps(start_step, stop_step, global_batch_size)
    seq_len, seed = check_order(tokens, seq_len, order, seed)
    prefetch_steps = check_integer("prefetch_steps", prefetch_steps, least=1)

    def read_step(step: int) -> NDArray[np.uint16]:
        return tokens.windows(step * global_batch_size + rows, seq_len=seq_len, order=order, seed=seed)

    return _read_ahead(read_step, steps, prefetch_steps)


def _read_ahead(
    read_step: Callable[[int], NDArray[np.uint16]], steps: range, prefetch_steps: int
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Yield each step and its result, which a thread reads ahead."""
    read: queue.Queue[tuple[int, NDArray[np.uint16] | Exception]] = queue.Queue(prefetch_steps)
    stopped = threading.Event()

    def put(item: tuple[int, NDArray[np.uint16] | Exception]) -> None:
        while not stopped.is_set():
            try:
                return read.put(item, timeout=_PUT_TIMEOUT_S)
            except queue.Full:
                continue

    def run() -> None:
        for step in steps:
            if stopped.is_set():
                return
            try:
                put((step, read_step(step)))
            except Exception as error:  # of any kind: the consumer raises it
                return put((step, error))

    # A daemon, because it may wait for tokens that never come when the process ends.
    threading.Thread(target=run, name="read-steps", daemon=True).start()
    try:
        for _ in steps:
            step, windows = read.get()
            if isinstance(windows, Exception):
                raise windows
            yield step, windows
    finally:
        stopped.set()
