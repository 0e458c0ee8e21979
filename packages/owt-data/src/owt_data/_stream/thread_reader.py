"""Batches of one worker, read by a thread of the worker itself."""

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import check_integer
from owt_data._stream.batches import Batches, check_reading, read_batches
from owt_data._tokens.sequence import Tokens

_PUT_TIMEOUT_S = 0.5


def read_steps(
    tokens: Tokens, batches: Batches, *, start_step: int, stop_step: int, prefetch_steps: int = 4
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Iterate over one worker's share of each step's batch, as `iter_steps` of `step_windows` does, without Ray.

    The arguments are checked at the call. A thread reads ahead from the first `next` on. It may wait for tokens that
    are being prepared.

    Args:
        tokens: `train` or `val` of `open_tokens` or of `prepare_in_background`.
        batches: the batches of this worker.
        start_step: first step.
        stop_step: last step, exclusive.
        prefetch_steps: number of steps to read ahead.

    Returns:
        An iterator over `(step, uint16[G/n, seq_len + 1])`.

    Raises:
        DataError: an argument is out of its range, or the tokens cannot be read.
    """
    steps = check_reading(tokens, batches, start_step, stop_step)
    prefetch_steps = check_integer("prefetch_steps", prefetch_steps, least=1)
    return _read_ahead(lambda step: read_batches(tokens, batches, np.array([step]))[0], steps, prefetch_steps)


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
