"""The windows of each step, for each worker: the rule that both readers follow."""

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from owt_data._errors import LARGEST, DataError, check_choice, check_integer, check_type
from owt_data._options import OrderKind
from owt_data._tokens.sequence import Tokens
from owt_data._tokens.window_order import check_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """One worker's share of the batch of each step.

    With `G = global_batch_size`, the global batch of step `s` is the windows `[s * G, (s + 1) * G)` of the order. Rank
    `r` of `n` gets the rows `[r * G/n, (r + 1) * G/n)` of the batch. Hence the batches do not depend on the world size.

    Raises:
        DataError: `world_size` does not divide `global_batch_size`, or a field is out of its range.
    """

    seq_len: int
    """Inputs per window."""

    global_batch_size: int
    """Windows per step, over all workers."""

    rank: int = 0
    """Index of this worker."""

    world_size: int = 1
    """Number of workers."""

    order: OrderKind = "shuffle"
    """See `window_starts`."""

    seed: int = 2357
    """See `window_starts`."""

    def __post_init__(self) -> None:
        world_size = check_integer("world_size", self.world_size, least=1)
        checked = {
            "seq_len": check_integer("seq_len", self.seq_len, least=1),
            "global_batch_size": check_integer("global_batch_size", self.global_batch_size, least=1),
            "rank": check_integer("rank", self.rank, least=0, most=world_size - 1),
            "world_size": world_size,
            "seed": check_seed(self.seed),
        }
        check_choice("order", self.order, get_args(OrderKind))
        for name, value in checked.items():  # numpy's integers would overflow
            object.__setattr__(self, name, value)
        if self.global_batch_size % world_size:
            raise DataError(
                f"global_batch_size must be a multiple of the {world_size} workers, got {self.global_batch_size}. "
                "Change one of them."
            )

    @property
    def rows_per_step(self) -> int:
        """The number of windows that this worker gets at each step."""
        return self.global_batch_size // self.world_size


def read_batches(tokens: Tokens, batches: Batches, steps: NDArray[np.int64]) -> NDArray[np.integer]:
    """Read the windows of one worker at some steps.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        batches: the batches of the worker.
        steps: numbers of steps, `int64[N]`.

    Returns:
        `uint16` or `uint32[N, G/n, seq_len + 1]`.
    """
    rows = batches.rank * batches.rows_per_step + np.arange(batches.rows_per_step)
    indices = steps[:, None] * batches.global_batch_size + rows
    windows = tokens.windows(indices.ravel(), seq_len=batches.seq_len, order=batches.order, seed=batches.seed)
    return windows.reshape(*indices.shape, batches.seq_len + 1)


def step_starts(tokens: Tokens, batches: Batches, step: int) -> NDArray[np.int64]:
    """Return the position of the first token of each window of a step, of all workers. Reads no tokens.

    Args:
        tokens: `train` or `val` of `open_tokens`.
        batches: the batches of any of the workers.
        step: number of the step, from 0.

    Returns:
        `int64[G]`, in the order of the rows. For a mixture, positions in its sequences, one after another.

    Raises:
        DataError: the step is out of range, or the tokens have no such windows.
    """
    step = check_integer("step", step, least=0, most=LARGEST // batches.global_batch_size - 1)
    indices = step * batches.global_batch_size + np.arange(batches.global_batch_size)
    return tokens.starts(indices, seq_len=batches.seq_len, order=batches.order, seed=batches.seed)


def check_reading(tokens: Tokens, batches: Batches, start_step: int, stop_step: int) -> range:
    """Check the arguments of a reader. Return the steps.

    Raises:
        DataError: an argument has another type, or the range of steps is empty, begins before 0 or is too long.
    """
    check_tokens(tokens)
    check_type("batches", batches, Batches, "owt_data.Batches", "Make one first.")
    start_step = check_integer("start_step", start_step, least=0)
    stop_step = check_integer("stop_step", stop_step, least=start_step + 1)
    check_integer("stop_step", stop_step, least=0, most=LARGEST // batches.global_batch_size)
    return range(start_step, stop_step)


def check_tokens(tokens: Tokens) -> None:
    """Raise `DataError` unless these are tokens."""
    check_type("tokens", tokens, Tokens, "train or val of open_tokens", "Open the token files first.")
