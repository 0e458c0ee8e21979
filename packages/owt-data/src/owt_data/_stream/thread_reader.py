"""Batches of one worker, read by a thread of the worker itself."""

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import check_integer
from owt_data._stream.batches import Batches, check_reading, read_batches
from owt_data._tokens.sequence import TokenMixture, Tokens, TokenSequence

_PUT_TIMEOUT_S = 0.5

# Object storage answers after tens of milliseconds, for one step or for several.
_STEPS_AT_ONCE = 8


def read_steps(
    tokens: Tokens, batches: Batches, *, start_step: int, stop_step: int, prefetch_steps: int = 4
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Iterate over one worker's share of each step's batch, as `iter_steps` of `step_windows` does, without Ray.

    The arguments are checked at the call. A thread reads ahead from the first `next` on. It may wait for tokens that
    are being prepared.

    Args:
        tokens: `train` or `val` of `open_tokens` or of `prepare_in_background`.
        batches: the batches of this worker.
        start_step: first step.
        stop_step: last step, exclusive.
        prefetch_steps: number of steps to read ahead. As many are read at once from object storage, up to 8.

    Returns:
        An iterator over `(step, uint16 or uint32[G/n, seq_len + 1])`.

    Raises:
        DataError: an argument is out of its range, or the tokens cannot be read.
    """
    steps = check_reading(tokens, batches, start_step, stop_step)
    prefetch_steps = check_integer("prefetch_steps", prefetch_steps, least=1)
    sequences = tokens.sequences if isinstance(tokens, TokenMixture) else (tokens,)
    is_remote = any(isinstance(sequence, TokenSequence) and sequence.is_remote for sequence in sequences)
    most_at_once = min(prefetch_steps, _STEPS_AT_ONCE) if is_remote else 1
    return _read_ahead(
        lambda steps: read_batches(tokens, batches, np.array(steps)), steps, prefetch_steps, most_at_once
    )


def _read_ahead(
    read_steps: Callable[[range], NDArray[np.integer]], steps: range, prefetch_steps: int, most_at_once: int
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield each step and its result, which a thread reads ahead. The first step is read alone, to begin soon."""
    read: queue.Queue[tuple[int, NDArray[np.integer] | Exception]] = queue.Queue(prefetch_steps)
    stopped = threading.Event()

    def put(item: tuple[int, NDArray[np.integer] | Exception]) -> None:
        while not stopped.is_set():
            try:
                return read.put(item, timeout=_PUT_TIMEOUT_S)
            except queue.Full:
                continue

    def run() -> None:
        step, num_steps = steps.start, 1
        while step < steps.stop and not stopped.is_set():
            together = range(step, min(step + num_steps, steps.stop))
            try:
                windows = read_steps(together)
            except Exception as error:  # of any kind: the consumer raises it
                if len(together) == 1:
                    return put((step, error))
                num_steps = 1  # the steps before the one that fails are read
                continue
            for item in zip(together, windows, strict=True):
                put(item)
            step, num_steps = together.stop, most_at_once

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
