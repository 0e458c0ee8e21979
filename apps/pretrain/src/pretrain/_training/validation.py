"""The loss on validation tokens, in nats per token and in bits per byte of text."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from nnx_gpt2 import GPT2Config, make_eval_step, make_tree_eval_step, put_batch
from owt_data import Tokenizer, Tokens
from pretrain._run.step_losses import ValLosses
from pretrain._training.device_memory import compile_what_fits

# Windows that are read at once to count the bytes of their text.
_WINDOWS_AT_ONCE = 256


class Validation:
    """Evaluation of parameters on the same tokens each time, whatever the batch size and the number of processes.

    Args:
        model: the model's configuration.
        val: the validation tokens, at least one window.
        num_tokens: number of tokens to predict, as windows spread evenly over all tokens, at least one window. None, or
            a number that is too large, predicts each token except the first once: windows follow each other, and the
            last one, which ends with the tokens, counts only the tokens that the one before it has not predicted.
        batch_size: windows per step, over all processes.
        fill_steps: True raises the batch size to a multiple, to at most `model.loss_chunk_tokens` tokens. The steps of
            small batches leave a device idle.
        mesh: the mesh of the parameters; None for a single device.
        num_shards: shards of a batch, whose losses are computed alone, on a mesh; None computes those of a device
            together.
        end_of_text: the last token of each document, to restrict attention to a document; None does not.
    """

    def __init__(
        self,
        model: GPT2Config,
        val: Tokens,
        *,
        num_tokens: int | None,
        batch_size: int,
        fill_steps: bool = False,
        mesh: jax.sharding.Mesh | None = None,
        num_shards: int | None = None,
        end_of_text: int | None = None,
    ) -> None:
        self._val = val
        self._seq_len = model.seq_len
        self._batch_size = batch_size
        self._mesh = mesh
        self._step: Any
        if mesh is None or num_shards is None:
            self._step = make_eval_step(model, mesh, end_of_text=end_of_text)
        else:
            self._step = make_tree_eval_step(model, mesh, num_shards=num_shards, end_of_text=end_of_text)
        num_predicted, complete = len(val) - 1, val.num_windows(model.seq_len)
        self.is_full = num_tokens is None or num_tokens >= num_predicted
        rest = num_predicted - complete * model.seq_len
        if num_tokens is None or self.is_full:
            self._indices, self._rest = np.arange(complete + (rest > 0)), rest
        else:
            count = max(1, num_tokens // model.seq_len)
            self._indices, self._rest = np.arange(count) * complete // count, 0
        if fill_steps:
            most = model.loss_chunk_tokens // (batch_size * model.seq_len)
            self._batch_size *= max(1, min(most, len(self._indices) // batch_size))
        self._last_window = last_tokens(val, model.seq_len + 1) if self._rest else None
        self.num_tokens = num_predicted if self.is_full else len(self._indices) * model.seq_len
        """Number of predicted tokens."""
        self._num_bytes: int | None = None

    def fit(self, params: Any) -> None:
        """Lower the batch size until a step fits the memory of this process's device. For a single device.

        Args:
            params: the parameters.
        """
        largest = min(self._batch_size, len(self._indices))
        self._step, self._batch_size = compile_what_fits(
            self._step, params, largest, self._seq_len, self._read(np.arange(1)).dtype
        )

    def loss(self, params: Any, track: Callable[[range], Iterable[int]] = iter) -> float:
        """Return the mean loss in nats per token. See `evaluate`."""
        return self.evaluate(params, track)[0]

    def evaluate(self, params: Any, track: Callable[[range], Iterable[int]] = iter) -> tuple[float, ValLosses]:
        """Return the mean loss in nats per token, and those of the windows.

        Args:
            params: the parameters.
            track: wraps the steps, to show progress.
        """
        local = self._batch_size // jax.process_count()
        sums = []
        for first in track(range(0, len(self._indices), self._batch_size)):
            # The last batch is filled up with the first windows, which count nothing.
            rows = np.arange(first, first + self._batch_size)
            mine = rows[jax.process_index() * local :][:local] % len(self._indices)
            windows = self._read(mine)
            batch = jax.device_put(windows) if self._mesh is None else put_batch(windows, self._mesh)
            sums.append(
                _sum_last(self._step(params, batch), np.where(rows < len(self._indices), self._counts(rows), 0))
            )
        sums = [np.asarray(of_batch, np.float64) for of_batch in sums]
        rows = np.arange(len(self._indices))
        losses = (np.concatenate(sums)[: len(rows)] / self._counts(rows)).astype(np.float32)
        total = sum(float(of_batch.sum()) for of_batch in sums)
        return total / self.num_tokens, ValLosses(losses=losses, last_count=self._rest or self._seq_len)

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> float | None:
        """Return a loss in bits per byte of the text of the predicted tokens, or None if this text is empty.

        End-of-text tokens count in the loss, and have no bytes.

        Args:
            loss: mean loss in nats per token.
            tokenizer: the tokenizer of the tokens.
        """
        if self._num_bytes is None:
            lengths = np.zeros(tokenizer.n_vocab, np.int64)
            for token_id in range(tokenizer.n_vocab):
                if not tokenizer.is_special_token(token_id):
                    lengths[token_id] = len(tokenizer.decode_single_token_bytes(token_id))
            self._num_bytes = 0
            for first in range(0, len(self._indices), _WINDOWS_AT_ONCE):
                rows = np.arange(first, min(first + _WINDOWS_AT_ONCE, len(self._indices)))
                is_predicted = np.arange(self._seq_len) >= self._seq_len - self._counts(rows)[:, None]
                self._num_bytes += int(lengths[self._read(rows)[:, 1:]][is_predicted].sum())
        return loss * self.num_tokens / (math.log(2) * self._num_bytes) if self._num_bytes else None

    def _counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens, from the end, count in each of these windows."""
        return np.where((rows == len(self._indices) - 1) & (self._rest > 0), self._rest, self._seq_len)

    def _read(self, rows: NDArray[np.int64]) -> NDArray[np.integer]:
        """Read windows, `uint16[N, seq_len + 1]`."""
        is_last = (rows == len(self._indices) - 1) & (self._rest > 0)
        indices = np.where(is_last, 0, self._indices[rows])
        windows = self._val.windows(indices, seq_len=self._seq_len, order="sequential", seed=0)
        if self._last_window is not None:
            windows[is_last] = self._last_window
        return windows


def last_tokens(tokens: Tokens, count: int) -> NDArray[np.integer]:
    """Read the last tokens, at least two, as windows of a single input."""
    pairs = tokens.windows(np.arange(len(tokens) - count, len(tokens) - 1), seq_len=1, order="sequential", seed=0)
    return np.append(pairs[:, 0], pairs[-1:, 1])


@jax.jit
def _sum_last(losses: jax.Array, counts: jax.Array | NDArray[np.int64]) -> jax.Array:
    """Sum the last `counts[i]` losses of each row, `float32[B, T]` to `float32[B]`."""
    is_counted = jnp.arange(losses.shape[1]) >= losses.shape[1] - counts[:, None]
    return jnp.where(is_counted, losses, 0).sum(axis=1)
